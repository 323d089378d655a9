"""What does momentum with the rate inside the velocity come to, in float64 numpy, from the paper's equations?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def velocity_10(
    w: Vector,
    gradients: Sequence[Vector],
    lrs: Sequence[float],
    momentum: float,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    correction: bool = False,
) -> tuple[list[Vector], list[Vector]]:
    """Eq. (10) of Goyal 2017, with or without the factor of remark 2. (weights, velocity) after each step.

    The correction is taken as printed, a ratio of two rates, so that it knows no rate of 0.
    """
    weights, velocities = [], []
    v, lr_before = np.zeros_like(w), None
    for g, lr in zip(gradients, lrs, strict=True):
        g = g + weight_decay * w
        factor = lr / lr_before if correction and lr_before is not None else 1.0
        v = momentum * factor * v + lr * g
        w = w - (momentum * v + lr * g if nesterov else v)
        weights.append(w)
        velocities.append(v)
        lr_before = lr
    return weights, velocities
