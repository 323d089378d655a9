"""Is everything under fully_shard whose gradients cannot be read refused, with the reason and what to do instead?

All cases of as many workers run in one job. A refusal on one worker must reach the others, and never hang them.
"""

from functools import cache, partial

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from largebatch.noise.monitor import NoiseScaleMonitor
from workers import on_workers


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def sharded(**options):
    model = net()
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def mesh(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def backward(model, x=None):
    model(torch.randn(3, 4) if x is None else x).square().sum().backward()


def watched(**options):
    model = sharded()
    return model, NoiseScaleMonitor(model, microbatch=3, every=1, **options)


def one_backward():
    model, monitor = watched()
    backward(model)
    monitor.step()


def unsynced_end():
    model, monitor = watched()
    for sync in (True, False):
        model.set_requires_gradient_sync(sync)
        backward(model)
    monitor.step()


def half_synced():
    model, monitor = watched()
    model[0].set_requires_gradient_sync(False)
    for _ in range(2):
        backward(model)
    monitor.step()


def two_syncs_in_a_context():
    model, monitor = watched()
    for _ in range(2):
        with monitor.microbatch(6):
            backward(model)
            backward(model)
    monitor.step()


def changed(change):
    model, monitor = watched()
    for _ in range(2):
        backward(model)
    change(model)
    monitor.step()


def scale_one(model):
    model[0].weight.grad.mul_(2)


def scale_part(model):
    model[0].weight.grad.to_local().mul_(2)


def scale_without_trace(model):
    model[0].weight.grad._local_tensor.data.mul_(2)
    model[2].weight.grad._local_tensor.data.mul_(2)


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def changed_between(change):
    model, monitor = watched()
    backward(model)
    change(model)
    backward(model)
    monitor.step()


def never_zeroed():
    model, monitor = watched()
    for _ in range(2):
        for _ in range(2):
            backward(model)
        monitor.step()


def zeroed_too_early():
    changed(lambda model: model.zero_grad())


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = net(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(checkpoint(self.inner, x.requires_grad_(), use_reentrant=True))


def reentrant():
    model = fully_shard(Reentrant())
    monitor = NoiseScaleMonitor(model, microbatch=3, every=1)
    for _ in range(2):
        backward(model)
    monitor.step()


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([fully_shard(nn.Linear(4, 4)) for _ in "ab"])

    def forward(self, x, which):
        return self.heads[which](x)


def split_losses():
    model = fully_shard(Heads())
    monitor = NoiseScaleMonitor(model, microbatch=3, every=1)
    for which in range(2):
        model(torch.randn(3, 4), which).sum().backward()
    monitor.step()


def group_inside_a_unit():
    watched(groups={"weights": "*.weight"})


def preconditioned():
    model = sharded()
    NoiseScaleMonitor(model, microbatch=1, precondition_by=torch.optim.Adam(model.parameters()))


def example_by_example():
    NoiseScaleMonitor(sharded(), per_example=True)


def part_of_the_model():
    model = net()
    fully_shard(model[0])
    NoiseScaleMonitor(model, microbatch=1)


def ignored():
    model = net()
    NoiseScaleMonitor(fully_shard(model, ignored_params={model[0].weight}), microbatch=1)


def joined_unmanaged():
    model, monitor = watched()
    for _ in range(2):
        backward(model)
    model.extra = nn.Parameter(torch.zeros(2))
    monitor.step()


def sharded_later():
    model = net()
    monitor = NoiseScaleMonitor(model, microbatch=3, every=1)
    fully_shard(model)
    for _ in range(2):
        backward(model)
    monitor.step()


def sharded_again():
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    monitor = NoiseScaleMonitor(model, microbatch=3, every=1)
    for _ in range(2):
        backward(model)
    model.append(fully_shard(nn.Linear(4, 4)))
    monitor.step()


def two_monitors():
    NoiseScaleMonitor(watched()[0], microbatch=1)


def replaced():
    model, monitor = watched()
    model.set_custom_reduce_scatter(monitor._meter.collector._readers[1].original)
    for _ in range(2):
        backward(model)
    monitor.step()


def custom_reduce_scatter():
    model = sharded()
    model.set_custom_reduce_scatter(type("Lossy", (), {"__module__": "elsewhere"})())
    NoiseScaleMonitor(model, microbatch=1)


def all_reduce_hook():
    model = sharded()
    model.set_all_reduce_hook(lambda grad: grad.mul_(2))
    NoiseScaleMonitor(model, microbatch=1)


def divided():
    model = sharded()
    model.set_gradient_divide_factor(7.0)
    NoiseScaleMonitor(model, microbatch=1)


def divided_later():
    model = sharded().double()
    monitor = NoiseScaleMonitor(model, microbatch=1, every=1)
    for module in (model[0], model):
        module.set_gradient_divide_factor(7.0)
    for _ in range(2):
        backward(model, torch.randn(3, 4).double())
    monitor.step()


def offloaded():
    NoiseScaleMonitor(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), microbatch=1)


def no_backward():
    watched()[1].step()


def empty_context():
    with watched()[1].microbatch(3):
        pass


def on(shape):
    NoiseScaleMonitor(sharded(mesh=mesh(*shape)), microbatch=1)


def several_meshes():
    model = net()
    fully_shard(model[0], mesh=mesh(2, 2))
    NoiseScaleMonitor(fully_shard(model, mesh=mesh(4)), microbatch=1)


def tensor_parallel():
    both = mesh(2, 2)
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, both["b"], {"0": ColwiseParallel()})
    NoiseScaleMonitor(fully_shard(model, mesh=both["a"]), microbatch=1)


