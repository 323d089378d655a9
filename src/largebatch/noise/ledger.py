"""What have the measured steps said so far: of all parameters, of each group, in the optimizer's metric?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from largebatch.errors import CheckpointError
from largebatch.noise.estimate import RunningNoiseScale
from largebatch.noise.moments import StepMoments, add_moments
from largebatch.units import Duration

RECENT = 31
"""Measured steps whose batches give the typical one."""


def typical_batch(batches: Iterable[int]) -> int | None:
    """The median of the last 31, which an epoch's short last step does not turn; None of none.

    >>> typical_batch([64, 64, 64, 5])
    64
    """
    recent = deque(batches, maxlen=RECENT)
    return median_low(recent) if recent else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """What one measured optimizer step said."""

    step: int
    """Its number, the first being 1."""
    moments: StepMoments
    """Of all parameters; exactly the sum of the groups'."""
    groups: dict[str, StepMoments]
    """Of each group; one entry, "rest", without `groups`."""
    preconditioned: StepMoments | None = None
    """Of all parameters in the optimizer's metric P; None without `precondition_by`, or before its first step."""


class Ledger:
    """The running noise scales of one monitor."""

    def __init__(self, names: Sequence[str], *, half_life: float | Duration | None, unit: str) -> None:
        """Start with no steps, for groups of these names; `half_life` and `unit` as in `RunningNoiseScale`."""
        self.total = RunningNoiseScale(half_life=half_life, unit=unit)
        one = len(names) == 1
        self.groups = {name: self.total if one else RunningNoiseScale(half_life=half_life, unit=unit) for name in names}
        """By name; a single group is the total."""
        self.preconditioned = RunningNoiseScale(half_life=half_life, unit=unit)
        self._batches: deque[int] = deque(maxlen=RECENT)

    @property
    def last_batch(self) -> int | None:
        """Units in the last measured step; None before the first."""
        return self._batches[-1] if self._batches else None

    @property
    def typical_batch(self) -> int | None:
        """Units in a measured step, by `typical_batch`; None before the first."""
        return typical_batch(self._batches)

    def add(self, step: int, rows: Sequence[StepMoments], *, weighed: bool) -> MeasuredStep:
        """Take in the moments of a step's groups and, if `weighed`, the same again in the second metric."""
        plain = dict(zip(self.groups, rows, strict=False))
        found = MeasuredStep(
            step=step,
            moments=add_moments(list(plain.values())),
            groups=plain,
            preconditioned=add_moments(rows[len(plain) :]) if weighed else None,
        )
        pairs = [(self.total, found.moments)]
        if len(plain) > 1:
            pairs += [(self.groups[name], part) for name, part in plain.items()]
        if found.preconditioned is not None:
            pairs.append((self.preconditioned, found.preconditioned))
        for running, moments in pairs:
            running.update(trace_cov=moments.trace_cov, grad_sq_norm=moments.grad_sq_norm, batch=moments.batch)
        self._batches.append(found.moments.batch)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts that `load_state_dict` takes back."""
        return {
            "batches": list(self._batches),
            "total": self.total.state_dict(),
            "groups": {name: running.state_dict() for name, running in self.groups.items()},
            "preconditioned": self.preconditioned.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; raises CheckpointError if it was saved with other groups, half-life or unit."""
        if list(state["groups"]) != list(self.groups):
            raise CheckpointError(
                f"the saved noise scale has groups {list(state['groups'])}; this one has {list(self.groups)}."
            )
        parts = [(self.total, state["total"]), (self.preconditioned, state["preconditioned"])]
        parts += [(self.groups[name], part) for name, part in state["groups"].items()]
        batches = [int(batch) for batch in state["batches"]]
        before = [(running, running.state_dict()) for running, _ in parts]
        try:
            for running, saved in parts:
                running.load_state_dict(saved)
        except BaseException:  # all of it or nothing
            for running, saved in before:
                running.load_state_dict(saved)
            raise
        self._batches = deque(batches, maxlen=RECENT)
