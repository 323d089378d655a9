"""Is the same measured with each of fully_shard's own settings? Against the plain one, which test_fsdp proves."""

from functools import cache

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from largebatch.noise.monitor import NoiseScaleMonitor
from workers import on_workers

VARIANTS = {
    "plain": {},
    "sharded along dim 1": {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None},
    "kept whole after forward": {"reshard_after_forward": False},
    "resharded to two of four": {"reshard_after_forward": 2},
    "one unit of two modules": {},
    "compiled blocks": {},
    "sums only": {},
    "kept whole between backwards": {},
    "unused parameters reduced": {},
    "a group for reduce-scatter": {},
}


def measure(rank, variant):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)), nn.Linear(8, 8))
    blocks = list(model[:2])
    if variant == "compiled blocks":
        for k in range(2):
            model[k] = blocks[k] = torch.compile(model[k], backend="aot_eager")
    for unit in [blocks] if variant == "one unit of two modules" else blocks:
        fully_shard(unit, **VARIANTS[variant])
    fully_shard(model, **VARIANTS[variant])
    if variant == "sums only":
        for module in (*blocks, model):
            module.set_force_sum_reduction_for_comms(True)
    if variant == "unused parameters reduced" and hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
    if variant == "a group for reduce-scatter" and hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    found = []
    with NoiseScaleMonitor(model, microbatch=4, every=1) as monitor:
        for _ in range(2):
            for k, sync in enumerate((True, False, True)):
                model.set_requires_gradient_sync(sync)
                model.set_reshard_after_backward(variant != "kept whole between backwards" or k == 2)
                (model(torch.randn(4, 8, generator=generator)).square().sum(1).mean() / 3).backward()
            found.append(monitor.step())
            optimizer.step()
            optimizer.zero_grad()
    return found


@cache
def measured():
    return on_workers(4, lambda rank: {variant: measure(rank, variant) for variant in VARIANTS})


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_moments_are_those_of_plain_fully_shard(variant):
    for result in measured():
        for moments, plain in zip(result[variant], measured()[0]["plain"], strict=True):
            assert (moments.batch, moments.num_microbatches) == (48, 8)
            assert moments.trace_cov == pytest.approx(plain.trace_cov, rel=1e-5)
            assert moments.grad_sq_norm == pytest.approx(plain.grad_sq_norm, abs=1e-5 * plain.sq_norm_step)
