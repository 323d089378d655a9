"""Which other shapes can a learning rate have over a run?

Shapes are closed forms of the step as those of schedule.py are, and are set in a row by `Joined`: a warmup is a part
in front (`warmed_up`), warmup-stable-decay is three parts. A part counts its steps from its own beginning, so a cosine
behind a warmup spans the steps after the warmup; step decay alone counts from step 0 (`WarmupStepDecay`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from largebatch.errors import ConfigError
from largebatch.recipe.scaling import is_number
from largebatch.recipe.schedule import Constant, Schedule, Warmup, check_lr, check_step, check_warmup


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """From one rate to another by the same increment each step, then level.

    >>> [Linear(start_lr=0.4, num_steps=4).lr_at(step) for step in (0, 1, 2, 4, 9)]
    [0.4, 0.30000000000000004, 0.2, 0.0, 0.0]
    """

    start_lr: float
    """Rate of step 0, > 0."""
    num_steps: int
    """Steps from `start_lr` to `end_lr`, >= 1."""
    end_lr: float = 0.0
    """Rate of step `num_steps` and of all later ones, >= 0."""

    def __post_init__(self) -> None:
        _check_shape(self.start_lr, self.end_lr, self.num_steps)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the update that takes `step` (from 0) to step + 1."""
        check_step(step)
        if step >= self.num_steps:
            return self.end_lr
        return self.start_lr + (self.end_lr - self.start_lr) * (step / self.num_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine:
    """From one rate down to another by half a cosine, then level.

    >>> [round(Cosine(start_lr=0.4, num_steps=4, end_lr=0.2).lr_at(step), 6) for step in (0, 1, 2, 3, 4, 9)]
    [0.4, 0.370711, 0.3, 0.229289, 0.2, 0.2]

    Source: Loshchilov 2017, eq. (5), without restarts.
    """

    start_lr: float
    """Rate of step 0, > 0."""
    num_steps: int
    """Steps from `start_lr` to `end_lr`, >= 1."""
    end_lr: float = 0.0
    """Rate of step `num_steps` and of all later ones, >= 0."""

    def __post_init__(self) -> None:
        _check_shape(self.start_lr, self.end_lr, self.num_steps)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the update that takes `step` (from 0) to step + 1."""
        check_step(step)
        if step >= self.num_steps:
            return self.end_lr
        return self.end_lr + (self.start_lr - self.end_lr) * (1.0 + math.cos(math.pi * step / self.num_steps)) / 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """Schedules one after the other, each counting from its own beginning; the last one goes on for ever.

    >>> schedule = Joined(parts=((Linear(start_lr=0.1, end_lr=0.5, num_steps=4), 4), (Constant(lr=0.5), 10)))
    >>> [round(schedule.lr_at(step), 6) for step in (0, 1, 4, 13, 99)]
    [0.1, 0.2, 0.5, 0.5, 0.5]
    """

    parts: tuple[tuple[Schedule, int], ...]
    """(schedule, its steps, >= 1), in order."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("a joined schedule has at least one part; got none. Give (schedule, steps) pairs.")
        for number, (_, steps) in enumerate(self.parts, start=1):
            if steps < 1:
                raise ConfigError(
                    f"each part of a joined schedule lasts at least 1 step; part {number} of {len(self.parts)} lasts "
                    f"{steps}. Leave it out."
                )

    @property
    def num_steps(self) -> int:
        """Steps of all parts together."""
        return sum(steps for _, steps in self.parts)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the update that takes `step` (from 0) to step + 1."""
        check_step(step)
        for schedule, steps in self.parts[:-1]:
            if step < steps:
                return schedule.lr_at(step)
            step -= steps
        return self.parts[-1][0].lr_at(step)


def warmed_up(
    schedule: Schedule, *, num_steps: int, start_lr: float, warmup_steps: int, warmup: Warmup = "gradual"
) -> Schedule:
    """A schedule with a warmup in front of it.

    Args:
        schedule: counts from the warmup's end; its first rate is the warmup's peak.
        num_steps: steps of the whole run, above `warmup_steps`.
        start_lr: rate of step 0, > 0; not used without warmup.
        warmup_steps: length of the warmup, >= 0; 0 gives `schedule` back.
        warmup: "gradual" adds the same increment each step; "constant" keeps `start_lr`, then jumps.

    Returns:
        The schedule of the whole run.

    Raises:
        ConfigError: the warmup does not end within the run, or a number is out of its range.

    >>> schedule = warmed_up(Constant(lr=0.5), num_steps=9, start_lr=0.1, warmup_steps=4)
    >>> [round(schedule.lr_at(step), 6) for step in (0, 2, 4, 8)]
    [0.1, 0.3, 0.5, 0.5]

    Source: Goyal 2017, sec. 2.2; He 2019 for a cosine that spans the steps after the warmup.
    """
    check_warmup(warmup)
    if warmup_steps < 0:
        raise ConfigError(f"warmup_steps is at least 0; got {warmup_steps}.")
    if warmup_steps >= num_steps:
        raise ConfigError(
            f"a warmup of {warmup_steps} steps does not end within the run of {num_steps} steps: the target learning "
            f"rate would never be used. Shorten the warmup or train longer."
        )
    if warmup_steps == 0:
        return schedule
    if warmup == "constant":
        front: Schedule = Constant(lr=start_lr)
    else:
        front = Linear(start_lr=start_lr, end_lr=schedule.lr_at(0), num_steps=warmup_steps)
    return Joined(parts=((front, warmup_steps), (schedule, num_steps - warmup_steps)))


def warmup_stable_decay(
    *,
    peak_lr: float,
    num_steps: int,
    decay_steps: int,
    warmup_steps: int = 0,
    start_lr: float | None = None,
    end_lr: float = 0.0,
    warmup: Warmup = "gradual",
) -> Schedule:
    """Warmup, then the peak rate for most of the run, then a linear decay to its end.

    Args:
        peak_lr: rate between warmup and decay, > 0.
        num_steps: steps of the whole run, >= 1.
        decay_steps: steps of the decay, >= 1, none inside the warmup.
        warmup_steps: steps of the warmup, >= 0.
        start_lr: rate of step 0, > 0; needed with a warmup.
        end_lr: rate of step `num_steps` and of all later ones, >= 0.
        warmup: as `warmed_up`.

    Returns:
        The schedule of the whole run.

    Raises:
        ConfigError: warmup and decay do not both fit into the run, or a number is out of its range.

    >>> schedule = warmup_stable_decay(peak_lr=0.5, num_steps=20, decay_steps=5, warmup_steps=4, start_lr=0.1)
    >>> [round(schedule.lr_at(step), 6) for step in (0, 2, 4, 15, 16, 19, 20)]
    [0.1, 0.3, 0.5, 0.5, 0.4, 0.1, 0.0]

    Source: Hu 2024 (MiniCPM), sec. 4; the linear form of the decay: Hägele 2024.
    """
    if warmup_steps and start_lr is None:
        raise ConfigError(f"a warmup of {warmup_steps} steps needs the rate it starts from; got start_lr=None.")
    if decay_steps < 1:
        raise ConfigError(
            f"a decay lasts at least 1 step; got {decay_steps} of {num_steps}. Let it take a larger part of the run, "
            f"or train longer."
        )
    stable_steps = num_steps - warmup_steps - decay_steps
    if stable_steps < 0:
        raise ConfigError(
            f"a decay over the last {decay_steps} of {num_steps} steps begins inside the warmup of {warmup_steps} "
            f"steps. Shorten the one or the other."
        )
    schedule: Schedule = Linear(start_lr=peak_lr, end_lr=end_lr, num_steps=decay_steps)
    if stable_steps:
        schedule = Joined(parts=((Constant(lr=peak_lr), stable_steps), (schedule, decay_steps)))
    return warmed_up(
        schedule, num_steps=num_steps, start_lr=start_lr or peak_lr, warmup_steps=warmup_steps, warmup=warmup
    )


def _check_shape(start_lr: float, end_lr: float, num_steps: int) -> None:
    check_lr("start_lr", start_lr)
    if not (is_number(end_lr) and end_lr >= 0 and math.isfinite(end_lr)):
        raise ConfigError(f"end_lr is a finite learning rate of at least 0; got {end_lr!r}.")
    if not (is_number(num_steps) and num_steps >= 1):
        raise ConfigError(f"num_steps is at least 1; got {num_steps!r}.")
