"""Which learning rates will this scheduler give?

Nothing is read off a scheduler's class: a copy of it, tied to an optimizer of its own, is stepped, and its rates are
read. The user's scheduler, optimizer and random state are left as they are. A scheduler that cannot be copied or
stepped, or that is under way and cannot be asked for its beginning, gives None: its rates are not known.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

MOST_STEPS = 20_000
"""Scheduler steps that are looked at."""
_PATIENCE = 5_000  # steps without a new highest rate after which none is expected
_ROUNDING = 1e-9  # torch's schedulers multiply rates up, so that what is constant wavers


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a scheduler does to the parameter group whose rate rises highest."""

    first: float
    """Rate of the first step."""
    peak: float
    """Highest rate."""
    peak_at: int
    """Scheduler steps before the highest rate is first reached."""
    settled: bool
    """Whether the peak is one: the rate was still rising at the last step looked at if not."""
    changes: bool
    """Whether the rate changes at all."""
    momentum_follows: bool
    """Whether the momentum is multiplied by new_lr / old_lr whenever the rate changes."""

    @property
    def warms_up(self) -> bool:
        """Whether the rate starts at least a tenth below its peak."""
        return self.first <= 0.9 * self.peak


def constant_rates(optimizer: Optimizer) -> Rates:
    """The rates of an optimizer that no scheduler moves."""
    lr = max(float(group["lr"]) for group in optimizer.param_groups)
    return Rates(first=lr, peak=lr, peak_at=0, settled=True, changes=False, momentum_follows=False)


def evaluate(scheduler: Any, *, num_steps: int | None = None, keep: Iterable[Any] = ()) -> Rates | None:
    """The rates of a scheduler from its first step on.

    Args:
        scheduler: torch's or timm's, or one with the same methods; one that stops with an error (OneCycleLR after its
            last step) is taken to end there.
        num_steps: steps to look at, at most MOST_STEPS; None looks until no higher rate is to be expected.
        keep: objects that the copy shares with the original, since they are large and not its own.

    Returns:
        The rates; None where they cannot be known.

    >>> optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> rates = evaluate(torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5))
    >>> rates.first, round(rates.peak, 6), rates.peak_at
    (0.1, 1.0, 5)
    """
    if isinstance(scheduler, ReduceLROnPlateau):  # asks for a metric; whatever that is, the rate never rises
        if scheduler.last_epoch > 0:
            return None
        lr = max(float(group["lr"]) for group in scheduler.optimizer.param_groups)
        return Rates(first=lr, peak=lr, peak_at=0, settled=True, changes=True, momentum_follows=False)
    most = MOST_STEPS if num_steps is None else min(num_steps, MOST_STEPS)
    with _nothing_touched():
        try:
            path = _walk(scheduler, most, keep)
        except Exception:  # code of others: whatever goes wrong in it, the rates are not known
            return None
    return _describe(path) if path else None


def _walk(scheduler: Any, most: int, keep: Iterable[Any]) -> list[list[tuple[float, float]]]:
    """(lr, momentum) of every group at every step."""
    stand_in = _stand_in(scheduler.optimizer)
    memo: dict[int, Any] = {id(each): each for each in keep}
    memo[id(scheduler.optimizer)] = stand_in
    clone = copy.deepcopy(scheduler, memo)
    go_to = _stepper(clone, stand_in)
    path = list[list[tuple[float, float]]]()
    highest, highest_at = 0.0, 0
    for step in range(most):
        try:
            go_to(step)
        except Exception:
            if not step:
                raise
            break  # a schedule of a fixed length is over
        row = [(float(group["lr"]), _momentum(group)) for group in stand_in.param_groups]
        if not all(math.isfinite(lr) for lr, _ in row):
            break
        path.append(row)
        lr = max(lr for lr, _ in row)
        if lr > highest + _ROUNDING * abs(highest):
            highest, highest_at = lr, step
        if step > highest_at + max(_PATIENCE, 3 * highest_at):
            break
    return path


def _stepper(scheduler: Any, optimizer: Optimizer) -> Callable[[int], None]:
    """What puts the rates of a step, counted from 0 and asked for in order, into the optimizer."""
    if hasattr(scheduler, "step_update") and hasattr(scheduler, "t_in_epochs"):  # timm's, which are told the step
        return scheduler.step if scheduler.t_in_epochs else scheduler.step_update
    if getattr(scheduler, "last_epoch", 0) > 0:
        if isinstance(scheduler, LambdaLR):
            return lambda step: _put(
                optimizer,
                [lr * f(step) for lr, f in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)],
            )
        raise ValueError("under way, and its beginning cannot be asked for")
    return lambda step: scheduler.step() if step else None


def _put(optimizer: Optimizer, lrs: list[Any]) -> None:
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = float(lr)


def _stand_in(optimizer: Optimizer) -> SGD:
    """An optimizer with the same groups, over parameters that nobody trains."""
    stand_in = SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    stand_in.param_groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        | {"params": [torch.zeros(1, requires_grad=True)]}
        for group in optimizer.param_groups
    ]
    return stand_in


def _momentum(group: dict[str, Any]) -> float:
    return float(group["momentum"] if "momentum" in group else group.get("betas", (0.0,))[0])


def _describe(path: list[list[tuple[float, float]]]) -> Rates:
    peaks = [max(row[number][0] for row in path) for number in range(len(path[0]))]
    group = peaks.index(max(peaks))
    lrs = [row[group][0] for row in path]
    momenta = [row[group][1] for row in path]
    near = max(lrs) * (1 - _ROUNDING)
    peak_at = next(step for step, lr in enumerate(lrs) if lr >= near)
    return Rates(
        first=lrs[0],
        peak=lrs[peak_at],
        peak_at=peak_at,
        settled=len(lrs) == 1 or lrs[-1] < near or lrs[-2] >= near,
        changes=min(lrs) < near,
        momentum_follows=_follows(lrs, momenta),
    )


def _follows(lrs: list[float], momenta: list[float]) -> bool:
    if min(lrs) <= 0 or momenta[0] <= 0:
        return False
    ratios = [new / old for old, new in itertools.pairwise(lrs)]
    expected = [momenta[0] * ratio for ratio in ratios]
    moved = any(abs(ratio - 1) > 0.01 for ratio in ratios)
    return moved and all(math.isclose(m, e, rel_tol=1e-3) for m, e in zip(momenta[1:], expected, strict=True))


@contextmanager
def _nothing_touched() -> Generator[None]:
    """Random states are put back, and what a copy that trains nothing warns of is not heard."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def is_scheduler(scheduler: Any) -> bool:
    """Whether it is torch's, timm's, or has their two members."""
    return isinstance(scheduler, LRScheduler) or (
        callable(getattr(scheduler, "step", None)) and isinstance(getattr(scheduler, "optimizer", None), Optimizer)
    )
