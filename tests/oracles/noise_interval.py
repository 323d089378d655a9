"""Independent float64 oracles for weighted means and Fieller intervals; imports nothing from src."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Array = NDArray[np.float64]


def fieller(trace: float, grad: float, covariance: Array, t: float) -> tuple[float, float]:
    """The bounded Fieller interval of trace / grad by searching the ratios that are just rejected (Fieller 1954)."""

    def excess(ratio: float) -> float:
        direction = np.array([1.0, -ratio])
        return (trace - ratio * grad) ** 2 - t**2 * float(direction @ covariance @ direction)

    centre = trace / grad
    width = max(1e-12, abs(centre))
    ends = []
    for sign in (-1, 1):
        reach = 1e-6 * width
        while excess(centre + sign * reach) < 0:
            reach *= 2
        ends.append(optimize.brentq(excess, centre, centre + sign * reach, xtol=1e-13 * width, rtol=1e-13))
    return ends[0], ends[1]


def fieller_of_independent_steps(trace: Array, grad: Array) -> tuple[float, float] | None:
    """Plain Fieller on independent steps: covariance about the mean, n - 1 degrees of freedom; None if unbounded."""
    covariance = np.cov(trace, grad) / len(trace)
    t = float(stats.t.ppf(0.975, len(trace) - 1))
    if grad.mean() <= t * covariance[1, 1] ** 0.5:
        return None
    return fieller(float(trace.mean()), float(grad.mean()), covariance, t)


def weighted(trace: Array, grad: Array, weights: Array) -> tuple[float, float, Array, float]:
    """(mean trace, mean grad, covariance of the two means, degrees of freedom), by loops.

    The covariance of neighbouring steps' difference is twice one step's (von Neumann 1941); weights enter squared.
    """
    values = np.stack([trace, grad], axis=1)
    total, counted, covariance = 0.0, 0.0, np.zeros((2, 2))
    for index, weight in enumerate(weights):
        total += weight**2
        if index:
            difference = values[index] - values[index - 1]
            covariance += weight**2 * np.outer(difference, difference) / 2
            counted += weight**2
    covariance *= total / counted / weights.sum() ** 2
    mean = weights @ values / weights.sum()
    freedom = 2 / 3 * (weights**2).sum() ** 2 / (weights**4).sum()
    return float(mean[0]), float(mean[1]), covariance, float(freedom)
