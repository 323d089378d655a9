"""How far apart are two updates, beyond what rounding explains?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Named = Mapping[str, Tensor]

_SMALL = 0.1
"""A parameter's difference is measured by its own size, but by no less than this part of what is usual in the model: a
gradient that is zero but for rounding differs by its whole size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """How far one parameter's update on several workers is from the same on one."""

    parameter: str
    """Its name."""
    size: float
    """Norm of the difference over the norm of the larger of the two."""
    by_gradient: bool
    """Measured by the gradients, since the update is lost in the weights' rounding."""


def default_tolerance(named: Named) -> float:
    """The square root of the spacing of the coarsest number type: 3.5e-4 in float32, 1.5e-8 in float64.

    Rounding grows with the layers and the steps; a cause found in Goyal 2017 is larger than either.
    """
    spacings = [torch.finfo(tensor.dtype).eps for tensor in named.values() if tensor.is_floating_point()]
    return math.sqrt(max(spacings, default=torch.finfo(torch.float32).eps))


def update_gaps(
    updates: Named, reference: Named, gradients: Named, reference_gradients: Named, weights: Named
) -> list[Gap]:
    """The gap of every parameter, in the reference's order.

    Elements whose gradient is nothing but rounding on both sides are left out: an optimizer that divides by the
    gradient's size (Adam) makes full steps of them, in either direction. What is lost when an update is read off
    weights that are much larger than it (4 roundings of each weight) is allowed for; where that hides a difference, the
    gradients speak instead.

    Args:
        updates: weights after the step less those before it, on several workers, by name.
        reference: the same on one worker.
        gradients: as the optimizer found them, on several workers; may be empty.
        reference_gradients: the same on one worker; may be empty.
        weights: before the step.
    """
    usual = _typical(reference)
    usual_gradient = _typical(reference_gradients)
    found: list[Gap] = []
    for name, expected in reference.items():
        eps = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        update, known = updates[name].double(), expected.double()
        root = math.sqrt(max(1, known.numel()))
        if name in gradients and name in reference_gradients:
            one, other = gradients[name].double(), reference_gradients[name].double()
            noise = min(1000 * eps, 0.01) * usual_gradient
            speaks = (one.abs() > noise) | (other.abs() > noise) | ~torch.isfinite(one) | ~torch.isfinite(other)
            update, known = update * speaks, known * speaks
            by_gradient = _relative(one, other, 0.0, _SMALL * usual_gradient * root)
        else:
            by_gradient = None
        lost = 4 * eps * float(weights[name].double().norm())
        if by_gradient is not None and lost > 0.1 * max(float(known.norm()), float(update.norm())):
            found.append(Gap(parameter=name, size=by_gradient, by_gradient=True))
        else:
            size = _relative(update, known, lost, _SMALL * usual * root)
            found.append(Gap(parameter=name, size=size, by_gradient=False))
    return found


def spread(named: Named, reference: Named) -> float:
    """The largest relative difference of two sets of tensors, such as running statistics."""
    return max(
        (
            _relative(named[name].double(), known.double(), 0.0, 1e-30)
            for name, known in reference.items()
            if known.is_floating_point()
        ),
        default=0.0,
    )


def flat(named: Named) -> Tensor:
    """All of it in one vector, float64."""
    return torch.cat([tensor.double().reshape(-1) for tensor in named.values()] or [torch.zeros(0).double()])


def fit_ratio(vector: Tensor, reference: Tensor) -> tuple[float, float]:
    """The r for which r * reference is nearest to vector, and what that leaves over, relative to vector.

    >>> fit_ratio(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]))
    (2.0, 0.0)
    """
    power = float(reference @ reference)
    ratio = float(vector @ reference) / power if power > 0 else math.nan
    size = float(vector.norm())
    rest = float((vector - ratio * reference).norm()) / size if size > 0 else math.nan
    return ratio, rest if math.isfinite(rest) else math.inf


def _typical(named: Named) -> float:
    values = flat(named)
    values = values[torch.isfinite(values)]
    return float(values.square().mean().sqrt()) if len(values) else 0.0


def _relative(one: Tensor, other: Tensor, allowed: float, at_least: float) -> float:
    gap = float((one - other).norm())
    if not math.isfinite(gap):
        return math.inf
    size = max(float(one.norm()), float(other.norm()), at_least)
    return max(0.0, gap - allowed) / size if size > 0 else 0.0
