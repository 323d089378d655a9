"""What learning rate, betas and layout do the sources ask for, from their first principles, in float64 numpy?"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def best_sgd_step(mean: Array, cov: Array, hessian: Array, batch: float) -> float:
    """McCandlish 2018, (2.5): the eps that makes -eps |G|^2 + eps^2/2 (G'HG + tr(H Sigma)/B) least."""
    return float(mean @ mean / (mean @ hessian @ mean + np.trace(hessian @ cov) / batch))


def best_sign_step(mean: Array, std: Array, hessian: Array, batch: float) -> float:
    """The eps that makes the expected loss after w - eps sign(gradient) least, for independent normal gradients.

    The sign of coordinate i is +-1 with mean s_i = erf(mean_i sqrt(B/2) / std_i). The loss changes by -eps s'mean +
    eps^2/2 E[sign' H sign]; a coordinate's sign squared is 1, two coordinates' signs have the product of their means.
    """
    signs = np.array([math.erf(m * math.sqrt(batch / 2) / s) for m, s in zip(mean, std, strict=True)])
    outer = np.outer(signs, signs)
    np.fill_diagonal(outer, 1.0)
    return float(signs @ mean / (outer * hessian).sum())


def surge_peak(mean: Array, std: Array, hessian: Array) -> float:
    """Li 2024: B_noise = pi sum_i H_ii / (2 sum_{i != j} mu_i mu_j H_ij / (sigma_i sigma_j))."""
    ratio = mean / std
    between = ratio @ hessian @ ratio - (ratio**2 * np.diag(hessian)).sum()
    return float(math.pi * np.trace(hessian) / (2 * between))


def adam_spread_per_unit(lr: float, eps: float, noise_std: float, batch: float) -> float:
    """How much variance Adam adds to a weight for each unit of data, where gradients are only noise.

    Each step moves it by lr g / (sqrt v + eps), with g of standard deviation s = noise_std / sqrt(batch) and v near
    s^2; there are 1 / batch steps a unit.
    """
    s = noise_std / math.sqrt(batch)
    return (lr * s / (s + eps)) ** 2 / batch


def horizon_in_units(beta: float, batch: float) -> float:
    """Sum of the weights of an average with that decay, over the newest one's, in units: batch (1 + b + b^2 + ...)."""
    return batch * float(sum(beta ** np.arange(200_000, dtype=np.float64)))


def can_be_dealt(batch: int, world_size: int, accumulation: int, n: int | None) -> bool:
    """Whether every set of n examples lies within one microbatch, or is made of whole microbatches of several workers.

    Examples are dealt one by one, and no set may be shared between two passes.
    """
    parts = world_size * accumulation
    if batch < parts or batch != batch // parts * parts:
        return False
    if n is None:
        return True
    size = batch // parts
    worker_of = [worker for worker in range(world_size) for _ in range(size)]  # one pass of all workers
    if len(worker_of) % n:
        return False
    sets = [worker_of[start : start + n] for start in range(0, len(worker_of), n)]
    return all(len(set(members)) == 1 or all(members.count(w) == size for w in set(members)) for members in sets)
