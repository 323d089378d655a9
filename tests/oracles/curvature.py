"""Independent float64 oracles for noise and curvature: finite populations, quadratics and SGD on them.

Imports nothing from src.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def population(gradients: Array, hessians: Array, *, divisor: int) -> tuple[float, float]:
    """(tr(H Sigma), G'HG) of units with gradients (D, d) and Hessians (D, d, d) (McCandlish et al. 2018, eq. 2.8)."""
    mean, hessian = gradients.mean(axis=0), hessians.mean(axis=0)
    apart = gradients - mean
    return float(np.trace(hessian @ (apart.T @ apart))) / divisor, float(mean @ hessian @ mean)


def outcomes(
    gradients: Array, hessians: Array, sizes: tuple[int, int, int], *, replacement: bool
) -> Iterator[tuple[float, float, float, float, float]]:
    """Every equally likely draw of parts A, B, C: (a'Ha, a'Hb, b'Hb, (a + b)'Hc/2, c'Hc), H and c of part C."""
    units = range(len(gradients))
    draws = itertools.product(units, repeat=sum(sizes)) if replacement else itertools.permutations(units, sum(sizes))
    for draw in draws:
        parts = np.split(np.array(draw), np.cumsum(sizes)[:-1])
        a, b, c = (gradients[part].mean(axis=0) for part in parts)
        hessian = hessians[parts[2]].mean(axis=0)
        yield tuple(float(left @ hessian @ right) for left, right in ((a, a), (a, b), (b, b), ((a + b) / 2, c), (c, c)))


def linear_regression(spectrum: Array, delta: Array, sigma: float) -> dict[str, float]:
    """Moments of y = w*.x + sigma e, x ~ N(0, diag(spectrum)), loss (w.x - y)^2 / 2, delta = w - w*.

    By the fourth moments of a normal the gradient x (x.delta - sigma e) has the mean L delta and the covariance
    L (delta'L delta + sigma^2) + L delta delta'L, with L = diag(spectrum) = H.
    """
    level = float(spectrum @ delta**2) + sigma**2
    covariance = np.diag(spectrum) * level + np.outer(spectrum * delta, spectrum * delta)
    gradient = spectrum * delta
    return {
        "trace_h_cov": float(np.trace(np.diag(spectrum) @ covariance)),
        "grad_h_grad": float(spectrum @ gradient**2),
        "trace_cov": float(np.trace(covariance)),
        "grad_sq_norm": float(gradient @ gradient),
    }


def stationary(hessian: Array, covariance: Array, lr: float, batch: float) -> Array:
    """M of SGD that has settled on (1/2) theta'H theta: M = (1 - lr H) M (1 - lr H) + lr^2 Sigma / B, solved whole."""
    dim = len(hessian)
    step = np.eye(dim) - lr * hessian
    system = np.eye(dim * dim) - np.kron(step, step)
    return np.linalg.solve(system, (lr**2 / batch * covariance).ravel()).reshape(dim, dim)


def steps_to_goal(
    spectrum: Array, noise: Array, start: Array, goal: float, batch: float, lrs: Sequence[float], max_steps: int
) -> float:
    """Fewest steps of SGD until E[(1/2) sum h m] <= goal, over learning rates, step by step; inf if none does.

    m is E[theta^2] in each eigendirection of H: m <- (1 - lr h)^2 m + lr^2 sigma / B. Interpolated in log loss.
    """
    rates = np.asarray(lrs, dtype=np.float64)[:, None]
    second = np.tile(start, (len(rates), 1))
    loss = 0.5 * second @ spectrum
    for step in range(1, max_steps + 1):
        second = (1 - rates * spectrum) ** 2 * second + rates**2 * noise / batch
        before, loss = loss, 0.5 * second @ spectrum
        there = loss <= goal
        if there.any():
            return float((step - 1 + np.log(before[there] / goal) / np.log(before[there] / loss[there])).min())
    return np.inf
