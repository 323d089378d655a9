"""What is wrong in the steps that were taken down?

Pure: steps in, findings out. A mistake is told once, with the number of steps it was seen in and the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise

from largebatch.audit.findings import Finding
from largebatch.audit.watch_loss import Term
from largebatch.audit.watch_microbatches import UNKNOWN, UNSEEN, find_microbatches
from largebatch.audit.watch_record import Step

_SAME = 1e-3
"""Weights of a unit that differ by less are the same: floating-point sums of a loss are no better."""
_UNDIVIDED = (0.75, 1.01)
"""Shares of a microbatch's loss that are not divided: 1, or a little less where a part of the loss (label smoothing,
an auxiliary head) has a factor of its own. Divided by an accumulation of 2 or more they are 0.5 at most."""

Judge = Callable[[Step], str]
"""What is wrong in a step, in words; empty if nothing is."""


def find_in_steps(steps: Sequence[Step], *, world_size: int, accumulation: int) -> list[Finding]:
    """The mistakes that one worker's steps show.

    Args:
        steps: complete optimizer steps, in order; the first may have begun before anyone looked.
        world_size: workers of the job.
        accumulation: microbatches that a worker's step is meant to have.
    """
    judges: dict[str, Judge] = {
        "LB401": _schedule_per_microbatch,
        "LB402": lambda step: _schedule_per_process(step, world_size),
        "LB403": lambda step: _uneven_microbatches(find_microbatches(step, accumulation) or ()),
        "LB405": lambda step: _not_divided(find_microbatches(step, accumulation) or ()),
        "LB406": _clipped_first,
    }
    found: list[Finding] = []
    for code, judge in judges.items():
        told = [(number, seen) for number, step in enumerate(steps, start=1) if (seen := judge(step))]
        if told:
            found.append(_finding(code, told, len(steps)))
    found += _optimizer_per_microbatch(steps, accumulation)
    return found


def find_undecided(steps: Sequence[Step], accumulation: int) -> list[str]:
    """What cannot be told of steps whose losses would be a mistake if their backwards were microbatches."""
    undecided = {
        UNKNOWN if step.is_known else UNSEEN
        for step in steps
        if find_microbatches(step, accumulation) is None
        and bool(_uneven_microbatches(step.losses) or _not_divided(step.losses))
    }
    return sorted(undecided)


def find_between_workers(steps_of_workers: Sequence[Sequence[Step]]) -> list[Finding]:
    """LB404: the mistake that shows only when the workers' steps are laid side by side."""
    together = list(zip(*steps_of_workers, strict=False))  # as many as all workers have
    told = [(number, seen) for number, steps in enumerate(together, start=1) if (seen := _uneven_workers(steps))]
    return [_finding("LB404", told, len(together))] if told else []


def _finding(code: str, told: Sequence[tuple[int, str]], num_steps: int) -> Finding:
    number, seen = told[0]
    return Finding(code=code, seen=f"In {len(told)} of {num_steps} optimizer steps, first in step {number}: {seen}.")


def _runs(step: Step, scheduler: str) -> list[int]:
    """How often a scheduler stepped in a row, each time it did, with a backward between two times."""
    events = [event for event in step.events if event in ("B", "0", scheduler)]
    return [len(list(run)) for event, run in groupby(events) if event == scheduler]


def _schedulers(step: Step) -> list[str]:
    return sorted({event for event in step.events if event not in ("B", "0")})


def _schedule_per_microbatch(step: Step) -> str:
    for scheduler in _schedulers(step):
        runs = _runs(step, scheduler)
        if len(runs) > 1 and step.num_backwards > 1:
            return (
                f"a scheduler stepped {sum(runs)} times among the {step.num_backwards} backwards of one optimizer step"
            )
    return ""


def _schedule_per_process(step: Step, world_size: int) -> str:
    for scheduler in _schedulers(step):
        if world_size > 1 and world_size in _runs(step, scheduler):
            return f"a scheduler stepped {world_size} times in a row, as many times as there are workers"
    return ""


