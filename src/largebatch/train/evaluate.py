"""How good are these weights, on examples that stay the same?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from largebatch.tasks.task import Split, Task

_CHUNK = 2048
"""Examples in one forward of an evaluation, at most; a task's max_microbatch may ask for fewer."""


def goal_indices(task: Task) -> Tensor:
    """The fixed training subset on which goals are measured: the same for every run and seed of a task."""
    size = min(task.num_goal_examples, len(task.train))
    chosen = np.random.default_rng(0).permutation(len(task.train))[:size]
    return torch.from_numpy(np.sort(chosen))


def _batches(task: Task, split: Split, chosen: Tensor) -> Iterator[Any]:
    chunk = min(_CHUNK, task.max_microbatch)
    for start in range(0, len(chosen), chunk):
        yield split.fetch(chosen[start : start + chunk])


@torch.no_grad()
def mean_loss(task: Task, model: nn.Module, batches: list[Any]) -> float:
    """Mean loss per unit over `batches`, in evaluation mode; draws no random number."""
    total, count = 0.0, 0
    model.eval()
    for batch in batches:
        total += float(task.loss(model, batch))
        count += task.count(batch)
    model.train()
    return total / count


@torch.no_grad()
def held_out(task: Task, model: nn.Module, device: torch.device) -> tuple[float, float]:
    """(error, loss) per unit on the held-out split, in evaluation mode; every example counts once."""
    errors, loss, count = 0.0, 0.0, 0
    model.eval()
    for batch in _batches(task, task.held_out, torch.arange(len(task.held_out))):
        moved = to_device(batch, device)
        errors += float(task.errors(model, moved))
        loss += float(task.loss(model, moved))
        count += task.count(moved)
    model.train()
    return errors / count, loss / count


def goal_batches(task: Task, device: torch.device) -> list[Any]:
    """The goal examples, fetched once."""
    return [to_device(batch, device) for batch in _batches(task, task.train, goal_indices(task))]


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch (tensor, tuple, list or dict) to `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple | list):
        moved = [to_device(item, device) for item in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, dict):
        return {key: to_device(item, device) for key, item in batch.items()}
    return batch


def crossing(earlier: tuple[int, float], later: tuple[int, float], goal: float) -> float:
    """The step at which the loss fell to `goal` between two evaluations, interpolated in log loss.

    Args:
        earlier: (step, loss) with loss above the goal.
        later: (step, loss) with loss at or below the goal.

    >>> crossing((10, 4.0), (20, 1.0), 2.0)
    15.0
    """
    (first, above), (second, below) = earlier, later
    if below > 0:
        above, below, goal = math.log(above), math.log(below), math.log(goal)
    return first + (second - first) * (above - goal) / (above - below)
