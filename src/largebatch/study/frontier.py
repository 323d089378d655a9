"""Which hyperbola do the measured steps-to-goal lie on, and how surely?

S(B) = S_min + E_min / B is fitted to single runs, one residual a run: log S - log(S_min + E_min / B), normal with
one standard deviation. E = B S is no second datum. A run that was stopped enters as P(S > bound).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, special, stats

from largebatch.errors import ConfigError
from largebatch.records.schema import FrontierPoint, GoalFront, Interval
from largebatch.study.choose import Curve, choose_again, fit_curves, level_at
from largebatch.study.hyperbola import (
    largest_worthwhile_batch,
    ratio_interval,
    round_down_batch,
    steps_at,
    units_at,
)

__all__ = ["fit_front", "largest_worthwhile_batch", "ratio_interval", "round_down_batch", "steps_at", "units_at"]

DEFINITION = "hyperbola: S = S_min (1 + B_crit/B), learning rate chosen per batch and goal"
CONFIDENCE = 0.95
_MISFIT_LEVEL = 0.2
"""F test at which the scatter of the cell means replaces the pooled variance: early, as missing it costs coverage."""
_NUM_CHOICES = 48
"""How often each cell's learning rate is chosen again."""
_SEED = 20181214
_REACH = 12.0
"""log distance beyond the smallest and largest batch at which B_crit counts as 0 or infinite."""
_NOISE_FREE = 1e-8

Target = str  # "b_crit", "min_steps" or "min_units"


@dataclass(frozen=True, slots=True)
class _Runs:
    """Every fresh-seed run of one goal, flat."""

    log_batch: np.ndarray
    log_steps: np.ndarray
    """Of the goal, or of the bound where the run was stopped."""
    stopped: np.ndarray
    cell: np.ndarray
    weight: np.ndarray
    """1 for a run; for what a whole search tells of its chosen rate, the number of runs it is worth."""

    @property
    def pivot(self) -> float:
        return float(self.log_batch.mean())

    @property
    def reach(self) -> tuple[float, float]:
        return float(self.log_batch.min()) - _REACH, float(self.log_batch.max()) + _REACH

    def pick(self, which: np.ndarray) -> _Runs:
        columns = (self.log_batch, self.log_steps, self.stopped, self.cell, self.weight)
        return _Runs(*(column[which] for column in columns))

    def residuals(self, log_b_crit: Any, level: Any) -> np.ndarray:
        """Log steps minus the hyperbola that has value exp(level) at the pivot batch; a new last axis for the runs."""
        z = np.asarray(log_b_crit, dtype=float)[..., None]
        curve = np.logaddexp(self.log_batch, z) - self.log_batch - _at_pivot(z, self.pivot)
        return self.log_steps - np.asarray(level, dtype=float)[..., None] - curve

    def loss(self, log_b_crit: Any, level: Any, std: float) -> Any:
        """Negative log likelihood, without the constants, for each pair of parameters."""
        z = self.residuals(log_b_crit, level) / std
        runs = ~self.stopped
        squares = 0.5 * (self.weight[runs] * z[..., runs] ** 2).sum(-1)
        return squares + runs.sum() * math.log(std) - special.log_ndtr(-z[..., self.stopped]).sum(-1)


def _at_pivot(log_b_crit: Any, pivot: float) -> Any:
    return np.logaddexp(pivot, log_b_crit) - pivot