def _clipped_first(step: Step) -> str:
    return f"{step.changed_by} changed the gradients before the monitor's step() read them" if step.changed_by else ""


def _optimizer_per_microbatch(steps: Sequence[Step], accumulation: int) -> Iterator[Finding]:
    # The first step's gradients may have been zeroed before anyone looked.
    stale = [(number, step) for number, step in enumerate(steps, start=1) if number > 1 and not step.is_clean]
    told = [
        (number, "the optimizer stepped on gradients that hold those of its last step too: they were not zeroed")
        for number, step in stale
        if step.num_backwards
    ]
    if told:
        yield _finding("LB407", told, len(steps))
    elif accumulation > 1 and len(steps) > 1 and all(step.num_forwards == 1 for step in steps):
        yield Finding(
            code="LB407",
            seen=f"The optimizer stepped after each of {len(steps)} microbatches; accumulation is {accumulation}.",
        )


def _columns(losses: Sequence[tuple[Term, ...]]) -> list[tuple[Term, ...]]:
    """Each term of a loss over several backwards; none where losses are built in different ways, or were not read."""
    kinds = {tuple(term.is_mean for term in loss) for loss in losses}
    if len(kinds) != 1:
        return []
    return [column for column in zip(*losses, strict=True) if all(term.count > 0 for term in column)]


def _parts(column: Sequence[Term]) -> list[tuple[float, float]]:
    """Of each term its units, and what their mean is multiplied by.

    A sum that is divided by its own units (by how many a mask lets through, say) is a mean. One that is divided by the
    same number in all microbatches is not: that is the step's total.
    """
    divisors = [term.divisor for term in column]
    masked = not _are_alike(divisors) or all(term.divisor == term.count for term in column)
    parts: list[tuple[float, float]] = []
    for term in column:
        units = term.divisor if masked and not term.is_mean else term.count
        parts.append((units, term.factor if term.is_mean else term.factor * units))
    return parts


def _are_alike(values: Sequence[float], tolerance: float = _SAME) -> bool:
    return max(values) - min(values) <= tolerance * max(map(abs, values))


def _weigh_unevenly(parts: Sequence[tuple[float, float]]) -> bool:
    """Whether parts of different sizes weigh the same, so that the units of a small one weigh more."""
    units, shares = zip(*parts, strict=True)
    return not _are_alike(units) and _are_alike(shares, 1e-2) and min(shares) > 0


def _uneven_microbatches(losses: Sequence[tuple[Term, ...]]) -> str:
    for column in _columns(losses):
        parts = _parts(column)
        if _weigh_unevenly(parts):
            sizes = ", ".join(f"{units:g}" for units, _ in parts)
            return f"microbatches of {sizes} units weigh {parts[0][1]:.3g} each, whatever their size"
    return ""


def _not_divided(losses: Sequence[tuple[Term, ...]]) -> str:
    num, (low, high) = len(losses), _UNDIVIDED
    for column in _columns(losses) if num > 1 else ():
        shares = [share for _, share in _parts(column)]
        if all(low <= share <= high for share in shares):
            return f"the losses of {num} backwards are not divided by {num}: together they weigh {sum(shares):.3g}"
    return ""


def _uneven_workers(steps: Sequence[Step]) -> str:
    ends = [0]
    for step in steps:
        ends.append(ends[-1] + len(step.losses))
    if len(set(ends)) < len(ends):
        return ""
    for column in _columns([loss for step in steps for loss in step.losses]):
        parts = _parts(column)
        own = [parts[start:end] for start, end in pairwise(ends)]
        totals = [(sum(units for units, _ in part), math.fsum(share for _, share in part)) for part in own]
        if _weigh_unevenly(totals):
            sizes = ", ".join(f"{units:g}" for units, _ in totals)
            return f"workers with {sizes} units weigh {totals[0][1]:.3g} each, whatever their size"
    return ""
