"""Is every epoch dealt out whole and once, in one order for any number of workers?"""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from largebatch.errors import ConfigError
from largebatch.recipe.sampler import ShuffledStream, draws, eval_share, forward_seed, rank_slice
from oracles.recipe_shuffle import draw, key, permutation, splitmix64
from workers import on_workers


def test_the_oracle_is_splitmix64():
    # The first outputs of the published generator from state 0.
    assert [splitmix64(0, number) for number in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_an_epoch_is_the_permutation_of_seed_and_epoch(seed: int):
    stream = ShuffledStream(50, seed)
    for epoch in (0, 1, 7):
        assert stream.indices(50 * epoch, 50).tolist() == permutation(50, seed, epoch)


@given(
    num_examples=st.integers(1, 60), k=st.integers(1, 8), epoch=st.integers(0, 10**9), seed=st.integers(0, 2**64 - 1)
)
def test_the_k_parts_of_every_epoch_are_disjoint_and_complete(num_examples: int, k: int, epoch: int, seed: int):
    # Goyal 2017, remark 4: one shuffle an epoch, dealt out to k workers. The data is a multiple of k here, as a part
    # of an epoch is; the next test cuts it into any batches.
    num_examples *= k
    stream = ShuffledStream(num_examples, seed)
    start = epoch * num_examples
    parts = [stream.indices(*rank_slice(start, num_examples, rank, k)).tolist() for rank in range(k)]
    assert {len(part) for part in parts} == {num_examples // k}
    assert sorted(itertools.chain(*parts)) == list(range(num_examples))


@given(data=st.data(), world_size=st.integers(1, 5), seed=st.integers(0, 9))
def test_what_all_workers_take_over_many_steps_is_every_epoch_once(data: st.DataObject, world_size: int, seed: int):
    num_examples = data.draw(st.integers(world_size, 40))
    batch = world_size * data.draw(st.integers(1, num_examples // world_size))
    stream = ShuffledStream(num_examples, seed)
    num_steps = -(-3 * num_examples // batch)
    taken: list[int] = []
    for step in range(num_steps):
        for rank in range(world_size):
            taken += stream.indices(*rank_slice(step * batch, batch, rank, world_size)).tolist()
    assert len(taken) == num_steps * batch  # the batch is constant
    for epoch in range(3):
        assert sorted(taken[epoch * num_examples :][:num_examples]) == list(range(num_examples))
        assert taken[epoch * num_examples :][:num_examples] == permutation(num_examples, seed, epoch)


def test_the_global_order_is_the_same_for_any_world_size_and_batch():
    orders = set[tuple[int, ...]]()
    for batch, world_size in ((12, 1), (12, 2), (12, 3), (12, 12), (24, 4), (8, 2)):
        stream = ShuffledStream(30, seed=5)
        steps = range(0, 120, batch)
        order = [
            stream.indices(*rank_slice(start, batch, rank, world_size)) for start in steps for rank in range(world_size)
        ]
        orders.add(tuple(np.concatenate(order).tolist()))
    assert len(orders) == 1


@given(start=st.integers(0, 200), count=st.integers(0, 17))
def test_a_position_alone_resumes_the_stream(start: int, count: int):
    used = ShuffledStream(17, seed=3)
    for position in range(0, start, 11):
        used.indices(position, 11)
    assert used.indices(start, count).tolist() == ShuffledStream(17, seed=3).indices(start, count).tolist()


def test_an_epoch_of_156_39_steps_is_exact():
    # Goyal 2017, sec. 2.2: 1,281,167 examples in batches of 8,192; the 157th batch ends in epoch 1.
    stream = ShuffledStream(1_281_167, seed=0)
    position = 156 * 8192
    epochs = stream.epochs(position, 8192)
    assert (epochs == 0).sum() == 1_281_167 - position
    assert (stream.epoch_of(position), stream.epoch_of(position + 8191)) == (0, 1)
    seen = np.concatenate((stream.indices(0, position), stream.indices(position, 8192)))
    assert (np.bincount(seen[:1_281_167]) == 1).all()


def test_epochs_says_of_each_position_what_epoch_of_says():
    stream = ShuffledStream(5, seed=0)
    assert stream.epochs(3, 5).tolist() == [stream.epoch_of(position) for position in range(3, 8)] == [0, 0, 1, 1, 1]


def test_epochs_and_seeds_are_shuffled_anew_and_evenly():
    # 24 orders of 4 examples over 4,800 epochs: chi-square with 23 degrees of freedom is below 49.7 in 99.9 %.
    stream = ShuffledStream(4, seed=11)
    orders = [tuple(stream.indices(4 * epoch, 4).tolist()) for epoch in range(4_800)]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 200.0) ** 2 / 200).sum() < 49.7
    assert len({tuple(ShuffledStream(20, seed).indices(0, 20).tolist()) for seed in range(100)}) == 100


def test_indices_can_be_changed_without_changing_the_stream():
    stream = ShuffledStream(9, seed=0)
    first = stream.indices(0, 9)
    expected = first.tolist()
    first[:] = 0
    assert stream.indices(0, 9).tolist() == expected


def test_only_two_permutations_are_kept():
    tracemalloc.start()
    stream = ShuffledStream(10_000, seed=0)
    for epoch in range(50):
        stream.indices(10_000 * epoch, 1)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 3 * 80_000  # each is 80 kB


@given(seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6), index=st.integers(0, 10**7), num=st.integers(1, 9))
def test_a_draw_is_fixed_by_seed_epoch_and_index(seed: int, epoch: int, index: int, num: int):
    expected = [draw(seed, epoch, index, number) for number in range(num)]
    assert draws(seed, epoch, np.array([index]), num).tolist() == [expected]


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 10**12))
def test_a_forward_is_seeded_by_seed_and_position(seed: int, position: int):
    assert forward_seed(seed, position) == key(seed, 3, 0, position) >> 1  # torch's generators take 63 bits


