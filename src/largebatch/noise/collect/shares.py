"""Which backwards of a step did fully_shard reduce together?

A backward without gradient sync reduces nothing: its gradient leaves this worker with the next one that syncs, as
one sum. What leaves together is a Share, and one microbatch to whoever measures. Bookkeeping only: no hooks here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.noise.collect.backwards import check_parts


@dataclass(kw_only=True, slots=True)
class Backward:
    """One backward, or all of a microbatch context."""

    units: int
    explicit: bool = False
    """Whether a context holds several together."""
    nested: bool = False
    """Whether it was called inside another one."""
    begun: bool = False
    """Whether it is in a share."""
    seen: set[int] = field(default_factory=set)
    """Parameters that have a gradient in it."""


@dataclass(kw_only=True, slots=True)
class Share:
    """Backwards whose gradients this worker gave to the mean over the workers as one sum."""

    backwards: list[Backward] = field(default_factory=list)
    dots: list[Tensor] = field(default_factory=list)
    """Dot products that add up to the sum's squared norm."""
    bundles: list[int] = field(default_factory=list)
    """The bundle that each is of."""
    reduced: set[int] = field(default_factory=set)
    """Parameters whose gradient has left this worker."""

    @property
    def units(self) -> int:
        """Units behind the sum."""
        return sum(backward.units for backward in self.backwards)


class Shares:
    """The shares of one step, as they come.

    >>> step, first, second = Shares(), Backward(units=4), Backward(units=4)
    >>> step.arrive(first, 0); step.arrive(second, 0)  # without gradient sync
    >>> step.reduce(0, members=[0], dots=[])
    {0}
    >>> [share.units for share in step.done()]
    [8]
    """

    def __init__(self) -> None:
        """A step that nothing has arrived in."""
        self.problem = ""
        """Why the step cannot be measured; hooks must not raise, so it is said later."""
        self._shares: list[Share] = []
        self._pending: set[int] = set()

    def arrive(self, backward: Backward, index: int) -> None:
        """A parameter has taken its gradient of a backward; it waits to be reduced."""
        if not backward.begun:
            backward.begun = True
            if not self._shares or self._shares[-1].reduced:
                if self._pending:
                    self.fail(
                        "some fully_shard units reduced their gradients in a backward and some did not: call "
                        "set_requires_gradient_sync on the whole model."
                    )
                self._shares.append(Share())
            self._shares[-1].backwards.append(backward)
        backward.seen.add(index)
        self._pending.add(index)

    def reduce(self, bundle: int, *, members: Collection[int], dots: Sequence[Tensor]) -> set[int]:
        """What has arrived of a bundle leaves this worker; returns these parameters."""
        if not self._shares:
            self._shares.append(Share())
        share, covered = self._shares[-1], self._pending.intersection(members)
        if covered & share.reduced:
            self.fail(
                "a parameter's gradient was reduced twice in one microbatch, so the norm of its sum is not known: call "
                "set_requires_gradient_sync(False) for all but the last backward in a microbatch context."
            )
        share.dots += dots
        share.bundles += [bundle] * len(dots)
        share.reduced |= covered
        self._pending -= covered
        return covered

    def begin_again(self, context: Backward | None) -> None:
        """Gradients were zeroed: forget what was reduced; what was not, fully_shard still holds."""
        kept = [share for share in self._shares[-1:] if not share.reduced]
        if not kept and (self._pending or (context is not None and context.begun)):
            self.fail("gradients were set to None inside a microbatch: zero them between steps only.")
        else:
            self._shares = kept

    def fail(self, problem: str) -> None:
        """Keep the first problem."""
        self.problem = self.problem or problem

    def done(self, *, uneven: bool = True) -> list[Share]:
        """The shares of a step that is complete.

        Args:
            uneven: whether backwards of several sizes may be in one share.

        Raises:
            ConfigError: the step has a problem, or is not complete.
        """
        if self.problem:
            raise ConfigError(self.problem)
        if self._pending:
            raise ConfigError(
                "gradients were left without their mean over the workers: call set_requires_gradient_sync(True) before "
                "the last backward of every step."
            )
        backwards = [backward for share in self._shares for backward in share.backwards]
        check_parts((b.nested for b in backwards), [b.seen for b in backwards if not b.explicit])
        shares = [share for share in self._shares if share.backwards]
        for share in shares:
            units = [backward.units for backward in share.backwards]
            if not uneven and len(set(units)) > 1:
                raise ConfigError(
                    f"means over {units} units were added up without gradient sync, so no count of units fits their "
                    "sum: sync in every backward, or divide losses in another way (loss_scaling)."
                )
        return shares
