"""Are the recomputed statistics those of all values, on any number of workers, and is nothing else touched?"""

import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from largebatch import audit
from largebatch.errors import ConfigError
from largebatch.recipe.batchnorm import average_statistics, batchnorm_over, recompute_statistics
from oracles import recipe_batchnorm as oracle
from workers import WorkerError, on_workers


def batches_of(sizes: list[int], *places: int, seed: int = 0, offset: float = 0.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    means = torch.arange(3).view(3, *[1] * len(places)) + offset
    drawn = [torch.randn(size, 3, *places, dtype=torch.float64, generator=generator) for size in sizes]
    return [values + means + number for number, values in enumerate(drawn)]


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5), places=st.sampled_from([(), (2,), (2, 3)]),
       seed=st.integers(0, 99))  # fmt: skip
def test_they_are_the_mean_and_population_variance_of_all_values(sizes, places, seed):
    # Wu and Johnson 2021: within batches and between their means, every value alike, however unevenly batched.
    layer = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(places)](3).double()
    batches = batches_of(sizes, *places, seed=seed)
    recompute_statistics(layer, batches)
    mean, var = oracle.population([batch.numpy() for batch in batches])
    np.testing.assert_allclose(layer.running_mean, mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(layer.running_var, var, rtol=1e-12, atol=1e-12)


def test_over_one_batch_evaluation_is_training():
    # The statistics of the batch are then those it was normalised by, so every layer sees the same.
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
    ).double()
    (x,) = batches_of([8], 5)
    recompute_statistics(model, [x])
    torch.testing.assert_close(model.eval()(x), model.train()(x), rtol=1e-10, atol=1e-10)


def test_far_from_zero_nothing_is_lost_in_float32():
    # Mean 1e4 and variance 1: the mean of squares would keep one digit of the variance; sums in float64 keep seven.
    batches = [batch.float() for batch in batches_of([64] * 20, 4, offset=1e4)]
    layer = nn.BatchNorm1d(3)
    recompute_statistics(layer, batches)
    mean, var = oracle.population([batch.double().numpy() for batch in batches])
    np.testing.assert_allclose(layer.running_mean, mean, rtol=1e-7)
    np.testing.assert_allclose(layer.running_var, var, rtol=1e-6)