def fit_front(points: Sequence[FrontierPoint], goal: float, *, b_simple: Interval | None = None) -> GoalFront:
    """Fit S = S_min + E_min / B to the runs of one goal, with 95 % intervals.

    Maximum likelihood with one residual a fresh-seed run, log S - log(S_min + E_min/B) ~ N(0, std^2); stopped runs
    enter as P(S > bound). Where the search of a batch size is given, what all its runs around the chosen rate tell
    of that rate (`choose.level_at`) is one residual more, weighted by the runs it is worth. Intervals are those of
    the profile likelihood cut at Student's t, the variance being that of the pooled residuals (n - 2 degrees of
    freedom) plus what choosing the learning rate adds between cells: each cell's search is drawn again and the
    choice made again. Where the cell means miss the hyperbola by more than both explain (F test at 20 %), their
    scatter takes the place of the pooled variance. A factor that is common to all cells moves S_min and E_min
    together and leaves B_crit alone.

    Args:
        points: one per batch size; steps > 0; at least three with most of their seeds at the goal for an interval.
        goal: the loss of the goal, copied into the result.
        b_simple: noise scale up to the goal, for the ratio to B_crit.

    Returns:
        The front. `resolved` is False, with the reason, when fewer than three batch sizes reached the goal or when
        an end of B_crit's interval is open. When B_crit lies outside the batches tried, the far end rests on
        extrapolation and is left open. A value that the runs put at 0 or infinity is None.

    Raises:
        ConfigError: a batch, step count or bound is not positive and finite.

    Source: McCandlish 2018, (2.11), (2.12), A.3. They fit by eye in log space; the likelihood and intervals are ours.
    """
    points = tuple(sorted(points, key=lambda point: point.batch))
    runs = _flatten(points)
    reached = {point.batch for point in points if point.steps and len(point.steps) > len(point.bounds)}

    def front(b_crit: Interval, min_steps: Interval, min_units: Interval, reason: str, std: float | None) -> GoalFront:
        ratio = ratio_interval(b_simple, b_crit) if b_simple is not None else Interval(value=None)
        return GoalFront(
            goal=goal, definition=DEFINITION, min_steps=min_steps, min_units=min_units, b_crit=b_crit,
            resolved=not reason, reason=reason, points=points, residual_std=std, b_simple_over_b_crit=ratio,
        )  # fmt: skip

    if len(reached) < 3:
        unknown = Interval(value=None)
        reason = f"the goal was reached at {len(reached)} batch sizes; the hyperbola needs at least 3."
        return front(unknown, unknown, unknown, reason, None)
    log_b_crit, level, std = _maximise(runs)
    curves = fit_curves([point.search for point in points])
    if std >= _NOISE_FREE:
        runs = _with_searches(runs, points, curves)
        log_b_crit, level, std = _maximise(runs)
    values = _values(log_b_crit, level, runs)
    if std < _NOISE_FREE:
        intervals = {target: Interval(value=v, low=v, high=v) for target, v in values.items()}
        std = 0.0
    else:
        std, judging_std, cut = _spread(runs, curves, log_b_crit, level, std)
        intervals = _intervals(runs, values, judging_std, cut)
    b_crit, reason = _judge(intervals["b_crit"], min(reached), max(reached))
    min_steps, min_units = intervals["min_steps"], intervals["min_units"]
    if b_crit.high is None:
        min_steps = Interval(value=min_steps.value, high=min_steps.high)
    if b_crit.low is None:
        min_units = Interval(value=min_units.value, high=min_units.high)
    return front(b_crit, min_steps, min_units, reason, std)


def _flatten(points: Sequence[FrontierPoint]) -> _Runs:
    rows = [
        (point.batch, steps, stopped, cell)
        for cell, point in enumerate(points)
        for stopped, many in ((False, point.steps), (True, point.bounds))
        for steps in many
    ]
    for batch, steps, _, _ in rows:
        if not (batch > 0 and steps > 0 and math.isfinite(steps)):
            raise ConfigError(f"steps and bounds must be positive and finite; got {steps!r} at batch {batch!r}.")
    batch, steps, stopped, cell = zip(*rows, strict=True) if rows else ((), (), (), ())
    return _Runs(
        log_batch=np.log(np.array(batch, dtype=float)),
        log_steps=np.log(np.array(steps, dtype=float)),
        stopped=np.array(stopped, dtype=bool),
        cell=np.array(cell, dtype=int),
        weight=np.ones(len(rows)),
    )


def _best_level(runs: _Runs, log_b_crit: Any, std: float) -> np.ndarray:
    """The most likely level at each B_crit: the mean residual, or Newton on a convex loss where runs were stopped."""
    r = runs.residuals(log_b_crit, 0.0)
    ran, stopped, weight = r[..., ~runs.stopped], r[..., runs.stopped], runs.weight[~runs.stopped]
    level = (ran * weight).sum(-1) / weight.sum()
    for _ in range(60 if runs.stopped.any() else 0):
        z = (stopped - level[..., None]) / std
        hazard = np.exp(-0.5 * z * z - special.log_ndtr(-z)) / math.sqrt(2 * math.pi)
        gradient = ((weight * (ran - level[..., None])).sum(-1) / std + hazard.sum(-1)) / std
        step = gradient * std**2 / (weight.sum() + (hazard * (hazard - z)).sum(-1))
        level = level + step
        if np.abs(step).max() < 1e-12:
            break
    return level


def _scan(loss: Callable[[Any], Any], low: float, high: float, precision: float = 1e-11) -> float:
    """The minimum over [low, high] of a loss that takes arrays: the best of a grid, refined between its neighbours."""
    grid = np.linspace(low, high, 60)
    best = int(np.argmin(loss(grid)))
    bounds = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 59)])
    found: Any = optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": precision})
    return float(min((found.x, grid[best]), key=loss))


