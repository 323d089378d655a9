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
from workers import on_workers

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
