"""Does a model sharded by fully_shard measure what one process that holds all microbatches measures?

The oracle is a float64 copy of the model in one process: mean gradients by `torch.autograd.grad`, then the many-worker
form of McCandlish et al. 2018, eq. A.2. Sizes are odd, so that shards are padded, and one of four workers has none.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from largebatch.errors import ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor
from oracles import noise_moments as oracle
from workers import on_workers

MICRO, DIM = 4, 5


class Net(nn.Module):
    """A tied weight (in one fully_shard unit), frozen and unused weights, and two blocks that are units."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.embed, self.head = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(DIM, 7), nn.Tanh(), nn.Linear(7, DIM)) for _ in "ab"])
        self.blocks[1][0].bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.away = nn.Linear(3, 1)  # a unit of its own that no forward reaches

    def forward(self, x):
        return self.encode(x)

    def encode(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(x)


AWAY = ("unused", "away")
"""Weights that no forward reaches."""
GROUPS = {"first": "blocks.0.*"}


def shard(model, mesh_shape, **options):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    # torch 2.14 fails where a unit is never used, a dtype to reduce in is set and a backward does not sync.
    away = [model.away] if getattr(options.get("mp_policy"), "reduce_dtype", None) is None else []
    for unit in (*model.blocks, *away, model):
        fully_shard(unit, mesh=mesh, **options)
    return model


def examples(step, number, units=MICRO):
    """The data of microbatch `number`."""
    return torch.randn(units, DIM, generator=torch.Generator().manual_seed(1000 * step + number))


def loss_of(model, x):
    return (model(x).to(x.dtype) - 1).square().sum(1).mean()


def mean_gradients(parts, used=lambda name: True):
    """Of each part, in float64, shape (len(parts), number of weights)."""
    model = Net().double()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and n.split(".")[0] not in AWAY]
    weights = [p for name, p in named if used(name)]
    grads = [torch.autograd.grad(loss_of(model, part.double()), weights) for part in parts]
    return np.stack([torch.cat([g.flatten() for g in each]).numpy() for each in grads])


def expected(parts, used=lambda name: True):
    """(tr(Sigma), |G|^2, max(|gbar|^2, tr/B)) of microbatches in float64."""
    means, sizes = mean_gradients(parts, used), [len(part) for part in parts]
    trace, grad = oracle.of_microbatches(means, sizes)
    mean = np.average(means, axis=0, weights=sizes)
    return trace, grad, max(float(mean @ mean), trace / sum(sizes))


def assert_close(moments, parts, rel=1e-5, used=lambda name: True):
    trace, grad, size = expected(parts, used)
    batch = sum(map(len, parts))
    assert (moments.batch, moments.num_microbatches) == (batch, len(parts))
    assert moments.trace_cov / batch == pytest.approx(trace / batch, abs=rel * size)
    assert moments.grad_sq_norm == pytest.approx(grad, abs=rel * size)


def backwards(model, step, rank, synced, called=None):
    """One backward per entry of `synced`, with gradient sync where it is True."""
    for k, sync in enumerate(synced):
        model.set_requires_gradient_sync(sync)
        (loss_of(model if called is None else called, examples(step, rank * len(synced) + k)) / len(synced)).backward()


