"""Is a right step found equal on 1, 2 and 4 workers, and every mistake found and named as what it is?"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.testing import NotEquivalentError
from testing.setups import (
    DIM,
    N,
    NormOverAllWorkers,
    accumulating,
    averaged_by_hand,
    by_mean,
    by_sum,
    check,
    clip,
    clip_own_shards,
    clip_then_average,
    dropping_net,
    examples,
    fading,
    normed_net,
    plain_net,
    setup,
    sgd,
    sharded,
    step_once,
    step_per_process,
    unwrapped,
)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def doubled() -> nn.Module:
    return plain_net().double()


def in_double(num: int = N) -> tuple[Tensor, Tensor]:
    x, y = examples(num)
    return x.double(), y


RIGHT: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ddp": (setup(), examples(), {"world_sizes": (1, 2, 4), "uneven": True}),
    # In float64 any mistake in the deal or the comparison would show above 1e-12; rounding is about 1e-16.
    "ddp in float64": (setup(net=doubled), in_double(), {"tolerance": 1e-12}),
    "by hand": (setup(wrap=unwrapped, after_backward=averaged_by_hand), examples(), {}),
    "fsdp": (setup(wrap=sharded), examples(), {"world_sizes": (2, 4)}),
    "clipped after averaging": (setup(after_backward=clip), examples(), {}),
    "clipped shards": (setup(wrap=sharded, after_backward=clip), examples(), {}),
    "scheduled": (setup(schedule=fading, end=step_once), examples(), {}),
    "adam on a bias without a gradient": (setup(net=partial(normed_net, NormOverAllWorkers), optimizer=adam),
                                          examples(16), {}),
    "accumulated": (accumulating(), examples(), {"microbatch": 2}),
    "accumulated unevenly": (accumulating(), examples(), {"microbatch": 3, "uneven": True}),
    # Goyal 2017, eq. (7): k workers of n are one worker that accumulates over k microbatches of n.
    "batch norm of a fixed n": (accumulating(net=normed_net), examples(16), {"microbatch": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_equal(name: str):
    make, batch, options = RIGHT[name]
    report = check(make, batch, **{"world_sizes": (1, 2), **options})
    assert report.equal, str(report)
    assert report.causes == ()
    assert max(max(one.update_gap, one.worker_gap) for one in report.comparisons) < report.tolerance
    report.raise_if_different()


def overlapping(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Every worker shuffles for itself."""
    x, y = examples()
    mine = torch.randperm(N)[: N // world_size]
    return x[mine], y[mine]


def dealt(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """One shuffle an epoch, dealt out (Goyal 2017, remark 4)."""
    x, y = examples()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(step))
    mine = order[rank::world_size]
    return x[mine], y[mine]


def scaled_by_workers(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, lr=0.1 * dist.get_world_size())


def decayed_by_workers(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, weight_decay=0.05 * dist.get_world_size())


def other_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9 / dist.get_world_size())


