"""Independent float64 numpy oracles for the moments of gradients; imports nothing from src."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def linear_regression(delta: Array, sigma: float) -> tuple[float, float]:
    """(tr(Sigma), |G|^2) of y = w*.x + sigma e, x ~ N(0, I), loss (w.x - y)^2 / 2, delta = w - w*.

    The gradient is x (x.delta - sigma e): its mean is delta, and E|gradient|^2 = (d + 2)|delta|^2 + d sigma^2
    by the fourth moments of a normal, of which |delta|^2 is the mean's.
    """
    d, signal = len(delta), float(delta @ delta)
    return (d + 1) * signal + d * sigma**2, signal


def linear_regression_gradients(delta: Array, sigma: float, shape: tuple[int, ...], seed: int) -> Array:
    """Per-example gradients of that problem, shape (*shape, d)."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((*shape, len(delta)))
    residuals = inputs @ delta - sigma * rng.standard_normal(shape)
    return inputs * residuals[..., None]


def population(gradients: Array) -> tuple[float, float]:
    """(tr(Sigma), |G|^2) of a gradient drawn uniformly from the rows (McCandlish et al. 2018, eq. 2.3)."""
    mean = gradients.mean(axis=0)
    return float(((gradients - mean) ** 2).sum(axis=1).mean()), float(mean @ mean)


def finite_population(gradients: Array) -> tuple[float, float]:
    """The same with the divisor D - 1: without replacement the mean of B rows has variance (1/B - 1/D) of it."""
    trace, signal = population(gradients)
    return trace * len(gradients) / (len(gradients) - 1), signal


def outcomes(
    gradients: Array, sizes: Sequence[int], coefficients: Sequence[float], *, replacement: bool
) -> Iterator[tuple[list[float], float]]:
    """Every equally likely draw of microbatches: (|g_i|^2 of each mean gradient g_i, |sum a_i g_i|^2)."""
    draws = (
        itertools.product(range(len(gradients)), repeat=sum(sizes))
        if replacement
        else itertools.permutations(range(len(gradients)), sum(sizes))
    )
    ends = np.cumsum(sizes)[:-1]
    for draw in draws:
        means = np.stack([part.mean(axis=0) for part in np.split(gradients[list(draw)], ends)])
        total = np.asarray(coefficients) @ means
        yield [float(mean @ mean) for mean in means], float(total @ total)


def expectation(draws: Iterator[tuple[list[float], float]], estimate: Callable[..., tuple[float, float]]) -> Array:
    """The exact expectation of an estimate over equally likely draws."""
    return np.mean([estimate(norms, step) for norms, step in draws], axis=0)


def of_microbatches(means: Array, sizes: Sequence[int]) -> tuple[float, float]:
    """(tr(Sigma), |G|^2) of microbatch mean gradients (K, d): the weighted spread about their weighted mean.

    tr(Sigma) = sum b_i |g_i - gbar|^2 / (K - 1), |G|^2 = |gbar|^2 - tr(Sigma) / B (McCandlish et al. 2018, eq. A.2
    with the mean over small batches).
    """
    weights = np.asarray(sizes, dtype=np.float64)
    mean = weights @ means / weights.sum()
    trace = float(weights @ ((means - mean) ** 2).sum(axis=1)) / (len(means) - 1)
    return trace, float(mean @ mean) - trace / weights.sum()
