"""Does DDP train to the same weights when its gradients travel by our all-reduces?

The oracle is one process in float64 that has the whole batch, and no DDP: sums over workers then differ from it by
rounding only (1e-12), and a gradient that is missing, doubled or divided twice by far more.
"""

import contextlib
import gc
import json
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from largebatch.errors import ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.parallel.choose import Choices
from largebatch.parallel.hook import _sq_norm, pipelined_allreduce
from largebatch.parallel.topology import Topology
from workers import on_workers

BATCH, STEPS = 8, 4


class Net(nn.Module):
    """Layers that are used in another order than they were made in, so that DDP cuts other buckets after a step."""

    def __init__(self, width=12, branches=False):
        super().__init__()
        self.last = nn.Linear(width, 3)
        self.mid = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(width))
        self.first = nn.Linear(5, width)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(2)) if branches else None

    def forward(self, x, branch=0):
        x = torch.tanh(self.first(x)) * self.scale
        for layer in self.mid:
            x = x + torch.tanh(layer(x))
        if self.branches is not None:
            x = x + self.branches[branch](x)
        return self.last(x)


def make_net(dtype=torch.float64, **options):
    torch.manual_seed(3)
    return Net(**options).to(dtype)


def batch_of(step, accumulation, dtype=torch.float64):
    draw = torch.Generator().manual_seed(100 + step)
    return torch.randn(accumulation, BATCH, 5, generator=draw, dtype=torch.float64).to(dtype)


def branch_of(rank, step):
    """Both branches in the even steps, the first alone in the odd ones: one goes unused on every worker then."""
    return rank % 2 if step % 2 == 0 else 0


def alone(world_size, accumulation, branches):
    """Weights after training in one process."""
    model = make_net(branches=branches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in batch_of(step, accumulation):
            for rank, part in enumerate(micro.chunk(world_size)):
                branch = branch_of(rank, step) if branches else 0
                (model(part, branch).square().mean() / world_size / accumulation).backward()
        if branches:  # as DDP with find_unused_parameters: a gradient that no worker has stays as it is
            for index in range(2):
                for parameter in model.branches[index].parameters():
                    assert (parameter.grad is None) == (index == 1 and step % 2 == 1)
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


def trained(rank, world_size, accumulation, branches, view, static, hook):
    """The weights of one worker with the hook, and the numbers of bytes it was asked to choose for."""
    model = DistributedDataParallel(
        make_net(branches=branches),
        bucket_cap_mb=0.0005,
        gradient_as_bucket_view=view,
        find_unused_parameters=branches,
        static_graph=static,
    )
    handle = pipelined_allreduce(model, **hook) if hook is not None else contextlib.nullcontext()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with handle:
        for step in range(STEPS):
            optimizer.zero_grad()
            for index, micro in enumerate(batch_of(step, accumulation)):
                part = micro.chunk(world_size)[rank]
                args = (branch_of(rank, step),) if branches else ()
                with model.no_sync() if index < accumulation - 1 else contextlib.nullcontext():
                    (model(part, *args).square().mean() / accumulation).backward()
            optimizer.step()
    return [parameter.tolist() for parameter in model.module.parameters()]


def several(rank, world_size, cases):
    return [trained(rank, world_size, **case) for case in cases]


def case(hook, *, accumulation=1, branches=False, view=False, static=False):
    return {"accumulation": accumulation, "branches": branches, "view": view, "static": static, "hook": hook}


FLAT = [
    case({"algorithm": "ring", "concurrency": 1}),
    case({"algorithm": "halving_doubling"}),
    case({"algorithm": "halving_doubling", "concurrency": 4}, view=True),
    case({"algorithm": "ring"}, accumulation=3, view=True),
    case({"algorithm": "halving_doubling"}, accumulation=2, branches=True),
    case({"algorithm": "ring", "concurrency": 3}, branches=True, view=True),
    case({"algorithm": "halving_doubling"}, static=True),
    case({"algorithm": "backend"}),
    case(None, branches=True),
]
TWO_HOSTS = Topology((0, 0, 1, 1))
HOSTS = [
    case({"algorithm": "hierarchical", "topology": TWO_HOSTS}, branches=True),
    case({"algorithm": "hierarchical_sharded", "topology": TWO_HOSTS, "concurrency": 3}, accumulation=2),
    case({"algorithm": "hierarchical", "topology": TWO_HOSTS, "inside": "gloo"}, view=True),
    case({"algorithm": "hierarchical_sharded", "topology": TWO_HOSTS, "inside": "gloo"}, branches=True),
    case({"algorithm": "hierarchical", "topology": Topology((0, 1, 1, 1)), "inside": "gloo"}),
    case({"algorithm": "hierarchical_sharded", "topology": Topology((0, 1, 0, 1)), "inside": "gloo"}),
]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(1, FLAT[:1]), (2, FLAT), (3, FLAT[:1]), (4, FLAT[3:6]), (4, HOSTS)],
    ids=lambda x: str(x)[:1],
)
def test_weights_are_those_of_one_process_with_the_whole_batch(world_size, cases):
    found = on_workers(world_size, several, world_size, cases)
    for index, one in enumerate(cases):
        right = alone(world_size, one["accumulation"], one["branches"])
        for rank in range(world_size):
            for got, want in zip(found[rank][index], right, strict=True):
                torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-11, atol=1e-13)
        assert all(found[rank][index] == found[0][index] for rank in range(world_size))  # to the bit