class Touchy(nn.Module):
    """A net with every thing that a pass could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen, self.unused = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3)
        self.without = nn.BatchNorm1d(3, track_running_stats=False)
        self.drop, self.calls = nn.Dropout(0.5), 0

    def train(self, mode: bool = True) -> nn.Module:
        raise AssertionError("a user's train() may do anything: it is not called")

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        assert (self.drop.training, self.norm.training, torch.is_grad_enabled()) == (False, True, False)
        draw = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return self.without(self.frozen(self.drop(self.norm(x * scale)))) + draw


def test_nothing_else_is_touched():
    model = Touchy().double()
    model.norm.weight.grad = torch.ones(3).double()
    model.norm(batches_of([4])[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    draws = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    loader = DataLoader(TensorDataset(batches_of([40])[0]), batch_size=8, shuffle=True)  # draws a seed for its epoch
    recompute_statistics(model, loader)
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert np.array_equal(np.random.get_state()[1], draws[1])  # noqa: NPY002
    assert random.getstate() == draws[2]
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.norm.weight.grad, torch.ones(3).double())
    assert not model.norm._forward_pre_hooks
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"norm.running_mean", "norm.running_var"}
    assert model.calls == 5


@pytest.mark.parametrize("make", [lambda x: x, lambda x: (x, "label"), lambda x: [x], lambda x: {"x": x, "scale": 1.0}])
def test_a_batch_is_a_tensor_or_has_one_first_or_names_its_parts(make):
    model = Touchy().double()
    batches = batches_of([4, 5, 6])
    recompute_statistics(model, (make(batch) for batch in batches), num_batches=2)
    assert model.calls == 2
    np.testing.assert_allclose(
        model.norm.running_mean, oracle.population([b.numpy() for b in batches[:2]])[0], rtol=1e-12
    )


def test_no_more_batches_are_drawn_than_asked_for():
    rest = iter(batches_of([4, 5, 6]))
    recompute_statistics(nn.BatchNorm1d(3).double(), rest, num_batches=2)
    assert len(next(rest)) == 6


def test_ghost_layers_normalise_by_runs_during_the_pass():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double()
    ghost = batchnorm_over(copy.deepcopy(model), 4, local_batch=8)
    batches = batches_of([8, 8])
    recompute_statistics(ghost, batches)
    recompute_statistics(model, [run for batch in batches for run in batch.split(4)])
    for ours, theirs in zip(ghost.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_compiled_model_gets_the_same():
    layer, plain = (nn.BatchNorm1d(3).double() for _ in range(2))
    compiled = torch.compile(layer, backend="eager")
    batches = batches_of([4, 4])
    for each in (compiled, plain):
        each(batches[0])
        recompute_statistics(each, batches)
    torch.testing.assert_close(layer.running_var, plain.running_var, rtol=0, atol=0)


class Fails(nn.BatchNorm1d):
    def forward(self, x):
        if len(x) == 5:
            raise RuntimeError("five")
        return super().forward(x)


def test_after_an_error_all_is_as_it_was():
    layer = Fails(3).double()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match="five"):
        recompute_statistics(layer, batches_of([4, 5]))
    with pytest.raises(ConfigError, match=r"ended after 1, and 3 were asked for"):
        recompute_statistics(layer, batches_of([4]), num_batches=3)
    with pytest.raises(ConfigError, match=r"ended after 0, and at least 1"):
        recompute_statistics(layer, [])
    with pytest.raises(ConfigError, match=r"num_batches is at least 1, or None for all; got 0"):
        recompute_statistics(layer, [], num_batches=0)
    for model in (nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Sequential(layer.eval())):
        with pytest.raises(ConfigError, match=r"no batch norm layer with running statistics that is not frozen"):
            recompute_statistics(model, [])
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert not layer._forward_pre_hooks


def test_in_evaluation_mode_frozen_weights_tell_frozen_layers():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double().eval()
    model[0].requires_grad_(False)
    recompute_statistics(model, batches_of([4]))
    assert torch.equal(model[0].running_var, torch.ones(3).double())
    assert not torch.equal(model[1].running_var, torch.ones(3).double())
    recompute_statistics(model.requires_grad_(False), batches_of([4]))  # an average of weights: nothing needs gradients
    assert not torch.equal(model[0].running_var, torch.ones(3).double())


SHARES = {1: [[4, 3]], 2: [[4, 3], [6]], 4: [[4], [3, 2, 2], [5], [6, 2]]}


def share_out(rank: int, world_size: int, ddp: bool) -> list[Tensor]:
    layer = nn.Sequential(nn.BatchNorm1d(3)).double()
    model = DistributedDataParallel(layer) if ddp else layer
    flat = [size for share in SHARES[world_size] for size in share]
    start = sum(len(share) for share in SHARES[world_size][:rank])
    recompute_statistics(model, batches_of(flat)[start : start + len(SHARES[world_size][rank])])
    return [layer[0].running_mean.numpy(), layer[0].running_var.numpy()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("ddp", [False, True])
def test_workers_pool_their_uneven_shares(world_size, ddp):
    wanted = oracle.population([b.numpy() for b in batches_of([s for share in SHARES[world_size] for s in share])])
    for found in on_workers(world_size, share_out, world_size, ddp):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def fail_on_one(rank: int) -> None:
    recompute_statistics(Fails(3).double(), batches_of([4 + rank]))


def hear_of_it(rank: int) -> str:
    try:
        fail_on_one(rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_failure_on_one_worker_reaches_all_and_nothing_hangs():
    first, second = on_workers(2, hear_of_it)
    assert first.startswith("ConfigError: 1 other worker(s) could not recompute")
    assert second == "RuntimeError: five"
    with pytest.raises(WorkerError, match="could not recompute"):
        on_workers(2, fail_on_one)


def uneven_group(rank: int, counts: list[int]) -> str:
    torch.manual_seed(0)
    model = batchnorm_over(
        nn.Sequential(nn.BatchNorm1d(3)), 4 * len(counts), local_batch=4, world_size=len(counts), rank=rank
    )
    before = model[0].running_mean.clone()
    try:
        recompute_statistics(model, [torch.randn(4, 3) for _ in range(counts[rank])])
    except ConfigError as error:
        assert torch.equal(model[0].running_mean, before)
        return str(error)
    return "fine"


@pytest.mark.parametrize("counts", [[2, 3], [3, 2, 3, 3], [0, 1]])
def test_uneven_shares_of_a_group_layer_are_one_error_everywhere_and_no_hang(counts):
    ended, least = counts.index(min(counts)), min(counts)
    found = on_workers(len(counts), uneven_group, counts, seconds=40.0)
    assert all(f"worker {ended} ended after {least}," in said for said in found), found
    assert on_workers(2, uneven_group, [2, 2]) == ["fine", "fine"]


def test_values_that_are_not_finite_change_nothing():
    model = nn.Sequential(nn.BatchNorm1d(2))
    before = model[0].running_mean.clone()
    with pytest.raises(ConfigError, match="not all finite"):
        recompute_statistics(model, [torch.tensor([[1.0, 2.0], [float("nan"), 3.0]])])
    assert torch.equal(model[0].running_mean, before)


def averaged(rank: int, group_size: int) -> list[float]:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(2).half())
    with torch.no_grad():
        model[0].running_mean += rank
        model[0].running_var += 2**rank
    group = dist.new_subgroups(group_size)[0]
    average_statistics(model, group)
    average_statistics(nn.Linear(2, 2), group)
    assert model[2].running_var.dtype == torch.half
    return [model[0].running_mean[0].item(), model[0].running_var[2].item(), model[2].running_var[0].item()]


@pytest.mark.parametrize(("world_size", "group_size"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_running_statistics_are_averaged_over_the_group(world_size, group_size):
    for rank, found in enumerate(on_workers(world_size, averaged, group_size)):
        mates = [other for other in range(world_size) if other // group_size == rank // group_size]
        assert found == [float(np.mean(mates)), 1 + float(np.mean([2.0**mate for mate in mates])), 1.0]


def test_on_one_process_nothing_is_averaged():
    layer = nn.BatchNorm1d(3)
    average_statistics(layer)
    assert torch.equal(layer.running_var, torch.ones(3))


def test_a_recomputation_is_no_evaluation_in_training_mode_to_the_audit():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with audit.watch(model, optimizer) as watched:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).mean().backward()
            optimizer.step()
        recompute_statistics(model, [torch.randn(8, 3) for _ in range(3)])
    assert "LB203" not in [finding.code for finding in watched.findings]
    assert model[1].momentum == 0.1 and model[1].training
