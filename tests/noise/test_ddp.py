"""Does a DDP job measure what one process that holds all microbatches measures?

The oracle is a float64 copy of the model in one process: the mean gradient of each microbatch by `torch.autograd.grad`,
then the many-worker form of McCandlish et al. 2018, eq. A.2.
"""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.noise.monitor import NoiseScaleMonitor
from oracles import noise_moments as oracle
from workers import WorkerError, on_workers

MICRO = 4


class Net(nn.Module):
    """A tied weight, a frozen one, one that is never used and one that only some examples use."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 5, bias=False)
        self.mid = nn.Linear(5, 5)
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.frozen(torch.relu(self.mid(self.embed(x))))))


def make_model():
    torch.manual_seed(0)
    return Net()


def parts_of(step, num):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(MICRO, 5, generator=generator) for _ in range(num)]


def loss_of(model, part):
    return (model(part) - 1).square().sum(1).mean()


def expected(step, num):
    """(tr(Sigma), |G|^2) and max(|gbar|^2, tr/B), which the tolerance refers to."""
    model = make_model().double()
    used = [p for name, p in model.named_parameters() if p.requires_grad and "unused" not in name]
    means = np.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model, part.double()), used)]).numpy()
            for part in parts_of(step, num)
        ]
    )
    trace, grad = oracle.of_microbatches(means, [MICRO] * num)
    mean = means.mean(0)
    return trace, grad, max(float(mean @ mean), trace / (MICRO * num))


def assert_close(moments, step, num):
    trace, grad, size = expected(step, num)
    batch = MICRO * num
    assert (moments.batch, moments.num_microbatches) == (batch, num)
    assert moments.trace_cov / batch == pytest.approx(trace / batch, abs=1e-5 * size)
    assert moments.grad_sq_norm == pytest.approx(grad, abs=1e-5 * size)


def train(rank, accumulation, no_sync, steps, options, monitor_options, *, world_size):
    ddp = DistributedDataParallel(make_model(), **options)
    found = []
    with NoiseScaleMonitor(ddp, microbatch=MICRO, every=1, **monitor_options) as monitor:
        for step in range(steps):
            ddp.zero_grad()
            mine = parts_of(step, world_size * accumulation)[rank * accumulation : (rank + 1) * accumulation]
            for k, part in enumerate(mine):
                wait = no_sync and k < accumulation - 1 and not (options.get("static_graph") and step == 0)
                with ddp.no_sync() if wait else contextlib.nullcontext():
                    (loss_of(ddp, part) / accumulation).backward()
            found.append(monitor.step())
            nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
    ],
    ids=str,
)
def test_workers_together_measure_what_one_process_does(world_size, accumulation, options):
    for no_sync in {False, accumulation > 1}:
        results = on_workers(
            world_size, partial(train, world_size=world_size), accumulation, no_sync, 3, options, {"groups": "modules"}
        )
        for found in results:
            assert found == results[0]  # the same bits on every rank
            for step, moments in enumerate(found):
                assert_close(moments, step, world_size * accumulation)


def train_with_hook(rank, hook, *, steps=2):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    ddp = DistributedDataParallel(make_model(), find_unused_parameters=True)
    if hook == "powerSGD":
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    elif hook == "wrapped powerSGD":
        state = powerSGD_hook.PowerSGDState(None)
        ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))
    else:
        ddp.register_comm_hook(None, getattr(default_hooks, hook))
    found = []
    with NoiseScaleMonitor(ddp, microbatch=MICRO, every=1) as monitor:
        for step in range(steps):
            ddp.zero_grad()
            loss_of(ddp, parts_of(step, 2)[rank]).backward()
            moments = monitor.step()
            squares = sum(p.grad.double().square().sum().item() for p in ddp.parameters() if p.grad is not None)
            found.append((moments, squares))
    return found


@pytest.mark.parametrize(("hook", "bits"), [("fp16_compress_hook", 11), ("bf16_compress_hook", 8)])
def test_compression_to_half_precision_composes(hook, bits):
    """Each worker's own norm is exact; the mean's is that of the rounded mean which the optimizer gets."""
    for found in on_workers(2, train_with_hook, hook):
        for step, (moments, squares) in enumerate(found):
            trace, grad, size = expected(step, 2)
            assert moments.sq_norm_step == pytest.approx(squares, rel=1e-6)
            assert moments.sq_norm_small == pytest.approx(grad + trace / MICRO, rel=1e-6)
            assert moments.grad_sq_norm == pytest.approx(grad, abs=2.0 ** (2 - bits) * size)


@pytest.mark.parametrize("hook", ["powerSGD", "wrapped powerSGD"])
def test_a_lossy_hook_is_refused_on_every_rank(hook):
    with pytest.raises(WorkerError, match=r"ConfigError: the communication hook '.*' is not known to leave the mean"):
        on_workers(2, train_with_hook, hook)


def train_uneven(rank, loss_scaling):
    """Rank 0 has parts of 1 and 3 examples, rank 1 one of 8; gradients are averaged over both."""
    sizes = ((1, 3), (8,))[rank]
    model = make_model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    generator = torch.Generator().manual_seed(5)
    every = [torch.randn(size, 5, generator=generator) for size in (1, 3, 8)]
    mine = every[:2] if rank == 0 else every[2:]
    with NoiseScaleMonitor(ddp, microbatch=8, every=1, loss_scaling=loss_scaling) as monitor:
        for k, part in enumerate(mine):
            divisor = {"step_mean": 12 / 2, "local_mean": sum(sizes), "microbatch_mean": len(part), "sum": 1}
            with ddp.no_sync() if k < len(mine) - 1 else contextlib.nullcontext(), monitor.microbatch(len(part)):
                (loss_of(ddp, part) * len(part) / divisor[loss_scaling]).backward()
        return monitor.step()


@pytest.mark.parametrize("loss_scaling", ["step_mean", "local_mean", "microbatch_mean", "sum"])
def test_uneven_workers_are_weighted_as_their_gradients_are(loss_scaling):
    """`solve_moments` with the coefficients that each scaling and the average over workers make, in float64."""
    from largebatch.noise.moments import solve_moments

    model = make_model().double()
    used = [p for name, p in model.named_parameters() if p.requires_grad and "unused" not in name]
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(size, 5, generator=generator).double() for size in (1, 3, 8)]
    means = [torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model, part), used)]) for part in parts]
    a = {"step_mean": (1 / 12, 3 / 12, 8 / 12), "local_mean": (1 / 8, 3 / 8, 1 / 2), "microbatch_mean": (0.5,) * 3,
         "sum": (0.5, 1.5, 4.0)}[loss_scaling]  # fmt: skip
    step = sum(x * g for x, g in zip(a, means, strict=True))
    wanted = solve_moments([g.dot(g).item() for g in means], [1, 3, 8], step.dot(step).item(), coefficients=a)
    for found in on_workers(2, train_uneven, loss_scaling):
        assert (found.batch, found.num_microbatches) == (12, 3)
        for name in ("trace_cov", "grad_sq_norm", "units_small", "units_step", "sq_norm_small", "sq_norm_step"):
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-4), name


def overflow_on_rank_one(rank):
    ddp = DistributedDataParallel(make_model(), find_unused_parameters=True)
    calls = []
    with NoiseScaleMonitor(ddp, microbatch=MICRO, every=1, on_measured=[calls.append]) as monitor:
        for step in range(3):
            ddp.zero_grad()
            factor = float("inf") if (rank, step) == (1, 1) else 1.0
            (factor * loss_of(ddp, parts_of(step, 2)[rank])).backward()
            monitor.step()
        return monitor.num_skipped, monitor.noise_scale, [found.step for found in calls]


def test_an_overflow_on_one_worker_is_skipped_by_all_alike_and_sinks_hear_rank_zero_once():
    (skipped, estimate, calls), other = on_workers(2, overflow_on_rank_one)
    assert (skipped, estimate) == other[:2]
    assert (skipped, estimate.num_steps) == (1, 2)
    assert (calls, other[2]) == ([1, 3], [])


def refuse_on_rank_one(rank):
    ddp = DistributedDataParallel(make_model(), find_unused_parameters=True)
    messages = []
    with NoiseScaleMonitor(ddp, microbatch=MICRO, every=1) as monitor:
        for step in range(2):
            ddp.zero_grad()
            loss_of(ddp, parts_of(step, 2)[rank]).backward()
            if (rank, step) == (1, 0):
                nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
            try:
                messages.append(monitor.step().batch)
            except ValueError as error:
                messages.append(str(error))
    return messages


def test_a_refusal_on_one_worker_reaches_all_and_nothing_hangs():
    first, second = on_workers(2, refuse_on_rank_one)
    assert "1 other worker(s) refused" in first[0]
    assert "before clipping" in second[0]
    assert first[1] == second[1] == 2 * MICRO


def step_under_no_sync(rank):
    ddp = DistributedDataParallel(make_model(), find_unused_parameters=True)
    with NoiseScaleMonitor(ddp, microbatch=MICRO, every=1) as monitor, ddp.no_sync():
        loss_of(ddp, parts_of(0, 2)[rank]).backward()
        monitor.step()


def test_gradients_that_were_never_averaged_are_refused():
    with pytest.raises(WorkerError, match=r"ConfigError: the step's last forward was under no_sync"):
        on_workers(2, step_under_no_sync)


def refusals(rank):
    messages = []
    model = make_model()
    inner = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))
    ignoring = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["bias"])
    for wrong in (model, inner, DistributedDataParallel(ignoring)):
        try:
            NoiseScaleMonitor(wrong, microbatch=1)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_ddp_does_not_average_whole_is_refused():
    for plain, partly, ignoring in on_workers(2, refusals):
        assert plain.startswith("this job has 2 workers, but the model is wrapped neither in")
        assert partly.startswith("only a part of the model's trainable parameters")
        assert "ignores the trainable parameter 'bias'" in ignoring


def one_worker(rank):
    return train(rank, 2, True, 2, {"find_unused_parameters": True}, {}, world_size=1)


def test_ddp_of_one_worker_is_plain_accumulation():
    (found,) = on_workers(1, one_worker)
    for step, moments in enumerate(found):
        assert_close(moments, step, 2)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x, side):
        return (self.left if side == 0 else self.right)(torch.tanh(self.trunk(x)))


def train_branches(rank, in_place):
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=in_place)
    with NoiseScaleMonitor(ddp, microbatch=MICRO, every=1) as monitor:
        found = []
        for _ in range(2):
            ddp.zero_grad(set_to_none=not in_place)
            (ddp(parts_of(0, 2)[rank], rank) - 1).square().sum(1).mean().backward()
            found.append(monitor.step())
        return found


@pytest.mark.parametrize("in_place", [False, True])
def test_what_only_the_other_worker_used_counts_in_the_mean(in_place):
    model = Branches().double()
    means = []
    for side, part in enumerate(parts_of(0, 2)):
        loss = (model(part.double(), side) - 1).square().sum(1).mean()
        gradients = torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)
        means.append(torch.cat([g.flatten() for g in gradients]).numpy())
    wanted = oracle.of_microbatches(np.stack(means), [MICRO] * 2)
    for found in on_workers(2, train_branches, in_place):
        for moments in found:
            assert (moments.trace_cov, moments.grad_sq_norm) == pytest.approx(wanted, rel=1e-4)