@given(cuts=st.lists(st.integers(0, 40), max_size=4))
def test_draws_do_not_depend_on_how_the_batch_is_split(cuts: list[int]):
    stream = ShuffledStream(25, seed=4)
    indices = np.concatenate((stream.indices(0, 25), stream.indices(25, 15)))
    epochs = np.concatenate((stream.epochs(0, 25), stream.epochs(25, 15)))
    whole = draws(4, epochs, indices)
    bounds = [0, *sorted(cuts), 40]
    parts = [draws(4, epochs[low:high], indices[low:high]) for low, high in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert whole.shape == (40, 8)
    assert whole.dtype == np.float64
    assert len(np.unique(whole)) == whole.size  # the same example draws anew in the next epoch


def test_no_draw_becomes_1_in_float32():
    many = draws(0, 0, np.arange(100_000))
    assert np.array_equal(many.astype(np.float32), many)


def test_draws_are_uniform_and_unrelated():
    many = draws(0, np.arange(20_000) % 7, np.arange(20_000))
    assert many.min() >= 0
    assert many.max() < 1
    # Standard errors: mean 0.29/sqrt(20,000) = 0.002, variance 0.0005, correlation 0.007; five of each allowed.
    assert np.abs(many.mean(axis=0) - 0.5).max() < 0.01
    assert np.abs(many.var(axis=0) - 1 / 12).max() < 0.0026
    assert np.abs(np.corrcoef(many, rowvar=False) - np.eye(8)).max() < 0.035
    assert abs(np.corrcoef(many[:-1, 0], many[1:, 0])[0, 1]) < 0.035
    assert abs(np.corrcoef(many[:, 0], np.argsort(ShuffledStream(20_000, 0).indices(0, 20_000)))[0, 1]) < 0.035


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: rank_slice(0, 250, 0, 8),
            "a batch of 250 cannot be dealt out evenly to 8 workers. The nearest that can: 248 or 256.",
        ),
        (lambda: rank_slice(0, 3, 0, 8), "The nearest that can: 8."),
        (lambda: rank_slice(0, 8, 4, 4), "there is no worker 4 among 4"),
        (lambda: rank_slice(0, 8, -1, 4), "there is no worker -1 among 4"),
        (lambda: rank_slice(0, 0, 0, 1), "a batch has at least 1 example; got 0"),
        (
            lambda: ShuffledStream(10, 0).indices(0, 11),
            "a batch of 11 is larger than the data, which has 10 examples: it would hold examples twice. "
            "Use a batch of at most 10.",
        ),
        (lambda: ShuffledStream(10, 0).epochs(0, 11), "a batch of 11 is larger than the data"),
        (lambda: ShuffledStream(10, 0).indices(-1, 2), "start at 0; got start=-1, count=2"),
        (lambda: ShuffledStream(10, 0).epoch_of(-1), "start at 0; got start=-1"),
        (lambda: ShuffledStream(0, 0), "there is nothing to shuffle: num_examples is 0"),
        (lambda: ShuffledStream(10, -1), "a seed is a whole number from 0 to 2^64 - 1; got -1"),
        (
            lambda: draws(2**64, 0, np.arange(3)),
            "a seed is a whole number from 0 to 2^64 - 1; got 18446744073709551616",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_with_its_values(call, words: str):
    with pytest.raises(ConfigError) as error:
        call()
    assert words in str(error.value)


@given(num_examples=st.integers(0, 60), world_size=st.integers(1, 9))
def test_every_example_is_evaluated_once_by_one_worker(num_examples: int, world_size: int):
    shares = [eval_share(num_examples, rank, world_size) for rank in range(world_size)]
    assert sorted(itertools.chain(*shares)) == list(range(num_examples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def evaluate(rank: int, num_examples: int) -> tuple[int, float]:
    """A mean over the data: sums and counts added up after a loop that holds no collective."""
    losses = torch.arange(num_examples, dtype=torch.float64) ** 2
    loader = DataLoader(
        TensorDataset(losses), batch_size=2, sampler=eval_share(num_examples, rank, dist.get_world_size())
    )
    sums = torch.zeros(2, dtype=torch.float64)
    for (batch,) in loader:
        sums += torch.tensor([batch.sum(), len(batch)])
    dist.all_reduce(sums)
    return int(sums[1]), float(sums[0] / sums[1])


@pytest.mark.parametrize("num_examples", [3, 10])
def test_the_mean_over_workers_of_unequal_shares_is_the_mean_over_the_data(num_examples: int):
    # 4 workers: shares of 3, 3, 2 and 2, and of 1, 1, 1 and none.
    expected = sum(index**2 for index in range(num_examples)) / num_examples
    assert on_workers(4, evaluate, num_examples) == [(num_examples, expected)] * 4


@pytest.mark.parametrize(("rank", "num_examples", "words"), [(2, 5, "no worker 2 among 2"), (0, -1, "no data of -1")])
def test_a_share_that_does_not_exist_is_refused(rank: int, num_examples: int, words: str):
    with pytest.raises(ConfigError, match=words):
        eval_share(num_examples, rank, 2)
