"""What do the gradients of one step come to, while they arrive and in the end?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from largebatch.noise.collect.norms import Tally


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
    """0-dim. Squared norm of what the gradients held before the step: to be 0."""
    skip: str = ""
    """Why this step's norms cannot be used; empty if they can."""
    mark_before: Tensor
    """0-dim. Squared norm of one parameter's gradient at the last backward's end."""
    mark_now: Tensor
    """0-dim. The same now: another value means that gradients were changed in between."""
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
    last: bool = False
    """Whether it is expected to end the step."""
    parts: list[tuple[int, Sequence[Tensor]]] = field(default_factory=list)
    """A row of the result and dot products that count in it."""
    seen: set[int] = field(default_factory=set)
    """Parameters (by index) that have a gradient in it."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Only while buffering: the sum of its gradients per parameter, freed when the context ends."""


def sum_microbatches(microbatches: Sequence[Microbatch], num_rows: int, tally: Tally, device: torch.device) -> Tensor:
    """The squared norm of each microbatch, shape (num_rows, K), from its dot products."""
    num = len(microbatches)
    parts = [(k, row, dots) for k, microbatch in enumerate(microbatches) for row, dots in microbatch.parts]
    owners = [row * num + k for k, row, dots in parts for _ in dots]
    return tally.sums([dot for *_, dots in parts for dot in dots], owners, num_rows * num, device).view(num_rows, num)