def shares(step, world_size, synced):
    """What each worker gives to the sum over them, all workers' one after the other."""
    ends = [k + 1 for k, sync in enumerate(synced) if sync]
    found = []
    for rank in range(world_size):
        parts = [examples(step, rank * len(synced) + k) for k in range(len(synced))]
        found += [torch.cat(parts[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return found


# An element rounded to p bits is wrong by 2^-p of itself at most; norms and the mean then by about as much.
ROUNDING = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7, "float64": 1e-5}
EACH, LAST, MIXED = [True] * 3, [False, False, True], [False, True, True, False, True]
CASES = {
    "one backward": ([True], {}),
    "sync in each": (EACH, {}),
    "sync in the last": (LAST, {}),
    "sync now and then": (MIXED, {}),
    "checkpointed": (EACH, {"checkpointed": True}),
    **{f"reduced in {dtype}": (MIXED, {"reduce": dtype}) for dtype in ROUNDING},
}
MESHES = [(1,), (1, 1), (2,), (4,), (2, 2)]


def train(rank, mesh_shape, synced, checkpointed=False, reduce=None, compiled=False):
    policy = MixedPrecisionPolicy() if reduce is None else MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduce))
    model = shard(Net(checkpointed), mesh_shape, mp_policy=policy)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    found, groups = [], []
    sink = [lambda measured: groups.append(measured.groups)]
    with NoiseScaleMonitor(model, microbatch=MICRO, every=1, groups=GROUPS, on_measured=sink) as monitor:
        for step in range(2):
            model.zero_grad(set_to_none=step == 0)
            backwards(model, step, rank, synced, called)
            found.append(monitor.step())
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return found, groups


def train_all(rank, mesh_shape):
    enough = {name: case for name, case in CASES.items() if np.prod(mesh_shape) * sum(case[0]) > 1}
    return {name: train(rank, mesh_shape, synced, **options) for name, (synced, options) in enough.items()}


@cache
def trained(mesh_shape):
    return on_workers(int(np.prod(mesh_shape)), train_all, mesh_shape)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_workers_together_measure_what_one_process_does(mesh_shape, case):
    """Half-precision gradients are divided by about the root of the workers before they are summed."""
    results, world_size, (synced, options) = trained(mesh_shape), int(np.prod(mesh_shape)), CASES[case]
    if world_size * sum(synced) == 1:
        return  # one gradient has no spread: see the refusals
    found, groups = results[0][case]
    assert all(result[case][0] == found for result in results)  # the same bits on every rank
    for step, moments in enumerate(found):
        parts, rel = shares(step, world_size, synced), ROUNDING[options.get("reduce", "float32")]
        assert_close(moments, parts, rel)
        assert_close(groups[step]["first"], parts, rel, used=lambda name: name.startswith("blocks.0"))


def test_a_compiled_model_measures_the_same():
    for found, _ in on_workers(2, train, (2,), EACH, False, None, True):
        for step, moments in enumerate(found):
            assert_close(moments, shares(step, 2, EACH))


def in_double(rank, world_size):
    model = shard(Net().double(), (world_size,))
    with NoiseScaleMonitor(model, microbatch=MICRO, every=1) as monitor:
        for part in (examples(0, 2 * rank + k).double() for k in range(2)):
            (loss_of(model, part) / 2).backward()
        return monitor.step()


def test_double_precision_is_exact_though_it_is_divided_before_too():
    assert_close(on_workers(2, in_double, 2)[0], shares(0, 2, [True, True]), rel=1e-12)


def without_all_reduce(rank):
    model = shard(Net(), (2, 2))
    with NoiseScaleMonitor(model, microbatch=MICRO, every=1) as monitor:
        for k in range(3):
            model.set_requires_all_reduce(k == 2)
            (loss_of(model, examples(0, 3 * rank + k)) / 3).backward()
        return monitor.step()


def test_accumulating_before_the_all_reduce_shows_every_backward():
    for moments in on_workers(4, without_all_reduce):
        assert_close(moments, shares(0, 4, [True] * 3))


UNITS = [(3, 5, 2), (1, 4, 7)]
"""Of each microbatch of two workers."""


SCALINGS = ["step_mean", "local_mean", "microbatch_mean", "sum"]
PATTERNS = [(True,) * 3, (False, False, True), (False, True, True)]


