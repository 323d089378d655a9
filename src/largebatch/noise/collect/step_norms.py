"""What do the gradients of one step come to, while they arrive and in the end?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from largebatch.noise.collect.norms import Tally

Part = tuple[int, Sequence[Tensor]]
"""A row of the norms and dot products that count in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNorms:
    """One worker's share of a step's squared norms, on its device, of gradients as they were accumulated."""

    units: tuple[int, ...]
    """Units behind each norm, shape (K,)."""
    together: tuple[int, ...]
    """Units in the backward that each norm comes from, shape (K,): its loss was one mean, if it was a mean."""
    sq_norms: Tensor
    """Squared norm of what each microbatch added to the gradients, shape (num_rows, K)."""
    sq_norm_step: Tensor
    """Shape (num_rows,). Added up over the workers: the squared norm of the gradients as they are now."""
    sq_norm_stale: Tensor
    """Shape (1,). Squared norm of what the gradients held before the step: to be 0."""
    skip: str = ""
    """Why this step's norms cannot be used; empty if they can."""
    mark_before: Tensor
    """Squared norms of some parameters' gradients at the last backward's end, shape (marks,)."""
    mark_now: Tensor
    """The same now: other values mean that gradients were changed in between."""
    wide: bool = False
    """Whether squares were taken in float64."""
    weighed: bool = False
    """Whether the second half of the rows holds the norms in the second metric."""


@dataclass(kw_only=True, slots=True)
class Microbatch:
    """What one microbatch has brought so far."""

    units: int
    """Units in it."""
    explicit: bool = False
    """Whether a context holds its backwards together."""
    nested: bool = False
    """Whether its backward was called inside another one."""
    parts: list[Part] = field(default_factory=list)
    """What its gradients have come to."""
    seen: set[int] = field(default_factory=set)
    """Parameters (by index) that have a gradient in it."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Only while buffering: the sum of its gradients per parameter, freed when the context ends."""


@dataclass(kw_only=True, slots=True)
class Arrivals:
    """What one backward brings, until its end shows that the parameters keep it."""

    backward: int
    """Its number."""
    context: Microbatch | None = None
    """The microbatch that was open when it began."""
    nested: bool = False
    """Whether it was called inside another backward."""
    gone: set[int] = field(default_factory=set)
    """Parameters whose gradients were set to None or 0 before it."""
    plain: bool = False
    """Whether nothing but the float32 norms of its gradients is wanted."""
    stay: bool = False
    """Whether a parameter has taken its gradient."""
    seen: set[int] = field(default_factory=set)
    """Parameters that it has reached."""
    parts: list[Part] = field(default_factory=list)
    """As in Microbatch."""
    small: defaultdict[int, list[tuple[Tensor, int]]] = field(default_factory=lambda: defaultdict(list))
    """Small gradients and their versions by the row they count in: autograd copies them where it would move others."""
    copies: dict[int, Tensor] = field(default_factory=dict)
    """Its gradients, where a context adds them up."""
    stale: list[Tensor] = field(default_factory=list)
    """Squared norms of what the gradients held before."""


class StepTally:
    """Adds all dot products of a step up in one go: on an accelerator, and in small models, each operation counts."""

    def __init__(self) -> None:
        self._tally = Tally()

    def norms(
        self,
        *,
        units: list[int],
        microbatches: list[list[Part]],
        of_step: list[Part],
        stale: list[Tensor],
        marks: tuple[list[list[Tensor]], list[list[Tensor]]],
        num_rows: int,
        device: torch.device,
        skip: str,
        weighed: bool,
    ) -> StepNorms:
        """The norms of a step from dot products: of each microbatch, the step, what was there before, and the marks."""
        num = len(units)
        sizes = [num_rows * num, num_rows, 1, len(marks[0]), len(marks[1])]
        dots: list[Tensor] = []
        owners: list[int] = []
        for k, parts in enumerate(microbatches):
            for row, found in parts:
                dots += found
                owners += [row * num + k] * len(found)
        first = sizes[0]
        for owner, found in (*of_step, (num_rows, stale), *enumerate((*marks[0], *marks[1]), num_rows + 1)):
            dots += found
            owners += [first + owner] * len(found)
        sums = self._tally.sums(dots, owners, sum(sizes), device)
        small, step, before_step, before, now = sums.split(sizes)
        return StepNorms(
            units=tuple(units), together=tuple(units), sq_norms=small.view(num_rows, num), sq_norm_step=step,
            sq_norm_stale=before_step, mark_before=before, mark_now=now, skip=skip, weighed=weighed,
        )  # fmt: skip
