"""How good are these weights, on examples that stay the same?

Each example is evaluated by exactly one worker, none twice; sums and counts are added up over the workers at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from largebatch.errors import DataError
from largebatch.recipe.sampler import eval_share
from largebatch.tasks.task import Split, Task
from largebatch.train.spread import Spread
from largebatch.train.workers import Workers

_CHUNK = 2048
"""Examples in one forward of an evaluation, at most; a task's max_microbatch may ask for fewer."""


def goal_indices(task: Task) -> Tensor:
    """The fixed training subset on which goals are measured: the same for every run and seed of a task."""
    size = min(task.num_goal_examples, len(task.train))
    chosen = np.random.default_rng(0).permutation(len(task.train))[:size]
    return torch.from_numpy(np.sort(chosen))


def goal_batches(task: Task, workers: Workers) -> list[Any]:
    """This worker's share of the goal examples, fetched once."""
    own = goal_indices(task)[list(eval_share(len(goal_indices(task)), workers.rank, workers.world_size))]
    return [to_device(batch, workers.device) for batch in _batches(task, task.train, own)]


def refuse_none(count: float, task: Task, what: str, skipped: list[tuple[str, str]], workers: Workers) -> None:
    """Go on where any example was left to evaluate; every worker calls it.

    Args:
        count: units evaluated, over all workers.
        task: whose examples they are.
        what: which of its examples, in words.
        skipped: what this worker left out, as (name, why).
        workers: all of them.

    Raises:
        DataError: there is none, on every worker alike; the sentence names the first that were left out on any.
    """
    if count:
        return
    names = [f"{name} ({why})" for found in workers.gather(skipped) for name, why in found]
    named = f": {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}" if names else ""
    with workers.alike():
        raise DataError(
            f"none of the {what} of task {task.name!r} can be read{named}. Fetch them again, or delete "
            "those that cannot."
        )


def mean_loss(task: Task, spread: Spread, batches: list[Any], workers: Workers) -> float:
    """Mean loss per unit over the workers' `batches`, in evaluation mode; draws no random number."""
    loss, count = _sums(task, spread, iter(batches), workers, task.loss)
    return loss / count


def held_out(task: Task, spread: Spread, workers: Workers) -> tuple[float, float]:
    """(error, loss) per unit on the held-out split, in evaluation mode; every example counts once.

    Raises:
        DataError: no held-out example can be read.
    """
    own = torch.tensor(list(eval_share(len(task.held_out), workers.rank, workers.world_size)), dtype=torch.int64)
    batches = (to_device(batch, workers.device) for batch in _batches(task, task.held_out, own))
    errors, loss, count = _sums(task, spread, batches, workers, task.errors, task.loss)
    if not count:
        skipped = getattr(task.held_out, "take_skipped", list)()
        refuse_none(count, task, f"{len(task.held_out)} held-out examples", skipped, workers)
    return errors / count, loss / count


@torch.no_grad()
def _sums(
    task: Task, spread: Spread, batches: Iterator[Any], workers: Workers, *measures: Callable[[nn.Module, Any], Tensor]
) -> tuple[float, ...]:
    """Each measure's sum over all workers' batches, and last how many units that was."""
    spread.settle()
    model = spread.core
    totals, count = [0.0] * len(measures), 0
    model.eval()
    for batch, counts in _in_step(task, batches, workers) if spread.is_sharded else ((each, 1) for each in batches):
        arranged = spread.arrange(batch)
        with spread.autocast():
            values = [float(measure(model, arranged)) for measure in measures]
        totals = [total + counts * value for total, value in zip(totals, values, strict=True)]
        count += counts * task.count(batch)
    model.train()
    return workers.sums(*totals, count)


def _in_step(task: Task, batches: Iterator[Any], workers: Workers) -> Iterator[tuple[Any, int]]:
    """Each batch with 1, then some batch with 0 until all workers are done: a sharded forward needs them all."""
    spare = None
    while True:
        batch = next(batches, None)
        if not any(workers.sums(float(batch is not None))):
            return
        if batch is None and spare is None:
            spare = to_device(task.held_out.fetch(torch.tensor([0])), workers.device)
        yield (spare, 0) if batch is None else (batch, 1)
        spare = spare if batch is None else batch


def _batches(task: Task, split: Split, chosen: Tensor) -> Iterator[Any]:
    chunk = min(_CHUNK, task.max_microbatch)
    for start in range(0, len(chosen), chunk):
        batch = split.fetch(chosen[start : start + chunk])
        if task.count(batch):  # of a split that leaves out what it cannot read, nothing may be left
            yield batch


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
