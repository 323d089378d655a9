"""What does batch norm over runs of n examples come to, in float64 numpy, one run and one channel at a time?

From Ioffe and Szegedy 2015 (alg. 1) and Goyal 2017 (eq. 5): a run's output depends on the run alone. The gradient is
the whole Jacobian times the output's gradient, dy_i/dx_j = gamma/sigma (1[i=j] - 1/N - xhat_i xhat_j / N).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def outputs(x: Array, n: int, gamma: Array, beta: Array, eps: float = 1e-5) -> Array:
    """x: (batch, channels, ...). Each run of n examples normalised by its own mean and variance."""
    y = np.empty_like(x)
    for start in range(0, len(x), n):
        for c in range(x.shape[1]):
            values = x[start : start + n, c]
            y[start : start + n, c] = gamma[c] * (values - values.mean()) / np.sqrt(values.var() + eps) + beta[c]
    return y


def gradients(x: Array, dy: Array, n: int, gamma: Array, eps: float = 1e-5) -> tuple[Array, Array, Array]:
    """(dx, dgamma, dbeta) of the sum of dy times the outputs."""
    dx, dgamma, dbeta = np.empty_like(x), np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for start in range(0, len(x), n):
        for c in range(x.shape[1]):
            values, back = x[start : start + n, c].ravel(), dy[start : start + n, c].ravel()
            sigma = np.sqrt(values.var() + eps)
            hat = (values - values.mean()) / sigma
            jacobian = gamma[c] / sigma * (np.eye(len(hat)) - 1 / len(hat) - np.outer(hat, hat) / len(hat))
            dx[start : start + n, c] = (jacobian.T @ back).reshape(x[start : start + n, c].shape)
            dgamma[c] += hat @ back
            dbeta[c] += back.sum()
    return dx, dgamma, dbeta


def running(x: Array, n: int, momentum: float | None, before: tuple[Array, Array, int]) -> tuple[Array, Array, int]:
    """(mean, variance, count) after one update a run, in order; the variance is the unbiased one, as in alg. 2."""
    mean, var, count = before[0].copy(), before[1].copy(), before[2]
    for start in range(0, len(x), n):
        count += 1
        m = 1 / count if momentum is None else momentum
        for c in range(x.shape[1]):
            values = x[start : start + n, c]
            mean[c] += m * (values.mean() - mean[c])
            var[c] += m * (values.var(ddof=1) - var[c])
    return mean, var, count


def population(batches: Iterable[Array]) -> tuple[Array, Array]:
    """Mean and variance of each channel over every value of all batches together."""
    values = np.concatenate([np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]) for x in batches])
    return values.mean(0), values.var(0)
