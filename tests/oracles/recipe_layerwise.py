"""What do LARS, LAMB and Adam come to, in float64 numpy, from the papers' algorithms, one layer at a time?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def length(array: Array) -> float:
    """The Euclidean norm of all entries, whatever the shape."""
    return math.sqrt(math.fsum(entry * entry for entry in array.ravel().tolist()))


def lars(
    w: Array,
    gradients: Sequence[Array],
    lrs: Sequence[float],
    momentum: float,
    weight_decay: float,
    trust_coefficient: float,
    nesterov: bool = False,
    layerwise: bool = True,
) -> list[Array]:
    """You 2017, Algorithm 1: the weights of one layer after each step."""
    path, v = [], np.zeros_like(w)
    for g, lr in zip(gradients, lrs, strict=True):
        local = 1.0
        if layerwise and length(w) > 0 and length(g) > 0:
            local = trust_coefficient * length(w) / (length(g) + weight_decay * length(w))
        move = lr * local * (g + weight_decay * w)
        v = momentum * v + move
        w = w - (momentum * v + move if nesterov else v)
        path.append(w)
    return path


def lamb(
    w: Array,
    gradients: Sequence[Array],
    lrs: Sequence[float],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    layerwise: bool = True,
) -> list[Array]:
    """You 2019, Algorithm 2 with phi the identity: the weights of one layer after each step."""
    path, m, v = [], np.zeros_like(w), np.zeros_like(w)
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        r = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        u = r + weight_decay * w
        ratio = length(w) / length(u) if layerwise and length(w) > 0 and length(u) > 0 else 1.0
        w = w - lr * ratio * u
        path.append(w)
    return path


def adam(
    w: Array,
    gradients: Sequence[Array],
    lrs: Sequence[float],
    betas: tuple[float, float],
    eps: float,
    coupled: float = 0.0,
    decoupled: float = 0.0,
) -> list[Array]:
    """Kingma 2015, Algorithm 1, with decay in the gradient, or apart from it (Loshchilov 2019, Algorithm 2)."""
    path, m, v = [], np.zeros_like(w), np.zeros_like(w)
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        g = g + coupled * w
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        w = w - lr * ((m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + decoupled * w)
        path.append(w)
    return path