@pytest.mark.proofs
def test_weights_are_those_of_one_process_with_four_hosts_of_two():
    four = Topology((0, 0, 1, 1, 2, 2, 3, 3))
    test_weights_are_those_of_one_process_with_the_whole_batch(
        8, [one | {"hook": one["hook"] | {"topology": four}} for one in HOSTS[:4]]
    )


def bits_after(rank, world_size, algorithm, stop_after, bucket_cap_mb, num_steps=6):
    """Float32 weights, when the job is stopped and resumed after a step, or never."""
    model, optimizer = make_net(torch.float32, width=40), None
    state = None
    for step in range(num_steps):
        if step in (0, stop_after):
            ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)  # its first bucket order again
            handle = pipelined_allreduce(ddp, algorithm=algorithm) if algorithm else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            if state is not None:
                optimizer.load_state_dict(state)
        optimizer.zero_grad()
        part = batch_of(step, 1, torch.float32)[0].chunk(world_size)[rank]
        ddp(part).square().mean().backward()
        optimizer.step()
        state = optimizer.state_dict()
        if handle is not None and step + 1 in (stop_after, num_steps):
            handle.close()
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def resumed(rank, world_size, algorithm, cap):
    straight = bits_after(rank, world_size, algorithm, None, cap)
    return [bits_after(rank, world_size, algorithm, stop, cap) == straight for stop in (1, 4)]


def across_layouts(rank, world_size, algorithm):
    """Whether buckets of another size give the same bits."""
    found = [bits_after(rank, world_size, algorithm, None, cap, num_steps=3) for cap in (25.0, 0.0005)]
    return [other == found[0] for other in found[1:]]


def check_bits(world_size):
    assert on_workers(world_size, resumed, world_size, "halving_doubling", 0.004) == [[True] * 2] * world_size
    assert on_workers(world_size, across_layouts, world_size, "halving_doubling") == [[True]] * world_size
    # It is not for want of rounding: torch's own all-reduce adds in an order that depends on the bucket.
    torchs = on_workers(world_size, resumed, world_size, None, 0.004)
    assert not all(all(same) for same in torchs)
    assert not all(all(same) for same in on_workers(world_size, across_layouts, world_size, None))


def test_four_workers_resume_bit_for_bit_whatever_the_buckets():
    check_bits(4)


@pytest.mark.proofs
def test_eight_workers_resume_bit_for_bit_whatever_the_buckets():
    check_bits(8)


def chosen(rank, num_steps):
    asked = []

    def choose(num_bytes):
        asked.append(num_bytes)
        return "ring" if num_bytes < 1000 else "halving_doubling"

    model = DistributedDataParallel(make_net(), bucket_cap_mb=0.0005)
    with pipelined_allreduce(model, algorithm=choose, concurrency=1):
        for step in range(num_steps):
            model(batch_of(step, 1)[0]).mean().backward()
    return asked


def test_a_function_of_the_bytes_chooses_for_each_bucket():
    (first, second) = on_workers(2, chosen, 2)
    assert first == second
    assert sum(first) == 2 * sum(parameter.numel() * 8 for parameter in make_net().parameters())
    assert len(first) > 5  # one in the first step, and then several, or this shows nothing


def chosen_by_measuring(rank):
    model = DistributedDataParallel(make_net(), bucket_cap_mb=0.0005)
    with pipelined_allreduce(model) as handle:
        first = [parameter.tolist() for parameter in _one_step(model, rank)]
    again = DistributedDataParallel(make_net(), bucket_cap_mb=0.0005)
    kept = Choices.from_record(json.loads(json.dumps(handle.choose.as_record())))
    with pipelined_allreduce(again, algorithm=kept):
        second = [parameter.tolist() for parameter in _one_step(again, rank)]
    return handle.choose.steps, first, second


def _one_step(model, rank):
    model(batch_of(0, 1)[0].chunk(2)[rank]).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_auto_measures_once_and_its_table_can_be_kept_to_repeat_the_run():
    first, second = on_workers(2, chosen_by_measuring)
    assert first == second  # the same table, and the same gradients to the bit, on both workers
    assert first[1] == first[2]
    model = make_net()
    model(batch_of(0, 1)[0]).square().mean().backward()
    for got, parameter in zip(first[1], model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), parameter.grad, rtol=1e-11, atol=1e-13)


def narrowed(rank, wire):
    model = DistributedDataParallel(make_net(torch.float32), bucket_cap_mb=0.0005)
    with pipelined_allreduce(model, algorithm="halving_doubling", wire=wire):
        model(batch_of(0, 1, torch.float32)[0].chunk(2)[rank]).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist()


