"""What did the comparison of one worker with several find, in words?"""

from __future__ import annotations

from dataclasses import dataclass

from largebatch.errors import LargebatchError


class NotEquivalentError(LargebatchError, AssertionError):
    """The same examples gave another update on another number of workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One step in one layout, next to the same step on one worker."""

    layout: str
    """The layout in words."""
    world_size: int
    """Its workers."""
    shares: tuple[int, ...]
    """Examples each worker had."""
    step: int
    """The step, from 0."""
    update_gap: float
    """Norm of the difference of the updates over that of the larger one, of the parameter where it is largest."""
    parameter: str
    """The name of that parameter."""
    parameters_that_differ: tuple[str, ...]
    """Every parameter whose gap is above the tolerance, in the model's order."""
    worker_gap: float
    """The same gap between the workers of this layout: 0 where all took the same update."""
    gradient_norm: float
    """Norm of the gradient that the optimizer found."""
    reference_gradient_norm: float
    """The same on one worker."""
    losses: tuple[float | None, ...]
    """What each worker's step returned."""
    reference_loss: float | None
    """What the step returned on one worker."""
    buffer_gap: float
    """The largest relative difference of a buffer (running statistics) on the first worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One reason why the updates part."""

    name: str
    """Short name: "loss normalisation", "batch norm", "clipping", ..."""
    evidence: str
    """What was measured that says so."""
    fix: str
    """What to do."""
    codes: tuple[str, ...]
    """The audit's codes for it."""

    def __str__(self) -> str:
        """All of it, as a paragraph."""
        codes = f" [{', '.join(self.codes)}]" if self.codes else ""
        return f"{self.name}{codes}: {self.evidence} What to do: {self.fix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EquivalenceReport:
    """Whether a step does the same on one worker and on several, and if not, where and why it parts.

    >>> EquivalenceReport(tolerance=1e-4, comparisons=(), causes=(), notes=()).equal
    True
    """

    tolerance: float
    """Largest relative difference of an update that counts as none."""
    comparisons: tuple[Comparison, ...]
    """Every layout's every step."""
    causes: tuple[Cause, ...]
    """What was found to part the updates; empty where they are equal."""
    notes: tuple[str, ...]
    """What differs without parting the updates, and what could not be judged."""

    @property
    def equal(self) -> bool:
        """Every layout took the same updates as one worker, at every step, on all its workers."""
        return self.first_difference is None

    @property
    def first_difference(self) -> Comparison | None:
        """The earliest step at which a layout's updates part, in the smallest layout that does."""
        parted = [one for one in self.comparisons if max(one.update_gap, one.worker_gap) > self.tolerance]
        return min(parted, key=lambda one: one.step, default=None)

    def raise_if_different(self) -> None:
        """Do nothing where the updates are equal; for use in tests.

        Raises:
            NotEquivalentError: they part; the message is the report.
        """
        if not self.equal:
            raise NotEquivalentError(str(self))

    def __str__(self) -> str:
        """The verdict, a line a layout, the causes and the notes."""
        first = self.first_difference
        layouts = list(dict.fromkeys(one.layout for one in self.comparisons))
        num_steps = len({one.step for one in self.comparisons})
        if first is None:
            lines = [
                f"Equal: {num_steps} steps give the same updates as on one worker (relative tolerance "
                f"{self.tolerance:.1e})."
            ]
        else:
            what = (
                f"its workers' updates differ by {first.worker_gap:.2g} from each other"
                if first.worker_gap > max(self.tolerance, first.update_gap)
                else f"the update of {first.parameter} differs by {first.update_gap:.2g} of its size"
            )
            others = len(first.parameters_that_differ) - 1
            more = f" ({others} more parameters differ)" if others > 0 else ""
            lines = [f"Different: with {first.layout}, in step {first.step}, {what}{more}."]
        for layout in layouts:
            steps = [one for one in self.comparisons if one.layout == layout]
            worst = max(steps, key=lambda one: one.update_gap)
            lines.append(
                f"  {layout}: largest difference of an update, beyond rounding, {worst.update_gap:.2g} (step "
                f"{worst.step}, {worst.parameter}); gradient norm in step 0 {steps[0].gradient_norm:.6g}, on one "
                f"worker {steps[0].reference_gradient_norm:.6g}"
            )
        lines += [f"Cause: {cause}" for cause in self.causes]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)