def decayed_by_every_worker(model: nn.Module) -> None:
    """Gradients are averaged already, and each worker's share of the decay is added, undivided."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad += 0.05 * dist.get_world_size() * parameter.detach()


def own_decay(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)

    def shrink(*_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 0.01 * dist.get_world_size())

    optimizer.register_step_post_hook(shrink)
    return optimizer


WRONG: dict[str, tuple[Any, Any, dict[str, Any], dict[str, tuple[str, ...]]]] = {
    "sum": (setup(loss=by_sum), examples(), {"world_sizes": (1, 2, 4)}, {"loss normalisation": ()}),
    "uneven means": (setup(loss=by_mean), examples(), {"uneven": True}, {"loss over uneven parts": ("LB404",)}),
    "microbatches not divided": (
        accumulating(divide="no"), examples(), {"microbatch": 2}, {"loss normalisation": ("LB405",)}),
    "uneven microbatches": (
        accumulating(divide="by microbatches"), examples(), {"microbatch": 3},
        {"loss over uneven parts": ("LB403",)}),
    "clipped before averaging": (
        setup(wrap=unwrapped, loss=by_mean, after_backward=clip_then_average), examples(), {}, {"clipping": ()}),
    "clipped by shards": (
        setup(wrap=sharded, loss=by_mean, after_backward=clip_own_shards), examples(), {}, {"clipping": ()}),
    "batch norm of another n": (setup(net=normed_net), examples(16), {}, {"batch norm": ("LB201",)}),
    "batch norm over all workers": (
        accumulating(net=partial(normed_net, NormOverAllWorkers)), examples(16), {"microbatch": 8},
        {"batch norm": ("LB202",)}),
    "dropout": (setup(net=dropping_net), examples(), {}, {"randomness": ()}),
    "own shuffles": (setup(), overlapping, {}, {"data": ("LB302",)}),
    "schedule per process": (
        setup(schedule=fading, end=step_per_process), examples(), {"steps": 4}, {"schedule": ("LB402",)}),
    "rate by workers": (setup(optimizer=scaled_by_workers), examples(), {}, {"learning rate": ("LB105",)}),
    "decay by workers": (setup(optimizer=decayed_by_workers), examples(), {}, {"weight decay": ()}),
    "decay in the gradient": (setup(after_backward=decayed_by_every_worker), examples(), {}, {"weight decay": ()}),
    "decay of weights": (setup(optimizer=own_decay), examples(), {}, {"weight decay": ()}),
    "momentum by workers": (setup(optimizer=other_momentum), examples(), {}, {"optimizer settings": ()}),
    "update a microbatch": (
        accumulating(step_each=True), examples(), {"microbatch": 2}, {"optimizer steps": ("LB407",)}),
    "not averaged": (setup(wrap=unwrapped), examples(), {}, {"gradients not averaged": ()}),
    # Several at once.
    "sum and schedule": (
        setup(loss=by_sum, schedule=fading, end=step_per_process), examples(), {},
        {"schedule": ("LB402",), "loss normalisation": ()}),
    "batch norm and clipping": (
        setup(net=normed_net, wrap=unwrapped, loss=by_mean, after_backward=clip_then_average), examples(16), {},
        {"clipping": (), "batch norm": ("LB201",)}),
    "rate and dropout": (
        setup(net=dropping_net, optimizer=scaled_by_workers), examples(), {},
        {"randomness": (), "learning rate": ("LB105",)}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_and_named_and_nothing_else(name: str):
    make, batch, options, causes = WRONG[name]
    report = check(make, batch, **{"world_sizes": (1, 2), **options})
    assert not report.equal
    assert {cause.name: cause.codes for cause in report.causes} == causes, str(report)
    with pytest.raises(NotEquivalentError, match="Different: with"):
        report.raise_if_different()


def test_shares_that_a_sampler_deals_are_equal_in_any_order():
    report = check(setup(), dealt, (1, 2, 4))
    assert report.equal, str(report)
    assert report.comparisons[0].shares == (4, 4)


def test_a_global_batch_of_each_step_is_the_same_on_every_worker():
    assert check(setup(), lambda step: examples(seed=step), (1, 2)).equal


def test_a_mistake_of_the_optimizers_memory_begins_in_the_second_step():
    first = check(setup(optimizer=other_momentum), examples(), (1, 2)).first_difference
    assert first is not None
    assert first.step == 1


# The size of a gap, against numpy: a linear model w of squared errors, plain SGD. Goyal 2017, eq. (4) and remark 3.

W = np.linspace(-1.0, 1.0, DIM)


def linear_data(num: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(num, DIM)), rng.normal(size=num)


def linear_gradients(num: int) -> np.ndarray:
    x, y = linear_data(num)
    return 2 * (x @ W - y)[:, None] * x


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(W))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def squared_mean(model: nn.Module, share: tuple[Tensor, Tensor]) -> Tensor:
    return (model(share[0]) - share[1]).square().mean()


def squared_sum(model: nn.Module, share: tuple[Tensor, Tensor]) -> Tensor:
    return (model(share[0]) - share[1]).square().sum()


@pytest.mark.parametrize("kind", ["sum", "uneven"])
def test_the_gap_is_what_the_papers_equations_give(kind: str):
    gradients = linear_gradients(8)
    right, several = gradients.mean(0), (gradients[:5].mean(0) + gradients[5:].mean(0)) / 2
    if kind == "sum":
        right, several = gradients.sum(0), (gradients[:4].sum(0) + gradients[4:].sum(0)) / 2
    expected = np.linalg.norm(several - right) / max(np.linalg.norm(several), np.linalg.norm(right))
    make = setup(
        net=Linear,
        loss=squared_sum if kind == "sum" else squared_mean,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    batch = tuple(torch.tensor(column) for column in linear_data(8))
    report = check(make, batch, (1, 2), uneven=kind == "uneven", steps=1)
    assert report.comparisons[-1].update_gap == pytest.approx(expected, rel=1e-9)
    assert report.comparisons[-1].gradient_norm == pytest.approx(np.linalg.norm(several), rel=1e-9)
    assert report.comparisons[-1].reference_gradient_norm == pytest.approx(np.linalg.norm(right), rel=1e-9)


# What differs and does not part the updates is told, and is no failure.


def test_a_gradient_that_adam_hides_is_noted():
    report = check(setup(loss=by_sum, optimizer=adam), examples(), (1, 2))
    assert report.equal, str(report)
    assert any("gradients are 0.5 times" in note for note in report.notes), report.notes


def test_running_statistics_of_one_workers_share_are_noted():
    report = check(accumulating(net=normed_net), examples(16), (1, 2), microbatch=8)
    assert report.equal, str(report)
    assert any("running statistics" in note for note in report.notes)


def test_weights_that_make_draws_for_each_worker_are_noted():
    def make(rank: int, world_size: int) -> Any:
        torch.manual_seed(rank)
        return setup(wrap=unwrapped, after_backward=averaged_by_hand)(rank, world_size)

    report = check(make, examples(), (1, 2))
    assert report.equal, str(report)
    assert any("make leaves the workers with different weights" in note for note in report.notes)


def test_a_loss_that_depends_on_the_workers_is_noted():
    def make(rank: int, world_size: int) -> Any:
        model, optimizer, step = setup()(rank, world_size)
        return model, optimizer, lambda share: step(share) * (3.0 if world_size > 1 else 1.0)

    report = check(make, examples(), (1, 2))
    assert report.equal
    assert any("returned the losses" in note for note in report.notes)


def test_an_object_with_the_three_parts_will_do():
    class Training:
        def __init__(self, rank: int, world_size: int) -> None:
            self.model = DistributedDataParallel(plain_net())
            self.optimizer = sgd(self.model)

        def step(self, share: Any) -> None:
            self.optimizer.zero_grad()
            by_mean(self.model, share).backward()
            self.optimizer.step()

    assert check(Training, examples(), (1, 2)).equal


def test_the_report_says_it_in_words():
    text = str(check(setup(loss=by_sum), examples(), (1, 2)))
    assert "Different: with 2 workers (4+4), in step 0, the update of" in text
    assert "0.5 times that on one worker (1 over the number of workers)" in text
    assert "divide by the examples of the whole step (kn)" in text
