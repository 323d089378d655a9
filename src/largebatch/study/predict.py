"""What does one monitored run predict for every other batch size?

With Bn the noise scale and w = 1/(1 + Bn/B), a step at batch B makes as much progress as w steps of the full
batch, so S_min = sum w and E_min = sum Bn w up to the goal's crossing (McCandlish 2018, D.1 with B constant).
Written in moments, w = |G|^2 / (|G|^2 + tr(Sigma)/B): the denominator is the mean of |gbar|^2, which is positive
and steady, so nothing is ever divided by a noisy |G|^2 and stretches whose noise scale is unresolved still count
for what they are worth. As w + Bn w/B = 1, S_min + E_min/B is the number of steps taken, whatever the noise:
only the share S_min/steps is measured, and one interval for it gives all the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from largebatch.errors import ConfigError
from largebatch.noise.estimate import noise_scale
from largebatch.records.schema import GoalPrediction, Interval, NoiseWindow

SHORTEST_WINDOW = 8
"""Steps in the first windows: enough for a variance from successive differences."""
WINDOW_GROWTH = 0.125
"""A later window is this fraction of the steps before it, so that a power law looks flat in it."""
CONFIDENCE = 0.95

_Array = NDArray[np.float64]


def geometric_windows(
    num_steps: int, *, shortest: int = SHORTEST_WINDOW, growth: float = WINDOW_GROWTH
) -> list[tuple[int, int]]:
    """Return (first, end) of the windows that cut `num_steps` steps, end exclusive; the last takes the remainder.

    >>> geometric_windows(40, shortest=16)
    [(0, 16), (16, 40)]
    """
    windows, first = [], 0
    while first < num_steps:
        length = max(shortest, math.ceil(growth * first))
        end = num_steps if num_steps - first < length + shortest else first + length
        windows.append((first, end))
        first = end
    return windows


def noise_windows(
    trace_cov: ArrayLike,
    grad_sq_norm: ArrayLike,
    loss: ArrayLike,
    *,
    unit: str = "examples",
    windows: Sequence[tuple[int, int]] | None = None,
) -> tuple[NoiseWindow, ...]:
    """Return the noise scale of each window, the ratio of its mean moments, with Fieller's interval.

    Args:
        trace_cov: per-step tr(Sigma), shape (num_steps,).
        grad_sq_norm: per-step |G|^2, shape (num_steps,).
        loss: per-step training loss, shape (num_steps,).
        unit: what a batch counts.
        windows: (first, end) of each; default `geometric_windows`.

    Returns:
        One record a window; its first_step and last_step are counted from 0, inclusive.

    Raises:
        ConfigError: arrays of unequal length, or a moment that is not finite.
    """
    trace, grad = _moments(trace_cov, grad_sq_norm)
    losses = np.asarray(loss, dtype=np.float64)
    if losses.shape != trace.shape:
        raise ConfigError(f"every step has a loss; got {losses.shape} losses for {trace.shape} moments.")
    records = []
    for first, end in windows if windows is not None else geometric_windows(len(trace)):
        estimate = noise_scale(trace[first:end], grad[first:end], unit=unit)
        records.append(
            NoiseWindow(
                first_step=first,
                last_step=end - 1,
                loss=float(losses[first:end].mean()),
                trace_cov=float(trace[first:end].mean()),
                grad_sq_norm=float(grad[first:end].mean()),
                b_simple=Interval(value=estimate.b_simple, low=estimate.interval[0], high=estimate.interval[1]),
                resolved=estimate.resolved,
            )
        )
    return tuple(records)


def predict_goals(
    trace_cov: ArrayLike,
    grad_sq_norm: ArrayLike,
    *,
    batch: int,
    crossings: Mapping[float, float | None],
    unit: str = "examples",
) -> tuple[GoalPrediction, ...]:
    """Predict S_min, E_min and B_crit of every goal from the moments of one run.

    Assumes a constant batch, errors of neighbouring steps that are independent, and a learning rate near the best
    one (a smaller one inflates the noise scale). Each window gives w from its mean moments, corrected to second
    order for the noise in them; the 95 % interval of S_min comes from the windows' successive differences by the
    delta method, and those of E_min and B_crit follow from S_min + E_min/B = steps.

    Args:
        trace_cov: per-step tr(Sigma), shape (num_steps,), from the first step on.
        grad_sq_norm: per-step |G|^2, shape (num_steps,).
        batch: units in each step, >= 1.
        crossings: per goal (its loss) the step at which it was crossed, fractional, or None if it was not.
        unit: what a batch counts.

    Returns:
        One prediction a goal, in the order given. Unresolved, with the reason, when the goal was not crossed, came
        too early for a variance, or when S_min or E_min is not told from 0 (then the end in question is open).

    Raises:
        ConfigError: moments of unequal length or not finite, a batch below 1, a crossing beyond the moments.

    Source: McCandlish 2018, (D.1), with the integral over full-batch steps s written as ds = w dt.
    """
    trace, grad = _moments(trace_cov, grad_sq_norm)
    if batch < 1:
        raise ConfigError(f"a batch has at least 1 unit; got {batch!r}.")
    return tuple(_predict(trace, grad, batch, goal, crossing, unit) for goal, crossing in crossings.items())


def _predict(trace: _Array, grad: _Array, batch: int, goal: float, crossing: float | None, unit: str) -> GoalPrediction:
    nothing = Interval(value=None)
    if crossing is None:
        reason = "the measured run did not reach this goal."
        return GoalPrediction(
            goal=goal, min_steps=nothing, min_units=nothing, b_crit=nothing, b_simple=nothing,
            resolved=False, reason=reason,
        )  # fmt: skip
    if not 0 < crossing <= len(trace):
        raise ConfigError(f"goal {goal:g} was crossed at step {crossing:g}, but {len(trace)} steps have moments.")
    num_steps = math.ceil(crossing)
    estimate = noise_scale(trace[:num_steps], grad[:num_steps], unit=unit)
    b_simple = Interval(value=estimate.b_simple, low=estimate.interval[0], high=estimate.interval[1])
    share, half_width = _full_batch_steps(trace, grad, batch, crossing)
    share, half_width = share / crossing, half_width / crossing
    low, high = share - half_width, share + half_width
    reason = ""
    if not math.isfinite(half_width):
        reason = f"the goal was crossed after {crossing:g} steps; an interval needs at least 2 in every window."
    elif low <= 0:
        reason = "S_min is not told from 0: B_crit has no upper end. Measure at a larger batch or for longer."
    elif high >= 1:
        reason = "E_min is not told from 0: B_crit has no lower end. Measure at a smaller batch."
    return GoalPrediction(
        goal=goal,
        min_steps=_increasing(share, low, high, lambda f: crossing * f),
        min_units=_increasing(1 - share, 1 - high, 1 - low, lambda f: batch * crossing * f),
        b_crit=_increasing(1 - share, 1 - high, 1 - low, lambda f: batch * f / (1 - f)),
        b_simple=b_simple,
        resolved=not reason,
        reason=reason,
    )


def _full_batch_steps(trace: _Array, grad: _Array, batch: int, crossing: float) -> tuple[float, float]:
    """S_min up to the crossing and the half-width of its 95 % interval (inf where it cannot be said)."""
    total, variance, freedom = 0.0, 0.0, 0.0
    for first, end in geometric_windows(math.ceil(crossing)):
        length = min(float(end), crossing) - first
        x = np.stack([trace[first:end] / batch, grad[first:end]])
        noise, signal = x.mean(axis=1)
        power = noise + signal
        if not power > 0:
            return math.nan, math.inf
        weight = signal / power
        if end - first > 1:
            steps = np.diff(x, axis=1)
            covariance = steps @ steps.T / (2 * steps.shape[1] * (end - first))
            slope = np.array([-signal, noise]) / power**2
            bend = np.array([[2 * signal, signal - noise], [signal - noise, -2 * noise]]) / power**3
            weight -= 0.5 * float((bend * covariance).sum())
            variance += length**2 * float(slope @ covariance @ slope)
            # Overlapping differences of n normal errors know their variance as well as 2n/3 squares do.
            freedom += (end - first - 1) * 2 / 3
        else:
            variance = math.inf
        total += length * float(weight)
    if not freedom or math.isinf(variance):
        return total, math.inf
    return total, float(stats.t.isf((1 - CONFIDENCE) / 2, freedom)) * math.sqrt(variance)


def _increasing(share: float, low: float, high: float, number: Callable[[float], float]) -> Interval:
    """An interval mapped by an increasing function of a share in (0, 1); what lies outside is open or unknown."""

    def inside(f: float) -> float | None:
        return float(number(f)) if 0 < f < 1 else None

    return Interval(value=inside(share), low=inside(low), high=inside(high))


def _moments(trace_cov: ArrayLike, grad_sq_norm: ArrayLike) -> tuple[_Array, _Array]:
    trace, grad = np.asarray(trace_cov, dtype=np.float64), np.asarray(grad_sq_norm, dtype=np.float64)
    if trace.ndim != 1 or trace.shape != grad.shape:
        raise ConfigError(f"each step has two moments; got shapes {trace.shape} and {grad.shape}.")
    bad = np.flatnonzero(~(np.isfinite(trace) & np.isfinite(grad)))
    if bad.size:
        raise ConfigError(f"moments are finite numbers; step {bad[0]} has {trace[bad[0]]!r} and {grad[bad[0]]!r}.")
    return trace, grad