def uneven(rank, loss_scaling, synced):
    model = shard(Net(), (2,))
    mine, batch = UNITS[rank], sum(map(sum, UNITS))
    divisors = {"step_mean": [batch / 2] * 3, "local_mean": [sum(mine)] * 3, "microbatch_mean": mine, "sum": [1] * 3}
    with NoiseScaleMonitor(model, microbatch=1, every=1, loss_scaling=loss_scaling) as monitor:
        for k, (units, divisor, sync) in enumerate(zip(mine, divisors[loss_scaling], synced, strict=True)):
            model.set_requires_gradient_sync(sync)
            with monitor.microbatch(units):
                (loss_of(model, examples(0, 3 * rank + k, units)) * units / divisor).backward()
        try:
            return monitor.step(), ""
        except ConfigError as error:
            return None, str(error)


@cache
def all_uneven():
    return on_workers(2, lambda rank: {case: uneven(rank, *case) for case in product(SCALINGS, PATTERNS)})


@pytest.mark.parametrize("synced", PATTERNS, ids=str)
@pytest.mark.parametrize("loss_scaling", SCALINGS)
def test_uneven_microbatches_are_weighed_as_their_losses_were_divided(loss_scaling, synced):
    """The oracle solves both equations of eq. A.1 by numpy, with the coefficients a_i that each rule gives."""
    ends = [k + 1 for k, sync in enumerate(synced) if sync]
    rows = []
    for rank, units in enumerate(UNITS):
        for start, end in zip([0, *ends], ends, strict=False):
            rows.append((torch.cat([examples(0, 3 * rank + k, units[k]) for k in range(start, end)]), sum(units)))
    results = [result[loss_scaling, synced] for result in all_uneven()]
    if loss_scaling == "microbatch_mean" and not all(synced):
        assert all("without gradient sync" in why and "sync in every backward" in why for _, why in results)
        return
    means = mean_gradients([data for data, _ in rows])
    b, local = np.array([len(data) for data, _ in rows], dtype=float), np.array([whole for _, whole in rows])
    coefficients = {"step_mean": b / b.sum(), "local_mean": b / local / 2, "microbatch_mean": b / b / 2, "sum": b / 2}
    a = coefficients[loss_scaling]
    small, step = a @ (means**2).sum(1), ((a @ means) ** 2).sum()
    trace, grad = np.linalg.solve([[(a / b).sum(), a.sum()], [(a * a / b).sum(), a.sum() ** 2]], [small, step])
    size = max(step / a.sum() ** 2, trace / b.sum())
    for moments, _ in results:
        assert moments.batch == b.sum()
        assert moments.trace_cov / b.sum() == pytest.approx(trace / b.sum(), abs=1e-5 * size)
        assert moments.grad_sq_norm == pytest.approx(grad, abs=1e-5 * size)


def bits(rank, mesh_shape, policy, watched):
    torch.manual_seed(rank)
    model = shard(Net(), mesh_shape, mp_policy=policy or MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = NoiseScaleMonitor(model, microbatch=MICRO, every=2) if watched else None
    found = []
    for step in range(4):
        backwards(model, step, rank, [True, False, True])
        if monitor is not None and step < 3:
            monitor.step()
        found += [p.grad.to_local().numpy().tobytes() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None and step == 2:
            monitor.close()
    found += [p.to_local().detach().numpy().tobytes() for p in model.parameters()]
    return [*found, torch.get_rng_state().numpy().tobytes()]


HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float16)


def all_bits(rank, mesh_shape):
    return [[bits(rank, mesh_shape, policy, watched) for watched in (False, True)] for policy in (None, HALF)]


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)], ids=str)
def test_measuring_changes_no_bit_of_gradients_weights_or_random_numbers(mesh_shape):
    for rank in on_workers(int(np.prod(mesh_shape)), all_bits, mesh_shape):
        for plain, watched in rank:
            assert len(plain) > 40
            assert plain == watched


def steps_that_begin_again(rank):
    model = shard(Net(), (2,))
    found = []
    with NoiseScaleMonitor(model, microbatch=MICRO, every=1) as monitor:
        for given_up in ([True], [True, True]):
            for set_to_none in (True, False):
                backwards(model, 7, rank, given_up)
                model.zero_grad(set_to_none=set_to_none)
                backwards(model, 0, rank, [False, True])
                found.append(monitor.step())
                model.zero_grad()
        x = examples(0, 99).requires_grad_()
        for k in range(2):  # a probe before each backward: the second one takes the unsynced gradient along
            model.set_requires_gradient_sync(k == 1)
            torch.autograd.grad(loss_of(model, x), x)
            (loss_of(model, examples(0, 2 * rank + k)) / 2).backward()
        found.append(monitor.step())
    return found


