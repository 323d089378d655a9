"""What has one backward shown of its examples, and is it the whole?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from largebatch.noise.collect.norms import sq_norm
from largebatch.noise.collect.reduce import LEAST
from largebatch.noise.per_example.calls import Scope, Use
from largebatch.noise.per_example.forms import Measured

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How far the parts may be from the whole, relative to both, per dtype of the output's gradient."""
TOLERANCE_TF32 = 5e-3
"""The least of it on accelerators, whose float32 products may have 10 bits."""
TOLERANCE_HALF = 5e-2
"""The same in float16 and bfloat16."""


@dataclass(kw_only=True, slots=True, eq=False)
class Backward:
    """One backward: what its layers have shown so far, and what was committed."""

    number: int
    uses: dict[int, list[Use]] = field(default_factory=dict[int, list[Use]])
    """Uses of each parameter whose gradient has not arrived."""
    by_call: dict[int, Use] = field(default_factory=dict[int, Use])
    scopes: dict[int, Scope] = field(default_factory=dict[int, Scope])
    norms: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    """Squared norms of the parameters of each group, each of shape (B,)."""
    gaps: list[Tensor] = field(default_factory=list[Tensor])
    """For each parameter, how far the parts of its gradient are from it along the probe; 0-dim."""
    moved: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    """For each group, what of its gradients lies along the probes: 0 if they are, not if their squares are; 0-dim."""
    allowed: float = 0.0
    """How large the gaps may be together, relative to the examples' norms."""
    checks: list[tuple[Key, Tensor]] = field(default_factory=list["tuple[Key, Tensor]"])
    """For each new use of a parameter, its gap over what is allowed; 0-dim."""
    refusal: str | None = None


Key = tuple[str, ...]
"""A parameter, and the layers it was used in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """What a tensor hook read, until the accumulation commits it."""

    backward: Backward
    uses: list[Use]
    sq_norms: Tensor | None = None
    gap: Tensor | None = None
    moved: Tensor | None = None
    allowed: float = 0.0
    check: tuple[Key, Tensor] | None = None
    refusal: str | None = None


def norms_of(backward: Backward, group_sizes: Sequence[int], device: torch.device) -> Tensor:
    """Squared norms of the examples; NaN where the parts are not the whole, or float32 could not square them.

    Args:
        backward: one that reached a parameter, and was not refused.
        group_sizes: elements of the parameters of each group.
        device: where the norms are to be.

    Returns:
        Shape (num_groups, num_examples), float32 or wider; no host sync.
    """
    every = [norms for group in backward.norms.values() for norms in group]
    dtype = torch.float64 if any(norms.dtype == torch.float64 for norms in every) else torch.float32
    sq_norms = torch.zeros(len(group_sizes), every[0].shape[0], dtype=dtype, device=device)
    for group, norms in backward.norms.items():
        found = torch.stack([norm.to(sq_norms) for norm in norms]).sum(0)
        if dtype == torch.float32:
            moved = torch.stack([part.to(sq_norms) for part in backward.moved[group]]).sum()
            total = found.sum()
            below = (total < LEAST * group_sizes[group]) & ((total > 0) | (moved > 0))
            found = torch.where(below, torch.nan, found)
        sq_norms[group] = found
    gap = torch.stack([gap.to(sq_norms) for gap in backward.gaps]).sum().abs()
    # |sum of g_b|^2 <= B * sum of |g_b|^2: what rounding of the gradient itself is relative to.
    size = (sq_norms.sum() * sq_norms.shape[1]).sqrt()
    return torch.where(gap > backward.allowed * size, torch.nan, sq_norms)


def excess_of(gap: Tensor, grad: Tensor, measured: Measured, allowed: float) -> Tensor:
    """How large a gap is, over what rounding of its terms and of the gradient explains; 0-dim, at most 1 if it does.

    NaN where squares leave float32's range: it says nothing then.
    """
    assert measured.sq_terms is not None, "a new use is measured with care"
    values = grad.coalesce().values() if grad.is_sparse else grad
    squares = measured.sq_terms + sq_norm(values.to(measured.sq_terms.dtype))
    least = LEAST * values.numel() if squares.dtype == torch.float32 else 0.0
    excess = torch.where(squares.isfinite() & (squares >= least), gap.abs() / (allowed * squares.sqrt()), torch.nan)
    return torch.where(gap == 0, 0.0, excess)


def disagreement(scopes: list[Scope]) -> str | None:
    """Why the calls that one backward went through do not have the same examples; None if they do."""
    owners = [id(scope.owner) for scope in scopes]
    if len(set(owners)) < len(owners):
        return (
            f"one backward went through {len(owners)} forwards of {type(scopes[-1].owner).__name__}, so it is not "
            "known which rows are one example. Use one forward and one backward per microbatch."
        )
    sizes = sorted({scope.num_examples or 0 for scope in scopes})
    if len(sizes) > 1:
        return (
            f"one backward went through modules that were called with {' and '.join(map(str, sizes))} rows, so it is "
            "not known how many examples there are. Give all of them the same examples in dim 0."
        )
    return next((scope.refusal for scope in scopes if scope.refusal is not None), None)
