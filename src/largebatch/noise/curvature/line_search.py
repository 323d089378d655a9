"""How much could the best step lower the loss at each batch size, and which B_noise does that say?

At fixed weights, gradients are drawn at several batch sizes, and the loss is looked at after steps of several lengths
along each. No Hessian is taken and no quadratic model is assumed on the way, which makes this the test of both:

    dL_opt(B) = max over eps of E[L(theta) - L(theta - eps g_B)] = dL_max / (1 + B_noise/B)

The step length is common to all draws of one batch size: it is chosen before the draw is seen, as in training.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from largebatch.errors import ConfigError
from largebatch.noise.curvature.probe import Count, GradientProbe, Loss, check_counts
from largebatch.noise.estimate import NORMAL_QUANTILE
from largebatch.units import check_unit

Array = NDArray[np.float64]

_REACH = 1e4
"""How far beyond the smallest and the largest batch B_noise is looked for, as a factor."""
MIN_DRAWS = 24
"""Fewer draws at each batch size are not fitted: errors from so few are themselves unsure."""
_LEVELS = (401, *(41,) * 6)
"""Points in the search for B_noise: a grid in its logarithm, then finer ones around the best: right to 1e-8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineSearchPoint:
    """The best step at one batch size."""

    batch: int
    """Units behind each gradient."""
    best_lr: float
    """The step length of the largest mean decrease: the vertex of the parabola through the best three."""
    loss_decrease: float
    """The mean decrease of the mean loss there."""
    standard_error: float
    """Of that decrease, by resampling the draws."""
    fitted: float | None
    """What the fit says there; None where there is no fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineSearch:
    """B_noise of a line search with its 95 % interval, or the reason why there is none."""

    b_noise: float | None
    """B_noise in `unit`; None where it could not be fitted."""
    interval: tuple[float | None, float | None]
    """95 % (low, high) by resampling the draws; None is unbounded on that side."""
    resolved: bool
    """Whether both ends of the interval are bounded."""
    reason: str
    """Why it is not resolved; empty if it is."""
    unit: str
    """What a batch counts."""
    loss_decrease_max: float | None
    """dL_max: what the best step without noise would take off the mean loss."""
    lr_max: float | None
    """eps_max: how long that step is; the geometric mean of best_lr (1 + B_noise/B) over the batch sizes."""
    form_p_value: float | None
    """How often draws from the fitted form would lie as far from it as these do: below 0.05 says that the form
    dL_max / (1 + B_noise/B) does not hold here."""
    points: tuple[LineSearchPoint, ...]
    """One a batch size, in the order given."""

    def __str__(self) -> str:
        if not self.resolved or self.b_noise is None:
            return f"B_noise by line search unresolved: {self.reason}"
        low, high = self.interval
        return f"B_noise by line search = {self.b_noise:,.4g} {self.unit} (95 % interval {low:,.4g} to {high:,.4g})"


def measure_line_search(
    model: nn.Module,
    loss: Loss,
    draw: Callable[[int], Iterable[Any]],
    evaluation: Sequence[Any],
    *,
    batches: Sequence[int],
    lrs: Sequence[float],
    num_draws: int = 32,
    count: Count | None = None,
) -> Array:
    """Decreases of the mean loss after a step along drawn gradients, by batch size, draw and step length.

    One forward over `evaluation` for each; weights are moved in place and set back bit for bit, even after an error.
    Gradients, buffers and random numbers stay as they are, as with `measure_curvature`.

    Args:
        model: as for `measure_curvature`.
        loss: (model, batch) -> the SUM of the losses of the batch's units.
        draw: units -> microbatches with so many units in all, drawn afresh and independently at every call.
        evaluation: microbatches on which the loss is looked at, INDEPENDENT of what `draw` gives. Examples in both
            count their own gradient's noise as progress; with few of them the form still holds, for their loss.
        batches: units behind each gradient, from well below B_noise to well above it.
        lrs: step lengths, above 0, rising; a factor of 2 apart is close enough. They go beyond the best of the
            largest batch, which is near `CurvatureScale.lr_max`.
        num_draws: gradients at each batch size, >= 1; `fit_line_search` takes no fewer than 24. Decreases of several
            calls with draws of their own may be joined along dim 1.
        count: units in a microbatch; None: the length of its first tensor.

    Returns:
        Decreases, shape (num_batches, num_draws, num_lrs); positive where the loss fell. A loss that is not finite
        after a step counts as a decrease of minus infinity.

    Raises:
        ConfigError: as `measure_curvature` and `fit_line_search`, or `draw` gave another number of units.

    Source: McCandlish et al. 2018, app. A.1 (line search) and eq. 2.7.
    """
    _check_grid(batches, lrs)
    check_counts(num_draws=num_draws)
    probe, watcher = GradientProbe(model, loss, count), GradientProbe(model, loss, count, stream=1)
    if not evaluation:
        raise ConfigError("there is nothing to look at the loss on: evaluation is empty.")
    num_units = sum(watcher.units(batch) for batch in evaluation)

    def mean_loss() -> float:
        watcher.restart_stream()
        total = 0.0
        for batch in evaluation:
            with watcher.no_trace(), torch.no_grad():
                total += float(watcher.total_loss(batch))
        return total / num_units

    before = mean_loss()
    if not math.isfinite(before):
        raise ConfigError(f"the loss is {before} at these weights: there is nothing to search.")
    decreases = np.empty((len(batches), num_draws, len(lrs)))
    kept = [parameter.detach().clone() for parameter in probe.parameters]
    for row, batch in enumerate(batches):
        for column in range(num_draws):
            gradient, units = probe.mean_gradient(list(draw(batch)))
            if units != batch:
                raise ConfigError(f"draw({batch}) gave microbatches with {units} units in all; they hold {batch}.")
            try:
                for index, lr in enumerate(lrs):
                    _move(probe.parameters, kept, gradient, lr)
                    after = mean_loss()
                    decreases[row, column, index] = before - after if math.isfinite(after) else -math.inf
            finally:
                _move(probe.parameters, kept, None, 0.0)
    return decreases


@torch.no_grad()
def _move(
    parameters: Sequence[torch.Tensor],
    start: Sequence[torch.Tensor],
    gradient: Sequence[torch.Tensor] | None,
    lr: float,
) -> None:
    """Set the weights to start - lr x gradient; to the start itself without a gradient."""
    for index, (parameter, origin) in enumerate(zip(parameters, start, strict=True)):
        parameter.copy_(origin if gradient is None else origin - lr * gradient[index])


def fit_line_search(
    decreases: Array,
    *,
    batches: Sequence[int],
    lrs: Sequence[float],
    unit: str = "examples",
    dataset_size: int | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> LineSearch:
    """Fit dL_opt(B) = dL_max / (1 + B_noise/B) to measured decreases.

    Decreases are averaged over the draws at each step length, then maximised over lengths: the parabola through the
    best three, of which length 0 with decrease 0 may be one (exact on a quadratic loss). Each batch size weighs by its
    resampled error. The interval is normal in log B_noise, with the spread of resamples of the draws within batch
    sizes that go through everything anew. It knows the noise of the draws and not that of the evaluation examples,
    which all share. At least 24 draws at each batch size are asked for: there the interval covers 95 % or more on a
    quadratic, with 8 about 90 %. `form_p_value` is somewhat too small: of tables from a true form 9 % are below 0.05
    with 24 draws, 8 % with 32.

    Args:
        decreases: of `measure_line_search`, shape (num_batches, num_draws, num_lrs).
        batches: its batch sizes, at least 3 different ones.
        lrs: its step lengths, rising, at least 2.
        unit: what a batch counts.
        dataset_size: examples that each gradient draws from without replacement; noise then goes with 1/B - 1/D.
        num_resamples: resamples of the draws.
        seed: of the resampling, which has a generator of its own.

    Returns:
        LineSearch, resolved or with the reason why not.

    Raises:
        ConfigError: shapes that disagree, fewer than 3 batch sizes or 24 draws, values that cannot be used.

    Source: McCandlish et al. 2018, eq. 2.7 and app. A.1; the weights, the interval and the test of the form are ours.
    """
    check_unit(unit)
    _check_grid(batches, lrs)
    check_counts(num_resamples=num_resamples)
    values = np.asarray(decreases, dtype=np.float64)
    if values.ndim != 3 or values.shape[::2] != (len(batches), len(lrs)):
        raise ConfigError(
            f"decreases have the shape (num_batches, num_draws, num_lrs) = ({len(batches)}, num_draws, {len(lrs)}); "
            f"got {values.shape}."
        )
    if values.shape[1] < MIN_DRAWS:
        raise ConfigError(
            f"an interval that covers needs at least {MIN_DRAWS} draws at each batch size; got {values.shape[1]}. "
            "Measure more and join them along dim 1."
        )
    if np.isnan(values).any():
        raise ConfigError("a decrease is not a number. A loss that is not finite is a decrease of minus infinity.")
    if dataset_size is not None and dataset_size < max(batches):
        raise ConfigError(
            f"a batch of {max(batches)} cannot be drawn without replacement from dataset_size={dataset_size}."
        )
    inverse = 1 / np.array(batches, dtype=np.float64) - (0.0 if dataset_size is None else 1 / dataset_size)
    lengths = np.array([0.0, *lrs])
    num_draws = values.shape[1]
    best_lr, best, edges = _maximum(lengths, values.mean(axis=1))
    rng = np.random.default_rng(seed)
    picks = rng.multinomial(num_draws, np.full(num_draws, 1 / num_draws), size=(len(batches), num_resamples))
    # 0 x infinity is no number: a draw that blew up counts only where it was picked.
    finite = np.where(np.isfinite(values), values, 0.0)
    blown = picks @ (~np.isfinite(values)).astype(np.float64) > 0
    means = np.where(blown, -np.inf, picks @ finite / num_draws)
    samples = np.stack([_maximum(lengths, row)[1] for row in means])
    errors = samples.std(axis=1) * math.sqrt(num_draws / (num_draws - 1))

    points = [
        LineSearchPoint(batch=batch, best_lr=lr, loss_decrease=decrease, standard_error=error, fitted=None)
        for batch, lr, decrease, error in zip(batches, best_lr.tolist(), best.tolist(), errors.tolist(), strict=True)
    ]
    unfitted = LineSearch(
        b_noise=None, interval=(None, None), resolved=False, reason="", unit=unit, loss_decrease_max=None,
        lr_max=None, form_p_value=None, points=tuple(points),
    )  # fmt: skip
    if (edges > 0).any():
        batch = batches[int(np.argmax(edges))]
        reason = f"at batch {batch} the longest step, {lrs[-1]:g}, is the best: search longer ones."
        return replace(unfitted, reason=reason)
    if (edges < 0).any():
        batch = batches[int(np.argmin(edges))]
        reason = (
            f"at batch {batch} no step lowers the loss: leave it out, search shorter ones than {lrs[0]:g}, or give "
            "more draws."
        )
        return replace(unfitted, reason=reason)
    # A spread of 0 (all draws alike) would weigh without bound.
    weights = 1 / np.maximum(errors, 1e-9 * best.max()) ** 2
    bounds = min(batches) / _REACH, max(batches) * _REACH
    (scale,), (limit,), (excess,) = _fit(best[None], inverse, weights, bounds)
    # Normal in the logarithm: the resamples' own quantiles cover 88 % where this covers 94 %.
    spread = np.log(_fit(samples.T, inverse, weights, bounds)[0]).std() * math.sqrt(num_draws / (num_draws - 1))
    low, high = (float(scale) * math.exp(sign * NORMAL_QUANTILE * spread) for sign in (-1, 1))
    interval = (None if low < 2 * bounds[0] else low, None if high > bounds[1] / 2 else high)
    reason = ""
    if None in interval:
        reason = (
            f"decreases at batches {min(batches)} to {max(batches)} do not bound B_noise: its 95 % interval is "
            f"{'unbounded' if interval[0] is None else f'{low:.3g}'} to "
            f"{'unbounded' if interval[1] is None else f'{high:.3g}'}. Search batches further apart or give more draws."
        )
    fitted = (limit / (1 + scale * inverse)).tolist()
    return LineSearch(
        b_noise=float(scale),
        interval=interval,
        resolved=not reason,
        reason=reason,
        unit=unit,
        loss_decrease_max=float(limit),
        lr_max=float(np.exp(np.log(best_lr * (1 + scale * inverse)).mean())),
        form_p_value=_chi_square_tail(float(excess), len(batches) - 2),
        points=tuple(replace(point, fitted=value) for point, value in zip(points, fitted, strict=True)),
    )


def _maximum(lengths: Array, means: Array) -> tuple[Array, Array, NDArray[np.int64]]:
    """Where and how high mean decreases, shape (n, num_lrs), are largest; 1 where the longest is, -1 where none is.

    `lengths` starts with 0, where the decrease is 0.
    """
    heights = np.concatenate([np.zeros((len(means), 1)), means], axis=1)
    top = heights.argmax(axis=1)
    edges = (top == len(lengths) - 1).astype(np.int64) - (top == 0)
    middle = np.clip(top, 1, len(lengths) - 2)
    rows = np.arange(len(means))
    # Beside a step that blew up, the three below it make the parabola.
    middle = np.where(np.isfinite(heights[rows, middle + 1]) | (middle == 1), middle, middle - 1)
    left, centre, right = lengths[middle - 1], lengths[middle], lengths[middle + 1]
    here = heights[rows, middle]
    # Newton's divided differences.
    with np.errstate(invalid="ignore", over="ignore"):
        rise = (here - heights[rows, middle - 1]) / (centre - left)
        bend = ((heights[rows, middle + 1] - here) / (right - centre) - rise) / (right - left)
        vertex = (left + centre) / 2 - rise / (2 * bend)
        height = here + (vertex - centre) * (rise + bend * (vertex - left))
    usable = np.isfinite(bend) & (bend < 0) & (edges == 0) & np.isfinite(vertex)
    best = heights[rows, top]
    return np.where(usable, vertex, lengths[top]), np.where(usable, height, best), edges


def _fit(best: Array, inverse: Array, weights: Array, bounds: tuple[float, float]) -> tuple[Array, Array, Array]:
    """(B_noise, dL_max, weighted squared residual) of each row of `best`, shape (n, num_batches)."""
    low, high = (np.full(len(best), math.log(bound)) for bound in bounds)
    scale, limit, residual = (np.empty(len(best)) for _ in range(3))
    rows = np.arange(len(best))
    for num_points in _LEVELS:
        tried = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, num_points)
        shape = 1 / (1 + np.exp(tried)[:, :, None] * inverse)  # (n, num_points, num_batches)
        limits = (shape @ (weights * best)[:, :, None])[:, :, 0] / (shape**2 @ weights)
        residuals = ((best[:, None, :] - limits[:, :, None] * shape) ** 2) @ weights
        chosen = residuals.argmin(axis=1)
        scale, limit, residual = np.exp(tried[rows, chosen]), limits[rows, chosen], residuals[rows, chosen]
        spacing = (high - low) / (num_points - 1)
        low, high = tried[rows, chosen] - spacing, tried[rows, chosen] + spacing
    return scale, limit, residual


def _chi_square_tail(value: float, freedom: int) -> float:
    """P(chi^2 > value) for a whole number of degrees of freedom >= 1 (Abramowitz and Stegun 1964, eq. 26.4.4-5)."""
    half = max(value, 0.0) / 2
    tail, term = (math.exp(-half), 1.0) if freedom % 2 == 0 else (math.erfc(math.sqrt(half)), 0.5)
    while 2 * term < freedom:
        if half > 0:
            tail += math.exp(term * math.log(half) - half - math.lgamma(term + 1))
        term += 1
    return min(tail, 1.0)


def _check_grid(batches: Sequence[int], lrs: Sequence[float]) -> None:
    for batch in batches:
        check_counts(batch=batch)
    if len(set(batches)) < 3 or len(set(batches)) < len(batches):
        raise ConfigError(f"two numbers are fitted and the form is tested: give 3 different batches; got {batches}.")
    rising = all(0 < left < right < math.inf for left, right in itertools.pairwise(lrs))
    if len(lrs) < 2 or not rising:
        raise ConfigError(f"lrs are at least 2 step lengths, above 0, rising, finite; got {list(lrs)}.")
