"""What do the updates of Goyal 2017 come to, in float64 numpy, written from the paper's equations?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Gradient = Callable[[Vector, int], Vector]
"""(weights, unit) -> gradient of that unit's loss."""


def small_steps(w: Vector, gradient: Gradient, batches: Sequence[Sequence[int]], lr: float) -> Vector:
    """Eq. (3): k steps of plain SGD, one a batch of n units, each gradient taken at the weights of its step."""
    for batch in batches:
        w = w - lr * sum(gradient(w, unit) for unit in batch) / len(batch)
    return w


def large_step(w: Vector, gradient: Gradient, batches: Sequence[Sequence[int]], lr: float) -> Vector:
    """Eq. (4): one step on the union of the batches, every gradient taken at w."""
    units = [unit for batch in batches for unit in batch]
    return w - lr * sum(gradient(w, unit) for unit in units) / len(units)


def momentum_9(
    w: Vector,
    gradients: Sequence[Vector],
    lrs: Sequence[float],
    momentum: float,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> list[Vector]:
    """Eq. (8) and (9): the learning rate stays outside the velocity. The weights after each step.

    Nesterov's look-ahead adds the gradient once more to the momentum times the new velocity.
    """
    path, u = [], np.zeros_like(w)
    for g, lr in zip(gradients, lrs, strict=True):
        g = g + weight_decay * w
        u = momentum * u + g
        w = w - lr * (g + momentum * u if nesterov else u)
        path.append(w)
    return path


def momentum_10(
    w: Vector, gradients: Sequence[Vector], lrs: Sequence[float], momentum: float, correction: bool
) -> list[Vector]:
    """Eq. (10): the learning rate inside the velocity, with or without momentum correction (remark 2)."""
    path, v, before = [], np.zeros_like(w), lrs[0]
    for g, lr in zip(gradients, lrs, strict=True):
        v = momentum * (lr / before if correction else 1.0) * v + lr * g
        w = w - v
        path.append(w)
        before = lr
    return path
