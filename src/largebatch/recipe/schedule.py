"""What is the learning rate at this step?

Schedules are closed forms of the optimizer step: called once per optimizer step, never per microbatch, epoch
or process. A step counts from 0, and `lr_at(step)` is the rate of the update that takes step to step + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from largebatch.errors import ConfigError
from largebatch.recipe.scaling import is_number
from largebatch.units import Duration

Warmup = Literal["gradual", "constant"]
"""How a warmup gets to the peak: by the same increment each step, or by one jump at its end."""


class Schedule(Protocol):
    """A learning rate for every optimizer step."""

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the update that takes `step` (from 0) to step + 1."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """The same learning rate at every step.

    >>> Constant(lr=0.1).lr_at(1000)
    0.1
    """

    lr: float
    """Learning rate, > 0."""

    def __post_init__(self) -> None:
        check_lr("lr", self.lr)

    def lr_at(self, step: int) -> float:
        """Return `lr`."""
        check_step(step)
        return self.lr


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupStepDecay:
    """Warmup, then step decay.

    A gradual warmup adds a constant increment each step, so that `lr_at(0)` is `start_lr` and `lr_at(warmup_steps)`
    is `peak_lr`; a constant one keeps `start_lr` and then jumps. Either goes back to the original schedule: decay
    steps count from step 0, not from the warmup's end.

    >>> schedule = WarmupStepDecay(start_lr=0.1, peak_lr=3.2, warmup_steps=782, decay_steps=(4692, 9384, 12511))
    >>> [round(schedule.lr_at(step), 6) for step in (0, 391, 782, 4691, 4692, 12511)]
    [0.1, 1.65, 3.2, 3.2, 0.32, 0.0032]

    Source: Goyal 2017, sec. 2.2 (constant and gradual warmup) and 5.1 (step decay).
    """

    start_lr: float
    """Rate of step 0, > 0; not used without warmup."""
    peak_lr: float
    """Rate when the warmup is over, > 0."""
    warmup_steps: int = 0
    """Length of the warmup in optimizer steps; 0 starts at `peak_lr`."""
    decay_steps: tuple[int, ...] = ()
    """Optimizer steps, increasing, at which the rate is multiplied by `decay_factor`; none inside the warmup."""
    decay_factor: float = 0.1
    """What each decay multiplies the rate by, in (0, 1]."""
    warmup: Warmup = "gradual"
    """"gradual", or "constant": insufficient on ImageNet at 8k (Goyal 2017, Table 1)."""

    def __post_init__(self) -> None:
        check_lr("start_lr", self.start_lr)
        check_lr("peak_lr", self.peak_lr)
        check_warmup(self.warmup)
        if not (is_number(self.warmup_steps) and self.warmup_steps >= 0):
            raise ConfigError(f"warmup_steps is at least 0; got {self.warmup_steps!r}.")
        if not all(is_number(step) and step >= 0 for step in self.decay_steps):
            raise ConfigError(f"decay_steps are numbers of at least 0; got {self.decay_steps!r}.")
        if list(self.decay_steps) != sorted(self.decay_steps):
            raise ConfigError(f"decay_steps must increase; got {self.decay_steps}.")
        if self.decay_steps and self.decay_steps[0] < self.warmup_steps:
            raise ConfigError(
                f"the first decay, at step {self.decay_steps[0]}, lies inside the warmup of {self.warmup_steps} steps. "
                f"Shorten the warmup or decay later."
            )
        if not (is_number(self.decay_factor) and 0 < self.decay_factor <= 1):
            raise ConfigError(f"decay_factor is in (0, 1]; got {self.decay_factor!r}.")

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the update that takes `step` (from 0) to step + 1."""
        check_step(step)
        if step < self.warmup_steps:
            if self.warmup == "constant":
                return self.start_lr
            return self.start_lr + (self.peak_lr - self.start_lr) * (step / self.warmup_steps)
        num_decays = sum(step >= decay_step for decay_step in self.decay_steps)
        return self.peak_lr * self.decay_factor**num_decays


def epochs_to_steps(epochs: float, *, batch: int, units_per_epoch: int) -> int:
    """The whole number of optimizer steps nearest to `epochs` (half a step rounds up).

    Every length of a recipe (the run, its warmup, each decay, each epoch's end) is rounded by this one rule, from
    epoch 0, so that no error adds up: an epoch is 156.39 steps, and 90 of them are 14,075, not 90 * 156.

    Args:
        epochs: passes over the data, >= 0.
        batch: units in one optimizer step, >= 1.
        units_per_epoch: units in one pass over the data, >= 1.

    Returns:
        Optimizer steps.

    >>> epochs_to_steps(5, batch=8192, units_per_epoch=1_281_167)
    782
    """
    return math.floor(Duration(epochs, "epochs").in_steps(batch=batch, units_per_epoch=units_per_epoch) + 0.5)


class ScheduleLR(LambdaLR):
    """A schedule as a torch learning-rate scheduler; made by `as_torch_scheduler`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position and put its learning rate into the optimizer, whichever of the two is loaded first."""
        super().load_state_dict(state_dict)
        for group, lr_at in zip(self.optimizer.param_groups, self.lr_lambdas, strict=True):
            group["lr"] = lr_at(self.last_epoch)


def as_torch_scheduler(optimizer: Optimizer, schedule: Schedule) -> ScheduleLR:
    """A torch scheduler that gives every parameter group exactly `schedule.lr_at(step)`.

    Call its `step()` once after each optimizer step. Its `state_dict` holds plain numbers (it loads with
    `weights_only=True`) and resumes exactly.

    Args:
        optimizer: its groups' own learning rates are replaced, from now on, by the schedule's.
        schedule: the rate of every step.

    Returns:
        The scheduler, at step 0.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> scheduler = as_torch_scheduler(optimizer, Constant(lr=0.3))
    >>> optimizer.param_groups[0]["lr"]
    0.3
    """
    for group in optimizer.param_groups:
        group["lr"] = 1.0  # LambdaLR multiplies the first rate; times 1 is exact
        group.pop("initial_lr", None)
    return ScheduleLR(optimizer, schedule.lr_at)


def check_lr(name: str, lr: float) -> None:
    """Raise ConfigError unless `lr` is finite and above 0."""
    if not (is_number(lr) and lr > 0 and math.isfinite(lr)):
        raise ConfigError(f"{name} is a finite learning rate above 0; got {lr!r}.")


def check_step(step: int) -> None:
    """Raise ConfigError unless `step` is at least 0."""
    if step < 0:
        raise ConfigError(f"a schedule starts at step 0; got step {step}.")


def check_warmup(warmup: str) -> None:
    """Raise ConfigError unless `warmup` names a way to warm up."""
    if warmup not in get_args(Warmup):
        raise ConfigError(f"warmup {warmup!r} is not known. Use one of: {', '.join(get_args(Warmup))}.")