def part_of_the_job():
    NoiseScaleMonitor(sharded(mesh=mesh(2, 2)["b"]), microbatch=1)


def one_worker_only(rank):
    """Rank 1 changes a gradient: it says so, and rank 0 hears of it."""
    model, monitor = watched()
    for _ in range(2):
        backward(model)
    if rank == 1:
        model[0].weight.grad.mul_(2)
    monitor.step()


def no_all_reduce():
    model = sharded(mesh=mesh(2, 2))
    monitor = NoiseScaleMonitor(model, microbatch=1, every=1)
    for last in (True, False):
        model.set_requires_all_reduce(last)
        backward(model)
    monitor.step()


EITHER = {
    unsynced_end: "call set_requires_gradient_sync(True) before the last backward",
    half_synced: "call set_requires_gradient_sync on the whole model",
    two_syncs_in_a_context: "call set_requires_gradient_sync(False) for all but the last backward",
    partial(changed, clip): "gradients were changed after the last backward: call step() before clipping",
    partial(changed, scale_one): "gradients were changed after the last backward: call step() before clipping",
    partial(changed, scale_part): "gradients were changed after the last backward: call step() before clipping",
    partial(changed, scale_without_trace): "gradients were changed after the last backward: call step() before clipp",
    partial(changed_between, clip): "gradients were changed after the last backward: call step() before clipping",
    partial(changed_between, scale_one): "gradients were changed between two backwards of one step",
    never_zeroed: "call zero_grad() each step",
    zeroed_too_early: "gradients are gone: call step() after the last backward and before zero_grad()",
    reentrant: "Use checkpoint(..., use_reentrant=False)",
    split_losses: "reached no parameter in common",
    group_inside_a_unit: "groups must be whole fully_shard units",
    preconditioned: "leave precondition_by out",
    example_by_example: "per_example does not measure under fully_shard",
    part_of_the_model: "does not manage the trainable parameter '2.weight'",
    ignored: "does not manage the trainable parameter '0.weight'",
    joined_unmanaged: "does not manage the trainable parameter 'extra'",
    sharded_again: "fully_shard was applied again",
    two_monitors: "another monitor watches this model already",
    all_reduce_hook: "the all-reduce hook, set by hand",
    divided: "set_gradient_divide_factor(7) makes p.grad something else",
    divided_later: "set_gradient_divide_factor(7) makes p.grad something else",
    offloaded: "CPUOffloadPolicy",
    no_backward: "no backward has been seen",
    empty_context: "no backward reached the parameters inside this microbatch(3) context",
}
ALONE = EITHER | {one_backward: "noise scale needs two batch sizes", sharded_later: "make the monitor after it"}
PAIRED = EITHER | {
    replaced: "was replaced after the monitor was made",
    custom_reduce_scatter: "Lossy, set by hand",
    partial(on, (2, 1)): "the mesh of fully_shard is 2 x 1",
}
FOUR = {
    several_meshes: "several meshes",
    tensor_parallel: "was a DTensor before fully_shard (tensor parallelism?)",
    part_of_the_job: "holds 2 of this job's 4 workers",
    partial(on, (4, 1)): "the mesh of fully_shard is 4 x 1",
    no_all_reduce: "call set_requires_all_reduce(True) before the last backward",
}
JOBS = {1: ALONE, 2: PAIRED, 4: FOUR}


def messages(rank, world_size):
    found = []
    for case in JOBS[world_size]:
        try:
            case()
            found.append("nothing was raised")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@cache
def refusals(world_size):
    return on_workers(world_size, messages, world_size)


EACH = [(world_size, number) for world_size, job in JOBS.items() for number in range(len(job))]


def name_of(case):
    if isinstance(case, partial):
        return f"{case.func.__name__}-{getattr(case.args[0], '__name__', case.args[0])}"
    return case.__name__


NAMES = [f"{world_size}-{name_of(case)}" for world_size, job in JOBS.items() for case in job]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("world_size", "number"), EACH, ids=NAMES)
def test_it_is_refused_on_every_worker_with_what_to_do(world_size, number):
    for found in refusals(world_size):
        assert found[number].startswith("ConfigError")
        assert list(JOBS[world_size].values())[number] in found[number]


def apart(rank):
    try:
        one_worker_only(rank)
    except ValueError as error:
        return str(error)
    return ""


def test_a_refusal_on_one_worker_reaches_the_others():
    first, second = on_workers(2, apart)
    assert "1 other worker(s) refused" in first
    assert "gradients were changed" in second