def _polish(runs: _Runs, log_b_crit: float) -> float:
    """Gauss-Newton on the squared residuals: the scan knows the place of a minimum only to the root of rounding."""
    for _ in range(5):
        r = runs.residuals(log_b_crit, _best_level(runs, log_b_crit, 1.0))
        slope = special.expit(log_b_crit - runs.log_batch)
        slope = slope - np.average(slope, weights=runs.weight)
        steepness = float((runs.weight * slope**2).sum())
        step = float((runs.weight * slope * r).sum()) / steepness if steepness > 1e-12 else 0.0
        if abs(step) > 1e-3:
            break
        log_b_crit += step
    return log_b_crit


def _maximise(runs: _Runs) -> tuple[float, float, float]:
    """Maximum likelihood: (log B_crit, level at the pivot, standard deviation)."""
    ran = runs.pick(~runs.stopped)

    def squares(log_b_crit: Any) -> Any:
        return (ran.weight * ran.residuals(log_b_crit, _best_level(ran, log_b_crit, 1.0)) ** 2).sum(-1)

    log_b_crit = _polish(ran, _scan(squares, *runs.reach))
    std = math.sqrt(float(squares(log_b_crit)) / len(ran.cell))
    level = float(_best_level(ran, log_b_crit, 1.0))
    level += float(_at_pivot(log_b_crit, runs.pivot) - _at_pivot(log_b_crit, ran.pivot))
    overruns = runs.residuals(log_b_crit, level)[runs.stopped]
    if not overruns.size or (std < _NOISE_FREE and (overruns <= _NOISE_FREE).all()):
        return log_b_crit, level, std
    start = np.array([log_b_crit, level, math.log(max(std, 1e-3))])
    found = optimize.minimize(
        lambda theta: runs.loss(theta[0], theta[1], math.exp(theta[2])),
        start,
        method="L-BFGS-B",
        bounds=[runs.reach, (None, None), (math.log(1e-6), math.log(10.0))],
        options={"ftol": 1e-13, "gtol": 1e-8},
    )
    return float(found.x[0]), float(found.x[1]), math.exp(float(found.x[2]))


def _values(log_b_crit: float, level: float, runs: _Runs) -> dict[Target, float | None]:
    """The fitted numbers; None where the runs cannot tell B_crit from 0 or from infinity."""
    log_min_steps = level - _at_pivot(log_b_crit, runs.pivot)
    values: dict[Target, float | None] = {
        "b_crit": math.exp(log_b_crit),
        "min_steps": math.exp(log_min_steps),
        "min_units": math.exp(log_min_steps + log_b_crit),
    }
    here = float((runs.residuals(log_b_crit, level)[~runs.stopped] ** 2).sum())
    for edge, lost in zip(runs.reach, ("min_units", "min_steps"), strict=True):
        same_level = log_min_steps if lost == "min_units" else log_min_steps + log_b_crit - edge
        there = runs.residuals(edge, same_level + _at_pivot(edge, runs.pivot))[~runs.stopped]
        if float((there**2).sum()) <= here * (1 + 1e-6) + 1e-20:
            values["b_crit"] = values[lost] = None
    return values


def _with_searches(runs: _Runs, points: Sequence[FrontierPoint], curves: Sequence[Curve | None]) -> _Runs:
    """Add what each search tells of its chosen learning rate as one weighted residual a batch size."""
    rows = [
        (math.log(point.batch), *level_at(curve, point.lr), cell)
        for cell, (point, curve) in enumerate(zip(points, curves, strict=True))
        if curve is not None and len(point.steps) > len(point.bounds)
    ]
    rows = [row for row in rows if row[2] > 0]
    if not rows:
        return runs
    log_batch, level, weight, cell = (np.array(column) for column in zip(*rows, strict=True))
    return _Runs(
        log_batch=np.append(runs.log_batch, log_batch),
        log_steps=np.append(runs.log_steps, level),
        stopped=np.append(runs.stopped, np.zeros(len(rows), dtype=bool)),
        cell=np.append(runs.cell, cell.astype(int)),
        weight=np.append(runs.weight, weight),
    )


