"""Is every worker's share right, whatever the workers hold and whatever becomes of their gradients?"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from largebatch.errors import ConfigError
from largebatch.recipe.batch_sampler import ShuffledLoader
from largebatch.recipe.step_loss import StepLoss, StepShare, total_units
from oracles.recipe_loss import PAD, average_of_averages, gap, mean_gradient, summed_gradient, tokens
from oracles.recipe_shuffle import stream
from workers import on_workers

DIM, CLASSES, LENGTH = 3, 5, 6
CLOSE = {"rtol": 1e-10, "atol": 1e-12}  # float64: only the order of sums differs, about 1e-15

DEALS: dict[int, list[list[list[int]]]] = {
    # world size -> for each worker the sequences in each of its microbatches, uneven in sequences and in tokens
    1: [[[0, 1, 2], [3], [4, 5, 6, 7, 8, 9]]],
    2: [[[0], [1, 2, 3, 4, 5, 6]], [[7, 8], [9]]],
    4: [[[0, 1, 2], [3]], [[4], [5]], [[6, 7], [8]], [[9], []]],
}


def data() -> tuple[np.ndarray, np.ndarray]:
    return tokens(10, LENGTH, DIM, CLASSES, seed=0)


def weights() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((DIM, CLASSES))


def model() -> nn.Linear:
    layer = nn.Linear(DIM, CLASSES, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weights().T))
    return layer


def loss_sum(net: nn.Module, rows: list[int]) -> Tensor:
    inputs, targets = (torch.from_numpy(array[rows]) for array in data())
    logits = net(inputs)
    return nn.functional.cross_entropy(
        logits.reshape(-1, CLASSES), targets.reshape(-1), ignore_index=PAD, reduction="sum"
    )


def wrap(net: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "fsdp2":
        return fully_shard(net)
    if kind == "hsdp":
        return fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return net


def full_gradient(net: nn.Module) -> Tensor:
    (parameter,) = net.parameters()
    gradient = parameter.grad
    assert gradient is not None
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def accumulating(net: Any, kind: str, last: bool) -> Any:
    if kind == "ddp" and not last:
        return net.no_sync()
    if kind in ("fsdp2", "hsdp"):
        net.set_requires_gradient_sync(last)
    return nullcontext()


def train_one_step(rank: int, kind: str, deal: list[list[list[int]]], no_sync: bool) -> tuple[list[list[float]], Any]:
    net = wrap(model(), kind)
    step_loss = StepLoss(net, gradients={"sum": "sum", "mean": "mean"}.get(kind))  # pyright: ignore
    microbatches = deal[rank]
    units = sum((torch.from_numpy(data()[1][rows]) != PAD).sum() for rows in microbatches)
    share = step_loss.of(units)
    for number, rows in enumerate(microbatches, start=1):
        with accumulating(net, kind, last=number == len(microbatches)) if no_sync else nullcontext():
            if rows:
                share.part(loss_sum(net, rows)).backward()
            else:
                share.nothing(net(torch.from_numpy(data()[0][:1]))).backward()
    if kind in ("sum", "mean"):
        (parameter,) = net.parameters()
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        if kind == "mean":
            parameter.grad /= dist.get_world_size()
    return full_gradient(net).T.tolist(), (share.total_units, step_loss.averaged_over, step_loss.reason)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "sum", "mean"])
@pytest.mark.parametrize("no_sync", [True, False])
def test_the_workers_gradient_is_that_of_one_process_over_kn(kind: str, world_size: int, no_sync: bool):
    # Goyal 2017, remark 3, over uneven sequences, tokens and padding; in the deal over 4 workers the last has a
    # microbatch without a single unit.
    inputs, targets = data()
    expected = mean_gradient(weights(), inputs, targets)
    results = on_workers(world_size, train_one_step, kind, DEALS[world_size], no_sync)
    for gradient, (total, averaged_over, _) in results:
        np.testing.assert_allclose(gradient, expected, **CLOSE)
        assert total == (targets != PAD).sum()
        assert averaged_over == (1 if kind == "sum" else world_size)


def test_a_mesh_of_two_axes_is_averaged_over_both():
    expected = mean_gradient(weights(), *data())
    for gradient, (_, averaged_over, reason) in on_workers(4, train_one_step, "hsdp", DEALS[4], True):
        np.testing.assert_allclose(gradient, expected, **CLOSE)
        assert averaged_over == 4
        assert reason == "fully_shard averages gradients over 4 workers: every loss is multiplied by that"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_worker_without_a_unit_in_the_step_neither_hangs_nor_gives_nan(kind: str):
    deal = [[list(range(10))], [[]]]
    expected = mean_gradient(weights(), *data())
    for gradient, _ in on_workers(2, train_one_step, kind, deal, True):
        np.testing.assert_allclose(gradient, expected, **CLOSE)


def test_workers_may_have_unequal_numbers_of_microbatches_under_no_sync():
    # One backward of each worker is synced, its last; fully_shard gathers weights in every forward and cannot do this.
    deal = [[[0], [1, 2], [3], [4, 5, 6]], [[7, 8, 9]]]
    expected = mean_gradient(weights(), *data())
    for gradient, _ in on_workers(2, train_one_step, "ddp", deal, True):
        np.testing.assert_allclose(gradient, expected, **CLOSE)


def train_an_epoch(rank: int, kind: str, batch: int, keep_short: bool) -> list[list[float]]:
    """A whole loop of the house's parts: loader, share of the loss, DDP or fully_shard, plain SGD."""
    net: Any = wrap(model(), kind)
    step_loss = StepLoss(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    loader = ShuffledLoader(range(10), batch=batch, seed=0, microbatch=2, keep_short=keep_short, collate_fn=list)
    step: list[list[int]] = []
    for number, rows in enumerate(loader, start=1):
        step.append(rows)
        if number % loader.accumulation:
            continue
        share = step_loss.of(sum((torch.from_numpy(data()[1][rows]) != PAD).sum() for rows in step))
        for rows in step:
            share.part(loss_sum(net, rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step = []
    (parameter,) = net.parameters()
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).T.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_epoch_on_any_number_of_workers_ends_in_the_weights_of_one(kind: str, world_size: int):
    # Eq. (2) of Goyal 2017 over the global order, in numpy. The last batch is filled from the next epoch.
    w, order = weights(), stream(10, 0, 0, 12)
    for step in range(3):
        rows = order[4 * step : 4 * step + 4]
        w = w - 0.5 * mean_gradient(w, data()[0][rows], data()[1][rows])
    for result in on_workers(world_size, train_an_epoch, kind, 4, False):
        np.testing.assert_allclose(result, w, **CLOSE)


def test_a_short_last_batch_counts_as_what_it_holds():
    # 10 examples by 6: the last step has 4, of which one worker of 3 has 2 and the others 1, in tokens as it comes.
    w, order = weights(), stream(10, 0, 0, 10)
    for rows in (order[:6], order[6:]):
        w = w - 0.5 * mean_gradient(w, data()[0][rows], data()[1][rows])
    for result in on_workers(3, train_an_epoch, "ddp", 6, True):
        np.testing.assert_allclose(result, w, **CLOSE)


def average_averages(rank: int, deal: list[list[list[int]]]) -> list[list[float]]:
    """What a loop gets that takes DDP's mean of the mean losses, as most do."""
    net = DistributedDataParallel(model())
    (rows,) = deal[rank]
    count = int((data()[1][rows] != PAD).sum())
    (loss_sum(net, rows) / count).backward()
    return full_gradient(net).T.tolist()


def test_an_average_of_averages_is_off_by_what_the_formula_says():
    # d = sum_j (1/k - n_j/kn) g_j, from Goyal 2017, remark 3, by subtraction; about a tenth of the gradient here.
    inputs, targets = data()
    parts = [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]
    right = mean_gradient(weights(), inputs, targets)
    off = gap(weights(), inputs, targets, [np.array(part) for part in parts])
    assert np.linalg.norm(off) > 0.02 * np.linalg.norm(right)
    for gradient in on_workers(2, average_averages, [[part] for part in parts]):
        np.testing.assert_allclose(np.array(gradient) - right, off, **CLOSE)


@settings(max_examples=50)
@given(parts=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_the_formula_is_the_gap_for_any_parts_and_zero_for_even_ones(parts: list[int], seed: int):
    inputs, targets = tokens(sum(parts), LENGTH, DIM, CLASSES, seed)
    dealt = np.split(np.arange(sum(parts)), np.cumsum(parts)[:-1])
    wrong = average_of_averages(weights(), inputs, targets, dealt)
    right = mean_gradient(weights(), inputs, targets)
    np.testing.assert_allclose(wrong - right, gap(weights(), inputs, targets, dealt), **CLOSE)
    targets[:] = 0  # no padding: parts of one size hold as many units
    even = np.split(np.arange(sum(parts)), sum(parts))
    assert np.abs(gap(weights(), inputs, targets, even)).max() < 1e-14


def test_the_oracle_is_the_derivative_of_its_loss():
    # Central differences of the mean cross-entropy, written out anew; h = 1e-6 leaves about 1e-9.
    inputs, targets = data()

    def mean_loss(w: np.ndarray) -> float:
        kept = targets.reshape(-1) != PAD
        logits = (inputs.reshape(-1, DIM) @ w)[kept]
        log_sum = np.log(np.exp(logits).sum(axis=1))
        return float((log_sum - logits[np.arange(kept.sum()), targets.reshape(-1)[kept]]).mean())

    numeric = np.zeros((DIM, CLASSES))
    for place in np.ndindex(DIM, CLASSES):
        shift = np.zeros((DIM, CLASSES))
        shift[place] = 1e-6
        numeric[place] = (mean_loss(weights() + shift) - mean_loss(weights() - shift)) / 2e-6
    np.testing.assert_allclose(mean_gradient(weights(), inputs, targets), numeric, rtol=1e-6, atol=1e-8)
    assert summed_gradient(weights(), inputs, targets)[1] == (targets != PAD).sum()


def sums_in_subgroups(rank: int) -> tuple[int, int]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return total_units(rank + 1, group=pairs[rank // 2]), total_units(10 * rank)


def test_units_are_added_over_the_group_that_is_named():
    assert on_workers(4, sums_in_subgroups) == [(3, 60), (3, 60), (7, 60), (7, 60)]


def ddp_in_pairs(rank: int) -> tuple[int, int]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    step_loss = StepLoss(DistributedDataParallel(model(), process_group=pairs[rank // 2]))
    return step_loss.of(rank + 1).total_units, step_loss.averaged_over


def test_the_workers_are_those_of_the_models_own_group():
    assert on_workers(4, ddp_in_pairs) == [(3, 2), (3, 2), (7, 2), (7, 2)]


def refusal(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def bad_counts(rank: int) -> list[str]:
    return [
        refusal(lambda: total_units(-1 if rank else 5)),
        refusal(lambda: total_units(0)),
        refusal(lambda: total_units(2.5 if rank else 1)),  # pyright: ignore
        str(total_units(rank + 1)),
    ]


def test_a_bad_count_on_one_worker_is_refused_on_all_and_none_waits():
    others = "1 other worker(s) gave no whole number of units for this step: see their errors."
    empty = "no worker has a unit in this step, so that it has no mean loss. Leave the step out on every worker."
    own = "a worker's units in a step are a whole number of at least 0, over all its microbatches; got {}. "
    own += "Count them, without padding."
    first, second = on_workers(2, bad_counts)
    assert first == [others, empty, others, "3"]
    assert second == [own.format(-1), empty, own.format(2.5), "3"]


def what_cannot_be_seen(rank: int) -> list[str]:
    divided = fully_shard(model())
    divided.set_gradient_divide_factor(1.0)
    outside = nn.Sequential(DistributedDataParallel(model()), nn.Linear(CLASSES, 1, dtype=torch.float64))
    single = dist.new_group([0]), dist.new_group([1])
    apart = nn.Sequential(
        DistributedDataParallel(model()), DistributedDataParallel(model(), process_group=single[rank])
    )
    half = nn.Sequential(fully_shard(model()), nn.Linear(CLASSES, 1, dtype=torch.float64))
    return [refusal(lambda net=net: StepLoss(net)) for net in (model(), divided, outside, apart, half)]


def test_what_cannot_be_seen_is_asked_for():
    for plain, divided, outside, apart, half in on_workers(2, what_cannot_be_seen):
        assert plain == (
            "this job has 2 workers, but Linear is neither in DistributedDataParallel nor under fully_shard, so "
            "whether its gradients are averaged or added cannot be seen. Give the wrapped model, or gradients='mean' "
            "or 'sum'."
        )
        assert divided.startswith("fully_shard divides gradients by 1 here, as set_gradient_divide_factor asked")
        assert outside.startswith("DistributedDataParallel does not exchange the gradient of '1.weight'")
        assert apart.startswith("parts of the model are averaged over different workers by DistributedDataParallel")
        assert half.startswith("fully_shard does not exchange the gradient of '1.weight'")


def test_one_worker_needs_nothing():
    step_loss = StepLoss(model())
    share = step_loss.of(torch.tensor(10))
    assert share == StepShare(total_units=10, averaged_over=1)
    assert step_loss.reason == "one worker: nothing is averaged"
    for bad in (-1, 0, True, 1.0, torch.ones(2), torch.tensor(1.5), "3"):
        with pytest.raises(ConfigError):
            step_loss.of(bad)  # pyright: ignore
    with pytest.raises(ConfigError, match=r"gradients='add' is not known\. Use one of: mean, sum\."):
        StepLoss(model(), gradients="add")  # pyright: ignore