def test_gradients_can_travel_in_sixteen_bits():
    model = make_net(torch.float32)
    model(batch_of(0, 1, torch.float32)[0]).square().mean().backward()
    right = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    first, second = map(torch.tensor, on_workers(2, narrowed, torch.bfloat16))
    assert torch.equal(first, second)
    # One rounding to 8 bits of each addend and one of the sum: 2^-8 of the larger magnitudes at most each.
    torch.testing.assert_close(first, right, rtol=2**-6, atol=2**-6 * float(right.abs().max()))
    assert not torch.allclose(first, right, rtol=1e-5, atol=0)  # it did travel so


def measured(rank, hooked):
    """Moments of three steps by the monitor, and the local squared norms that the hook handed over."""
    model = DistributedDataParallel(make_net(torch.float32), bucket_cap_mb=0.0005, gradient_as_bucket_view=True)
    norms = {}
    hook = (
        pipelined_allreduce(model, algorithm="halving_doubling", on_local_sq_norm=norms.__setitem__)
        if hooked
        else contextlib.nullcontext()
    )
    found, handed, own = [], [], []
    with hook, NoiseScaleMonitor(model, microbatch=BATCH // 2, loss_scaling="local_mean", every=1) as monitor:
        for step in range(3):
            model.zero_grad()
            part = batch_of(step, 1, torch.float32)[0].chunk(2)[rank]
            model(part).square().mean().backward()
            moments = monitor.step()
            found.append((moments.grad_sq_norm, moments.trace_cov))
            handed.append(float(sum(norms.values())))
            copy = make_net()
            copy(part.double()).square().mean().backward()
            own.append(float(sum(parameter.grad.square().sum() for parameter in copy.parameters())))
            norms.clear()
    return found, handed, own


def test_the_noise_scale_monitor_sees_the_same_moments_with_the_hook():
    plain, hooked = on_workers(2, measured, False), on_workers(2, measured, True)
    for (right, _, _), (found, handed, own) in zip(plain, hooked, strict=True):
        assert found == pytest.approx([pytest.approx(pair, rel=1e-5) for pair in right])
        # What the hook hands over for free is the worker's own gradient, before it is averaged.
        assert handed == pytest.approx(own, rel=1e-5)


def refused(rank):
    said = []

    def attempt(model, **options):
        try:
            pipelined_allreduce(model, **options)
        except ConfigError as error:
            said.append(str(error))

    model = DistributedDataParallel(make_net())
    attempt(model.module)
    attempt(model, algorithm="rings")
    attempt(model, timeout=0)
    attempt(model, concurrency=0)
    attempt(model, topology=Topology((0, 0, 0)))
    handle = pipelined_allreduce(model, algorithm="ring")
    handle.close()
    try:
        model(batch_of(0, 1)[0]).mean().backward()
    except ConfigError as error:
        said.append(str(error))
    return said


def recomputed(rank, hooked):
    """Gradients after 3 steps of layers that are computed again in a backward inside the backward."""
    torch.manual_seed(1)
    layers = nn.Sequential(*(nn.Linear(30, 30) for _ in range(6))).double()
    model = DistributedDataParallel(Recomputing(layers), bucket_cap_mb=0.005)
    with pipelined_allreduce(model, algorithm="ring", timeout=20.0) if hooked else contextlib.nullcontext():
        for step in range(3):
            x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            model(x.requires_grad_()).square().mean().backward()
    return [parameter.grad.tolist() for parameter in model.parameters()]


class Recomputing(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_a_backward_inside_the_backward_ends_with_the_same_gradients():
    (ours, same), (theirs, _) = on_workers(2, recomputed, True, seconds=60), on_workers(2, recomputed, False)
    assert ours == same
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-11, atol=1e-13)


def dropped(rank):
    """Threads that are left after a hook that was refused, and after a model that nobody has any more."""
    before = threading.active_count()
    model = DistributedDataParallel(nn.Linear(4, 4))
    handle = pipelined_allreduce(model, algorithm="ring", timeout=5.0)
    running = threading.active_count()
    with pytest.raises(ConfigError, match="one hook"):
        pipelined_allreduce(model, algorithm="ring", timeout=5.0)
    after_refusal = threading.active_count()
    handle.close()
    left = threading.active_count()
    gone = weakref.ref(handle)
    del handle, model
    gc.collect()
    return running - before, after_refusal - running, left - before, gone() is None


def test_a_hook_that_is_refused_or_closed_leaves_no_thread_and_no_object():
    assert on_workers(2, dropped) == [(3, 0, 0, True)] * 2  # two lanes and the roll call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_squared_norm_of_a_large_bucket_is_that_in_float64(dtype):
    """Where all values are alike, every addition rounds the same way: float32 over a million is 5e-4 off."""
    values = torch.full((3_000_001,), 0.1, dtype=dtype)
    exact = float(values[0].double()) ** 2 * len(values)
    assert float(_sq_norm(values)) == pytest.approx(exact, rel=1e-9)


def test_what_cannot_be_is_refused_in_a_sentence():
    for said in on_workers(2, refused):
        for found, part in zip(
            said,
            ["in DistributedDataParallel", "'rings'", "positive number", "at least 1", "3 ranks, and the model has 2",
             "is closed"],
            strict=True,
        ):  # fmt: skip
            assert part in found