def _spread(
    runs: _Runs, curves: Sequence[Curve | None], log_b_crit: float, level: float, std: float
) -> tuple[float, float, float]:
    """Pooled residual std; the std to judge the fit by; and Student's t for it."""
    ran = ~runs.stopped
    df = max(int(ran.sum()) - 2, 1)
    variance = std**2 * ran.sum() / df
    residuals = runs.residuals(log_b_crit, level)
    whole = [runs.cell == c for c in np.unique(runs.cell[ran]) if not runs.stopped[runs.cell == c].any()]
    weights = [runs.weight[c] for c in whole]
    means = [float(np.average(residuals[c], weights=runs.weight[c])) for c in whole]
    within_df = sum(len(w) - 1 for w in weights)
    runs_per_cell = float(np.mean([w.sum() for w in weights])) if weights else 1.0
    squares = sum(float((w * (residuals[c] - m) ** 2).sum()) for c, w, m in zip(whole, weights, means, strict=True))
    within = squares / within_df if within_df else variance
    rng = np.random.default_rng(_SEED)
    again = choose_again([curve for curve in curves if curve is not None], math.sqrt(variance), _NUM_CHOICES, rng)
    choice = runs_per_cell * float(again.var()) if again.size else 0.0
    pooled = variance + choice * min(within_df / df, 1.0)
    between_df = len(whole) - 2
    if within_df and between_df >= 1:
        between = sum(float(w.sum()) * m**2 for w, m in zip(weights, means, strict=True)) / between_df
        if between > float(stats.f.isf(_MISFIT_LEVEL, between_df, within_df)) * (within + choice):
            return math.sqrt(variance), math.sqrt(between), _student(between_df)
    return math.sqrt(variance), math.sqrt(pooled), _student(df)


def _student(df: int) -> float:
    return float(stats.t.isf((1 - CONFIDENCE) / 2, df))


def _intervals(runs: _Runs, values: dict[Target, float | None], std: float, cut: float) -> dict[Target, Interval]:
    """Where the profile likelihood at this standard deviation falls by cut**2 / 2."""
    low, high = runs.reach

    def along(log_b_crit: Any) -> Any:
        return runs.loss(log_b_crit, _best_level(runs, log_b_crit, std), std)

    top = _scan(along, low, high)
    limit = along(top) + 0.5 * cut**2

    def profile(target: Target) -> Callable[[float], float]:
        if target == "b_crit":
            return lambda x: along(x) - limit
        sign = 0.0 if target == "min_steps" else 1.0

        def fixed(x: float) -> float:
            def loss(z: Any) -> Any:
                return runs.loss(z, x - sign * z + _at_pivot(z, runs.pivot), std)

            return loss(_scan(loss, low, high, 1e-4)) - limit

        return fixed

    ends: dict[Target, Interval] = {}
    open_low, open_high = along(low) <= limit, along(high) <= limit
    log_min_steps = _best_level(runs, top, std) - _at_pivot(top, runs.pivot)
    starts = {"b_crit": top, "min_steps": log_min_steps, "min_units": log_min_steps + top}
    for target, start in starts.items():
        is_open = {
            "b_crit": (open_low, open_high),
            "min_steps": (open_high, False),
            "min_units": (open_low, False),
        }[target]
        down, up = (
            None if opened else _cross(profile(target), start, direction)
            for opened, direction in zip(is_open, (-1.0, 1.0), strict=True)
        )
        ends[target] = Interval(
            value=values[target],
            low=None if down is None else math.exp(down),
            high=None if up is None else math.exp(up),
        )
    return ends


def _cross(excess: Callable[[float], float], start: float, direction: float) -> float | None:
    """The first place beyond `start` where the profile rises above its limit; None if it never does."""
    inner, step = start, 0.05
    if excess(start) >= 0:
        return start  # so little noise that rounding decides
    while step < 4 * _REACH:
        outer = start + direction * step
        if excess(outer) > 0:
            return float(optimize.brentq(excess, inner, outer, xtol=1e-6))  # type: ignore[arg-type]
        inner, step = outer, step * 1.7
    return None


def _judge(b_crit: Interval, smallest: int, largest: int) -> tuple[Interval, str]:
    """Open the ends that rest on extrapolation, and say why the interval is not closed."""
    value, low, high = b_crit.value, b_crit.low, b_crit.high
    if value is not None and value > largest:
        high = None
    if value is not None and value < smallest:
        low = None
    if high is None and low is None:
        return Interval(value=value), f"the runs do not bound B_crit on either side of batches {smallest} to {largest}."
    if high is None:
        return Interval(value=value, low=low), (
            f"every batch tried is below B_crit or too few are above it (largest {largest}): only a lower bound. "
            "More data or goals that need more steps make room for larger batches."
        )
    if low is None:
        return Interval(value=value, high=high), (
            f"every batch tried is above B_crit or too few are below it (smallest {smallest}): only an upper bound. "
            "Easier goals have a smaller B_crit; a reference batch of 1 or 2 is the end of this road."
        )
    return Interval(value=value, low=low, high=high), ""
