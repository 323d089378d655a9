"""Is k workers of n = ghost n on one device = accumulation over k microbatches of n, and n over workers the same again?

Goyal 2017, eq. (5) to (7), on a residual net with two batch norm layers in float64, by the library's own conversion:
the same batch of 32 examples is trained on for some steps in every layout. Only the order of sums differs.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.recipe.batchnorm import (
    average_statistics,
    batchnorm_layers,
    batchnorm_over,
    recompute_statistics,
)
from workers import on_workers

BATCH, N, STEPS = 32, 8, 3
EXACT = {"rtol": 1e-10, "atol": 1e-10}


class Residual(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(torch.relu(x + self.second(x)).mean((2, 3)))


def examples(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 2, 4, 4, dtype=torch.float64, generator=generator) * 2 + 1
    return x + torch.arange(BATCH).view(-1, 1, 1, 1) / 8, torch.randint(3, (BATCH,), generator=generator)


def trained(
    rank: int, world_size: int, accumulation: int, n: int, momentum: float | None = 0.1, order: Tensor | None = None
) -> dict[str, list]:
    """Train in this layout: outputs and gradients of each step, statistics before and after recomputation, forms."""
    microbatch = BATCH // world_size // accumulation
    model = Residual(momentum).double()
    model = batchnorm_over(model, n, local_batch=microbatch, world_size=world_size, rank=rank)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found: dict[str, list] = {"outputs": [], "gradients": []}

    def share(step: int) -> list[Tensor]:
        every = torch.arange(BATCH) if order is None else order
        return [part[every].split(BATCH // world_size)[rank] for part in examples(step)]

    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = []
        for x, y in zip(*(part.split(microbatch) for part in share(step)), strict=True):
            outputs.append(wrapped(x))
            # Remark 3: divided by kn. DDP averages, so by the worker's share here.
            (nn.functional.cross_entropy(outputs[-1], y, reduction="sum") * world_size / BATCH).backward()
        found["outputs"].append(torch.cat(outputs).detach().numpy())
        found["gradients"].append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy())
        optimizer.step()
    average_statistics(model)
    found["averaged"] = [buffer.numpy().copy() for name, buffer in model.named_buffers() if "running" in name]
    recompute_statistics(model, [x for step in range(STEPS) for x in share(step)[0].split(microbatch)])
    found["recomputed"] = [buffer.numpy().copy() for name, buffer in model.named_buffers() if "running" in name]
    found["forms"] = [(layer.form, layer.n) for layer in batchnorm_layers(model, local_batch=microbatch)]
    return found


def whole(workers: list[dict[str, list]]) -> dict[str, list]:
    """What the workers found, put together as one device's; what must be alike on all of them is."""
    for found in workers:
        for name in ("gradients", "averaged", "recomputed"):
            for ours, theirs in zip(found[name], workers[0][name], strict=True):
                np.testing.assert_array_equal(ours, theirs)
    outputs = [np.concatenate([found["outputs"][step] for found in workers]) for step in range(STEPS)]
    return workers[0] | {"outputs": outputs}


def assert_same(ours: dict[str, list], theirs: dict[str, list], names: tuple[str, ...]) -> None:
    for name in names:
        for one, other in zip(ours[name], theirs[name], strict=True):
            np.testing.assert_allclose(one, other, err_msg=name, **EXACT)


GHOST = trained(0, 1, 1, N)
ALL = ("outputs", "gradients", "recomputed")


def test_accumulation_over_microbatches_of_n_is_ghost_n_even_in_running_statistics():
    accumulated = trained(0, 1, BATCH // N, N)
    assert (GHOST["forms"], accumulated["forms"]) == ([("ghost", N)] * 2, [("local", N)] * 2)
    assert_same(accumulated, GHOST, (*ALL, "averaged"))


@pytest.mark.parametrize(
    ("world_size", "accumulation", "form"),
    [(4, 1, "local"), (2, 1, "ghost"), (2, 2, "local"), (1, 2, "ghost"), (4, 2, "group"), (2, 4, "group")],
)
def test_workers_and_accumulation_of_any_kind_are_ghost_n(world_size, accumulation, form):
    if form == "group":
        # Microbatches spread over workers: each run of n of the batch is dealt to one group, one microbatch each.
        microbatch = BATCH // world_size // accumulation
        runs = torch.arange(BATCH).view(-1, accumulation, N // microbatch, microbatch)
        found = on_workers(world_size, trained, world_size, accumulation, N, 0.1, runs.transpose(1, 2).reshape(-1))
    else:
        found = on_workers(world_size, trained, world_size, accumulation, N)
    assert found[0]["forms"] == [(form, N)] * 2
    assert_same(whole(found), GHOST, ("gradients", "recomputed") if form == "group" else ALL)


def test_four_workers_that_hold_two_halves_of_n_each_are_ghost_n():
    # n = 16 of local batches of 8: groups {0, 1} and {2, 3}.
    found = on_workers(4, trained, 4, 1, 2 * N)
    assert found[0]["forms"] == [("group", 2 * N)] * 2
    assert_same(whole(found), trained(0, 1, 1, 2 * N), ALL)


def test_synchronised_over_all_workers_is_another_loss():
    # "BN statistics should not be computed across all workers": it is batch norm over kn, and not over n.
    found = whole(on_workers(4, trained, 4, 1, BATCH))
    assert found["forms"] == [("group", BATCH)] * 2
    assert_same(found, trained(0, 1, 1, BATCH), ALL)
    for name in ALL:
        assert max(np.abs(one - other).max() for one, other in zip(found[name], GHOST[name], strict=True)) > 1e-2, name


def test_a_cumulative_average_is_the_same_in_every_layout_without_recomputation():
    # momentum=None: every run counts alike, whichever worker saw it and when.
    found = [whole(on_workers(4, trained, 4, 1, N, None)), trained(0, 1, 4, N, None), trained(0, 1, 1, N, None)]
    for one in found[:2]:
        assert_same(one, found[2], (*ALL, "averaged"))


@settings(max_examples=15)
@given(k=st.integers(1, 4), n=st.integers(2, 6), places=st.integers(1, 4), seed=st.integers(0, 99))
def test_ghost_n_is_accumulation_over_n_for_any_shape(k, n, places, seed):
    torch.manual_seed(seed)
    x, y = torch.randn(k * n, 2, places, dtype=torch.float64), torch.randn(k * n, 3, dtype=torch.float64)
    made = [
        nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)).double()
        for _ in range(2)
    ]
    made[1].load_state_dict(made[0].state_dict())
    ghost, plain = batchnorm_over(made[0], n, local_batch=k * n), made[1]
    (ghost(x).mean(2) - y).square().sum().div(k * n).backward()
    for inputs, targets in zip(x.split(n), y.split(n), strict=True):
        (plain(inputs).mean(2) - targets).square().sum().div(k * n).backward()
    for one, other in zip(ghost.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **EXACT)
    for one, other in zip(ghost.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, **EXACT)
