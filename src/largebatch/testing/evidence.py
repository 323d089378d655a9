"""Which runs bear on the question why one layout parts from one worker?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from largebatch.testing.compare import fit_ratio, flat, update_gaps
from largebatch.testing.observe import RunRecord
from largebatch.testing.weights import Named

Parts = tuple[tuple[tuple[int, int], ...], ...]
"""For each worker, the positions of the global batch in each of its microbatches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All runs that bear on one layout that parts from one worker."""

    layout: str
    """The layout in words."""
    step: int
    """The first step whose updates part."""
    tolerance: float
    """Relative difference that counts as none."""
    worker_gap: float
    """How far the layout's workers are from each other in that step."""
    several: list[RunRecord]
    """The layout's record, a worker each."""
    one: RunRecord
    """The record on one worker."""
    again: Mapping[str, RunRecord] = field(default_factory=dict)
    """One worker again, by what was changed: "same draws", "other draws"."""
    variants: Mapping[str, tuple[RunRecord, list[RunRecord]]] = field(default_factory=dict)
    """(one worker, several) by variant: "quiet", or the suspect that is left in."""
    parts: Parts = ()
    """The layout's microbatches."""
    parts_on_one: Parts = ()
    """One worker's microbatches."""
    alone: Mapping[tuple[str, tuple[int, int]], Tensor] = field(default_factory=dict)
    """The gradient of one worker on these positions only, by variant and positions."""

    @property
    def world_size(self) -> int:
        """Workers of the layout."""
        return len(self.several)

    @property
    def close(self) -> float:
        """What is left over by a fit that explains all."""
        return 3 * self.tolerance

    def gradients(self, variant: str) -> tuple[Tensor, Tensor] | None:
        """(one worker's, several workers') gradient in the step that parts."""
        if variant == "as it is":
            one, several = self.one, self.several
        elif variant in self.variants:
            one, several = self.variants[variant]
        else:
            return None
        return flat(one.steps[self.step].gradients), flat(several[0].steps[self.step].gradients)

    def agree(self, variant: str) -> bool:
        """The gradients are equal to the tolerance."""
        found = self.gradients(variant)
        if found is None:
            return False
        one, several = found
        size = max(float(one.norm()), float(several.norm()))
        return size == 0 or float((one - several).norm()) <= self.close * size


def weights_before(record: RunRecord, step: int) -> Named:
    """The weights before a step: those at the start and all updates since."""
    weights = {name: record.start[name] for name in record.steps[0].updates}
    for done in record.steps[:step]:
        weights = {name: weights[name] + done.updates[name] for name in weights}
    return weights


def largest_gap(one: RunRecord, other: RunRecord, step: int) -> float:
    """The largest gap of an update between two runs in a step."""
    a, b = one.steps[step], other.steps[step]
    gaps = update_gaps(b.updates, a.updates, b.gradients, a.gradients, weights_before(one, step))
    return max((gap.size for gap in gaps), default=0.0)


def along_weights(seen: Evidence, what: Literal["gradient", "update"]) -> str | None:
    """Words, when the difference is the weights (before or after the step) times one number, where there is one."""
    one, other = seen.one.steps[seen.step], seen.several[0].steps[seen.step]
    first, second = (one.updates, other.updates) if what == "update" else (one.gradients, other.gradients)
    before = weights_before(seen.one, seen.step)
    usual = float(flat(first).norm())
    gaps = {name: (second[name].double() - expected.double()).reshape(-1) for name, expected in first.items()}
    gaps = {
        name: gap
        for name, gap in gaps.items()
        if float(gap.norm()) > seen.tolerance * max(float(first[name].double().norm()), 0.1 * usual)
    }
    if sum(gap.numel() for gap in gaps.values()) <= len(gaps):
        return None  # one number is along any other
    for weights in (before, {name: before[name] + one.updates[name] for name in before}):
        fits = [fit_ratio(gap, weights[name].double().reshape(-1)) for name, gap in gaps.items()]
        factors = [factor for factor, _ in fits]
        if all(rest <= 0.01 for _, rest in fits) and max(factors) - min(factors) <= 0.02 * abs(factors[0]):
            return (
                f"with {seen.layout}, in step {seen.step}, the {what} differs from that on one worker by "
                f"{factors[0]:.4g} times the weights, in {len(gaps)} of {len(first)} parameters."
            )
    return None
