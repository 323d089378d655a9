"""What do one step's squared gradient norms say about the gradient and its noise?

Pure arithmetic: squared norms and sizes in, unbiased moments out. A gradient over few examples is longer
than one over many, because noise adds to its squared norm; two sizes tell the two parts apart:

    E|G_B|^2 = |G|^2 + tr(Sigma) / B                                    (McCandlish et al. 2018, eq. A.1)

|G|^2 is the squared norm of the true gradient, tr(Sigma) the summed variance of one unit's gradient. Both
estimates are linear in the norms, so their averages over steps stay unbiased; their ratio does not. That is
why a step's moments are kept and a ratio never is (`largebatch.noise.estimate` divides, at the end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from largebatch.errors import ConfigError

Floats = TypeVar("Floats", float, NDArray[np.float64])

SAME_SIZE = 1e-9
"""Relative difference below which two sizes are one, and no system of two equations is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMoments:
    """Unbiased estimates from one optimizer step, and the raw norms they can be recomputed from.

    `solve_two_sizes(sq_norm_small, units_small, sq_norm_step, units_step, dataset_size)` gives back
    (trace_cov, grad_sq_norm).
    """

    trace_cov: float
    """Estimate of tr(Sigma), per unit: never clamped, so it can be negative."""
    grad_sq_norm: float
    """Estimate of |G|^2: never clamped, so it can be negative."""
    batch: int
    """Units in the step."""
    num_microbatches: int
    """Microbatches in the step (K)."""
    sq_norm_small: float
    """sum q_i |g_i|^2 / sum q_i: the weighted mean of the microbatches' squared norms."""
    sq_norm_step: float
    """|sum a_i g_i|^2 / (sum a_i)^2: the squared norm of the step's mean gradient."""
    units_small: float
    """sum q_i / sum (q_i / b_i): E[sq_norm_small] = |G|^2 + tr(Sigma) / units_small. This is batch / K
    for q_i = a_i proportional to b_i."""
    units_step: float
    """(sum a_i)^2 / sum (a_i^2 / b_i): E[sq_norm_step] = |G|^2 + tr(Sigma) / units_step. This is the batch for
    a_i proportional to b_i."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSums:
    """Sums over the microbatches of a step, on all workers: the step's moments need no more, whatever K is.

    Microbatch i of b_i units has the mean gradient g_i; the step's gradient is sum a_i g_i.
    """

    num_microbatches: int
    """K."""
    batch: int
    """sum b_i."""
    sum_a: float
    """sum a_i, other than 0."""
    sum_a_over_b: float
    """sum a_i / b_i."""
    sum_a2_over_b: float
    """sum a_i^2 / b_i."""
    weighted_sq_norms: float
    """sum a_i |g_i|^2."""
    sq_norm_sum: float
    """|sum a_i g_i|^2."""


def solve_sums(sums: NormSums, dataset_size: int | None = None) -> StepMoments:
    """Moments from sums, with the coefficients a_i as weights: `solve_moments` says what is assumed.

    >>> sums = NormSums(num_microbatches=2, batch=2, sum_a=1.0, sum_a_over_b=1.0, sum_a2_over_b=0.5,
    ...     weighted_sq_norms=5.0, sq_norm_sum=4.0)
    >>> solve_sums(sums) == solve_moments([1.0, 9.0], [1, 1], 4.0)
    True
    """
    return _solve(
        num_microbatches=sums.num_microbatches,
        batch=sums.batch,
        sq_norm_small=sums.weighted_sq_norms / sums.sum_a,
        units_small=sums.sum_a / sums.sum_a_over_b,
        sq_norm_step=sums.sq_norm_sum / sums.sum_a**2,
        units_step=sums.sum_a**2 / sums.sum_a2_over_b,
        dataset_size=dataset_size,
    )


def add_moments(parts: Sequence[StepMoments]) -> StepMoments:
    """Moments of all parameters from those of groups of them in the same step: all four norms just add up.

    >>> half = solve_moments([1.0, 9.0], [1, 1], 4.0)
    >>> add_moments([half, half]).trace_cov
    4.0
    """
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        trace_cov=sum(part.trace_cov for part in parts),
        grad_sq_norm=sum(part.grad_sq_norm for part in parts),
        sq_norm_small=sum(part.sq_norm_small for part in parts),
        sq_norm_step=sum(part.sq_norm_step for part in parts),
    )


def solve_two_sizes(
    sq_norm_small: Floats,
    units_small: float,
    sq_norm_step: Floats,
    units_step: float,
    dataset_size: int | None = None,
) -> tuple[Floats, Floats]:
    """Split two squared norms at two sizes into (tr(Sigma), |G|^2).

    Assumes units drawn independently, or without replacement with `dataset_size` given (`solve_moments`
    says what that changes).

    Args:
        sq_norm_small: mean squared norm of mean gradients over `units_small` units; a float or an array
            of shape (num_steps,).
        units_small: units behind each of them, > 0.
        sq_norm_step: squared norm of a mean gradient over `units_step` units; same shape.
        units_step: units behind it, > 0 and unlike `units_small`.
        dataset_size: examples drawn from without replacement.

    Returns:
        (trace_cov, grad_sq_norm), each of the shape put in.

    Raises:
        ConfigError: the two sizes are equal.

    >>> trace_cov, grad_sq_norm = solve_two_sizes(0.041, 32, 0.0028, 512)
    >>> f"{trace_cov:.3f} {grad_sq_norm:.3e}"
    '1.304 2.533e-04'

    Source: McCandlish et al. 2018, eq. A.2.
    """
    if not (units_small > 0 and units_step > 0):
        raise ConfigError(f"sizes are positive; got microbatch={units_small:g} and batch={units_step:g}.")
    if abs(units_step - units_small) <= SAME_SIZE * units_step:
        raise ConfigError(
            f"noise scale needs two batch sizes; got microbatch={units_small:g} and batch={units_step:g}. "
            "Use accumulation >= 2, world_size >= 2, or per_example=True."
        )
    trace_cov = (sq_norm_small - sq_norm_step) / (1.0 / units_small - 1.0 / units_step)
    grad_sq_norm = (units_step * sq_norm_step - units_small * sq_norm_small) / (units_step - units_small)
    if dataset_size is not None:
        grad_sq_norm = grad_sq_norm + trace_cov / dataset_size
    return trace_cov, grad_sq_norm


def solve_moments(
    sq_norms: Sequence[float],
    units: Sequence[int],
    sq_norm_step: float,
    *,
    coefficients: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    dataset_size: int | None = None,
) -> StepMoments:
    """Moments of the mean gradient from K microbatches of b_i units whose step gradient is sum a_i g_i.

    Solves, with g_i the MEAN gradient of microbatch i,

        E[sum q_i |g_i|^2] = |G|^2 sum q_i     + tr(Sigma) sum q_i / b_i
        E|sum a_i g_i|^2   = |G|^2 (sum a_i)^2 + tr(Sigma) sum a_i^2 / b_i

    With a_i = b_i / B and B = sum b_i this is tr(Sigma) = B (sum a_i |g_i|^2 - |gbar|^2) / (K - 1) and
    |G|^2 = |gbar|^2 - tr(Sigma) / B. However the step is weighted, the moments are those of one unit's and
    of the mean gradient. Assumes that units are drawn independently of each other; weights and coefficients
    must not depend on the gradients.

    Without replacement from D examples the draws repel each other and |G|^2 comes out too small by
    tr(Sigma) / D, which a small |G|^2 does not forgive. With `dataset_size=D` it is added back, and the
    target is the EMPIRICAL gradient, over those D examples, with Sigma their covariance (divisor D - 1).
    Without it the target is the POPULATION gradient, of which the D examples are a sample: right for fresh
    data, and for draws with replacement from D examples (the population then is the data set).

    Args:
        sq_norms: |g_i|^2, shape (K,).
        units: b_i >= 1, shape (K,).
        sq_norm_step: |sum a_i g_i|^2, of the gradient as it was summed.
        coefficients: a_i, shape (K,), with a sum other than 0. None: b_i / B.
        weights: q_i >= 0, shape (K,). None: the coefficients.
        dataset_size: D, examples that the step draws from without replacement; at least the batch.

    Returns:
        StepMoments; both estimates unbiased, neither clamped.

    Raises:
        ConfigError: fewer than two microbatches, or weights that leave both equations the same; shapes
            that disagree; units below 1; a data set smaller than the batch.

    >>> moments = solve_moments([1.0, 9.0], [1, 1], 4.0)
    >>> moments.trace_cov, moments.grad_sq_norm
    (2.0, 3.0)

    Source: McCandlish et al. 2018, eq. A.1 and A.2, for uneven sizes and any weights; footnote 6 (without
    replacement the variance of a mean is (1/B - 1/D) times the covariance with divisor D - 1).
    """
    norms, sizes = np.asarray(sq_norms, dtype=np.float64), np.asarray(units, dtype=np.float64)
    if norms.ndim != 1 or norms.shape != sizes.shape:
        raise ConfigError(f"each microbatch has one norm and one size; got {norms.size} norms and {sizes.size} sizes.")
    if not (sizes >= 1).all():
        raise ConfigError(f"a microbatch has at least 1 unit; got units={list(units)}.")
    a = sizes / sizes.sum() if coefficients is None else np.asarray(coefficients, dtype=np.float64)
    q = a if weights is None else np.asarray(weights, dtype=np.float64)
    if a.shape != sizes.shape or q.shape != sizes.shape:
        raise ConfigError(
            f"{sizes.size} microbatches need as many coefficients and weights; got {a.size} and {q.size}."
        )
    if a.sum() == 0 or not ((q >= 0).all() and q.sum() > 0):
        raise ConfigError(f"coefficients {a.tolist()} or weights {q.tolist()} make no mean gradient: they sum to 0.")
    return _solve(
        num_microbatches=sizes.size,
        batch=int(sizes.sum()),
        sq_norm_small=float(q @ norms / q.sum()),
        units_small=float(q.sum() / (q / sizes).sum()),
        sq_norm_step=float(sq_norm_step) / float(a.sum()) ** 2,
        units_step=float(a.sum() ** 2 / (a * a / sizes).sum()),
        dataset_size=dataset_size,
    )


def _solve(
    *,
    num_microbatches: int,
    batch: int,
    sq_norm_small: float,
    units_small: float,
    sq_norm_step: float,
    units_step: float,
    dataset_size: int | None,
) -> StepMoments:
    if dataset_size is not None and dataset_size < batch:
        raise ConfigError(f"a batch of {batch} cannot be drawn without replacement from dataset_size={dataset_size}.")
    trace_cov, grad_sq_norm = solve_two_sizes(sq_norm_small, units_small, sq_norm_step, units_step, dataset_size)
    return StepMoments(
        trace_cov=trace_cov,
        grad_sq_norm=grad_sq_norm,
        batch=batch,
        num_microbatches=num_microbatches,
        sq_norm_small=sq_norm_small,
        sq_norm_step=sq_norm_step,
        units_small=units_small,
        units_step=units_step,
    )


def solve_per_example(
    sq_norms: Sequence[float], sq_norm_mean: float, *, dataset_size: int | None = None
) -> StepMoments:
    """Moments from the squared norm of every example's own gradient: microbatches of one unit.

    tr(Sigma) is then exactly the trace of the examples' sample covariance, the estimate of least variance.

    Args:
        sq_norms: squared norm of each example's gradient of its own loss, shape (B,) with B >= 2. Gradients
            of a mean loss carry a factor 1/B: multiply their squared norms by B^2 first.
        sq_norm_mean: squared norm of the mean of those gradients.
        dataset_size: as in `solve_moments`.

    Returns:
        StepMoments with num_microbatches = B.

    Raises:
        ConfigError: fewer than two examples.

    >>> solve_per_example([1.0, 9.0], 4.0).trace_cov  # gradients 1 and 3: their sample variance
    2.0

    Source: McCandlish et al. 2018, eq. A.2 with B_small = 1.
    """
    return solve_moments(sq_norms, [1] * len(sq_norms), sq_norm_mean, dataset_size=dataset_size)
