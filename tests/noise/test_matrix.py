"""Is it the same number whichever way the same examples are trained on?

One model, one batch of 16 examples, one partition into 2, 4 or 16 parts: on one device by accumulation or example by
example, on DDP, FSDP2 and HSDP workers, in each with checkpointing, tied and unused weights or compiled. Moments agree
to 1e-5 of max(|gbar|^2, tr(Sigma)/B), which is what float32 norms leave. The oracle is float64 autograd and
McCandlish et al. 2018, eq. A.2, in its many-worker form.
"""

import contextlib
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from largebatch.noise.monitor import NoiseScaleMonitor
from oracles import noise_moments as oracle
from workers import on_workers

BATCH, DIM, CLASSES = 16, 8, 8


class Net(nn.Module):
    """Embedding-like input, two blocks and a head; `variant` says what is special about it."""

    def __init__(self, variant):
        super().__init__()
        torch.manual_seed(0)
        self.variant = variant
        self.embed, self.head = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, CLASSES, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Tanh()) for _ in "ab"])
        if variant == "tied":
            self.head.weight = self.embed.weight
            self.unused = nn.Linear(3, 3)
            self.blocks[0][1].bias.requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.variant == "checkpoint" else block(x))
        return self.head(x)


def examples():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, DIM, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


@cache
def gradients(variant):
    """Each example's own gradient in float64, shape (BATCH, number of trained weights)."""
    model = Net("plain" if variant in ("checkpoint", "compiled") else variant).double()
    used = [p for name, p in model.named_parameters() if p.requires_grad and "unused" not in name]
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model, x[None].double(), y[None]), used)])
        for x, y in zip(*examples(), strict=True)
    ]
    return torch.stack(rows).numpy()


def assert_right(moments, variant, num_parts):
    rows = gradients(variant)
    parts = rows.reshape(num_parts, BATCH // num_parts, -1).mean(1)
    trace, grad = oracle.of_microbatches(parts, [BATCH // num_parts] * num_parts)
    size = max(float(rows.mean(0) @ rows.mean(0)), trace / BATCH)
    assert (moments.batch, moments.num_microbatches) == (BATCH, num_parts)
    assert moments.trace_cov / BATCH == pytest.approx(trace / BATCH, abs=1e-5 * size)
    assert moments.grad_sq_norm == pytest.approx(grad, abs=1e-5 * size)


def wrap(model, mode, shape):
    if mode == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=model.variant == "tied")
    if mode == "ddp static":
        return DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    if mode == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def measure(rank, mode, variant, shape, num_parts, per_example=False):
    world_size = int(np.prod(shape))
    model = wrap(Net(variant), mode, shape)
    called = torch.compile(model, backend="aot_eager") if variant == "compiled" else model
    x, y = examples()
    num_mine = num_parts // world_size
    size = BATCH // num_parts
    options = {"per_example": per_example} if per_example else {"microbatch": size}
    found = []
    with NoiseScaleMonitor(model, every=1, **options) as monitor:
        for _ in range(2):  # DDP regroups its buckets, and static graphs begin to pay, after the first step
            model.zero_grad()
            backwards = 1 if per_example else num_mine
            width = BATCH // world_size // backwards
            for k in range(backwards):
                start = (rank * backwards + k) * width
                last = k == backwards - 1
                wait = mode == "ddp" and not last
                with model.no_sync() if wait else contextlib.nullcontext():
                    loss = loss_of(called, x[start : start + width], y[start : start + width])
                    (loss / backwards).backward()
            found.append(monitor.step())
    return found


CASES = [
    ("single", (1,), 2), ("single", (1,), 4), ("single", (1,), 16),
    ("ddp", (2,), 2), ("ddp", (2,), 4), ("ddp", (4,), 4), ("ddp static", (2,), 2),
    ("fsdp", (1,), 4), ("fsdp", (2,), 2), ("fsdp", (2,), 4), ("fsdp", (4,), 4), ("fsdp", (2, 2), 4),
]  # fmt: skip


# Compiling takes seconds on every worker: one case of each kind.
MATRIX = [(*case, variant) for case in CASES for variant in ("plain", "tied", "checkpoint")] + [
    (mode, shape, 4, "compiled") for mode, shape in (("single", (1,)), ("ddp", (2,)), ("fsdp", (2,)))
]


@pytest.mark.parametrize(("mode", "shape", "num_parts", "variant"), MATRIX, ids=str)
def test_the_same_partition_gives_the_same_moments(mode, shape, num_parts, variant):
    if mode == "single":
        torch._dynamo.reset()
        results = [measure(0, mode, variant, shape, num_parts)]
    else:
        results = on_workers(int(np.prod(shape)), measure, mode, variant, shape, num_parts)
    for found in results:
        assert found == results[0]
        for moments in found:
            assert_right(moments, variant, num_parts)


@pytest.mark.parametrize("variant", ["plain", "tied", "checkpoint"])
@pytest.mark.parametrize(("mode", "shape"), [("single", (1,)), ("ddp", (2,))])
@pytest.mark.parametrize("per_example", [True, "fast"])
def test_example_by_example_is_the_partition_into_single_examples(mode, shape, variant, per_example):
    if mode == "single":
        results = [measure(0, mode, variant, shape, BATCH, per_example)]
    else:
        results = on_workers(2, measure, mode, variant, shape, BATCH, per_example)
    for found in results:
        for moments in found:
            assert_right(moments, variant, BATCH)


def test_the_mean_over_random_partitions_is_the_value_example_by_example():
    """Unbiased whatever the partition: 2,000 random ones into 4 parts, within 4 standard errors."""
    from largebatch.noise.moments import solve_moments

    rows = gradients("plain")
    mean = rows.mean(0)
    generator = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        parts = rows[generator.permutation(BATCH)].reshape(4, 4, -1).mean(1)
        moments = solve_moments((parts**2).sum(1), [4] * 4, float(mean @ mean))
        found.append((moments.trace_cov, moments.grad_sq_norm))
    (moments,) = measure(0, "single", "plain", (1,), BATCH, True)[:1]
    average, error = np.mean(found, axis=0), np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    assert (np.abs(average - np.array([moments.trace_cov, moments.grad_sq_norm])) < 4 * error).all()