def test_a_step_that_was_given_up_leaves_no_trace_and_a_probe_neither():
    for *found, probed in on_workers(2, steps_that_begin_again):
        for moments in found:
            assert_close(moments, shares(0, 2, [False, True]))
        # fully_shard reduces in the probe what the first backward had left: all four backwards are seen one by one.
        assert_close(probed, shares(0, 2, [True, True]))


def with_scaler(rank, unscale):
    model = shard(Net(), (2,))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with NoiseScaleMonitor(model, microbatch=MICRO, every=1, grad_scaler=scaler) as monitor:
        for step in range(2):
            optimizer.zero_grad()
            for k in range(2):
                scaler.scale(loss_of(model, examples(step, 2 * rank + k)) / 2).backward()
            if unscale:
                scaler.unscale_(optimizer)
            moments = monitor.step()
            scaler.step(optimizer)
            scaler.update()
    return moments


@pytest.mark.parametrize("unscale", [False, True])
def test_a_gradient_scaler_is_divided_out_before_and_after_it_unscales(unscale):
    assert_close(on_workers(2, with_scaler, unscale)[0], shares(1, 2, [True, True]))


def while_not_measuring(rank):
    model = shard(Net(), (2,))
    states = [m._get_fsdp_state()._fsdp_param_group for m in (*model.blocks, model.away, model)]
    before = [(s._reduce_scatter_comm, s._all_reduce_hook) for s in states]
    saved, found = None, []
    for _ in range(2):
        monitor = NoiseScaleMonitor(model, microbatch=MICRO, every=3)
        if saved is not None:
            monitor.load_state_dict(saved)
        for step in range(2 if saved is None else 3):
            backwards(model, step, rank, [True, True])
            collector = monitor._meter.collector
            untouched = not (collector._written or collector._by_backward or collector.seconds)
            found.append((collector.enabled, untouched, monitor.step()))
            model.zero_grad()
        saved = monitor.state_dict()
        monitor.close()
        assert [(s._reduce_scatter_comm, s._all_reduce_hook) for s in states] == before
        backwards(model, 0, rank, [True])
        model.zero_grad()
        assert not collector._handles and not collector._written
    return found, saved["num_steps"]


def test_a_step_that_is_not_measured_reads_nothing_and_a_saved_monitor_goes_on():
    for found, num_steps in on_workers(2, while_not_measuring):
        assert num_steps == 5
        assert [enabled for enabled, _, _ in found] == [True, False, False, True, False]
        assert all(untouched != enabled for enabled, untouched, _ in found)
        assert_close(found[3][2], shares(1, 2, [True, True]))


def joining(rank):
    model = shard(Net(), (2,))
    register_fsdp_forward_method(model, "encode")
    model.blocks[0].requires_grad_(False)
    found = []
    with NoiseScaleMonitor(model, microbatch=MICRO, every=1) as monitor:
        for step in range(3):
            for k in range(2):
                (loss_of(model.encode, examples(step, 2 * rank + k)) / 2).backward()
            found.append((monitor.step(), monitor.num_skipped))
            model.zero_grad()
            model.blocks[0].requires_grad_(True)
    return found


def test_a_first_forward_past_the_hooks_costs_its_step_and_a_thawed_weight_costs_none():
    """A method that stands in for forward runs no hook, so the first step does not know its backwards."""
    for first, *others in on_workers(2, joining):
        assert first == (None, 1)
        for step, (moments, num_skipped) in enumerate(others, 1):
            assert num_skipped == 1
            assert_close(moments, shares(step, 2, [True, True]))
