"""Which learning rate is tried next, and which one is chosen, for one batch size and one goal?

Pure arithmetic: outcomes in, learning rates out. The planner calls `next_lrs` once a round, runs what it
returns (each as far as `stop_bound`), and repeats until it is empty; then `best_lr` names the learning rate of
the fresh seeds. One run per learning rate is noisy, so the choice is not the luckiest run but the minimum of a
parabola through the runs around it: at 10 % noise that halves what a wrong choice adds to the front's scatter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from largebatch.errors import ConfigError

SEARCH_FACTOR = math.sqrt(2.0)
"""Neighbouring learning rates of a search are this far apart."""
MAX_EXTENSIONS = 8
"""How often the range may grow on each side: a start that is 16 times off is still found."""
STOP_SLACK = 1.5
"""A run is stopped at this many times the fewest steps of earlier rounds: by then noise of 10 % cannot let it win."""
_CURVATURE = 1.0
"""Expected curvature of log steps in log lr: steps ~ 1/(2x - x^2), x = lr/lr_best, is 1 + (log x)^2 near x = 1."""
_CURVATURE_WEIGHT = 0.15
"""How much that expectation counts beside one run: run noise of 0.1 over a spread of 0.7 between tasks."""
_WINDOW = 1.6
"""How many factors around the chosen rate the runs tell its level: two or three to a search, on both sides."""
CLIFF = 0.12
"""Log steps that the choice may give away to the fastest run, by the runs beside it."""
_TOLERANCE = 1.001

Search = Sequence[tuple[float, float | None, float]]
"""(lr, steps to the goal or None, steps taken) of every run of one search."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of the search came to for one goal."""

    steps: float | None
    """Steps to the goal; None if it was not reached."""
    bound: float
    """Steps taken without reaching it; inf when the run diverged."""


def next_lrs(
    tried: Mapping[float, Outcome], start: float, factor: float = SEARCH_FACTOR, max_extensions: int = MAX_EXTENSIONS
) -> list[float]:
    """Return the learning rates of the next round, ascending; empty when the search is done.

    Begins with `start` and one factor to either side, then extends while the fastest run is at an edge. While
    nothing has reached the goal it extends downwards, and upwards too where the largest rate did not diverge.
    Depends on the set of outcomes only, not on the order they came in.

    Args:
        tried: outcome per learning rate, of all earlier rounds.
        start: predicted learning rate, > 0.
        factor: spacing, > 1.
        max_extensions: how often the range may grow on each side, >= 0.

    Returns:
        At most three learning rates; a whole search takes at most 3 + 2 * max_extensions runs.

    Raises:
        ConfigError: `start`, `factor` or `max_extensions` out of range.

    Source: McCandlish 2018, A.2 (a grid around a predicted centre); extending it round by round is ours.
    """
    if not (start > 0 and math.isfinite(start)):
        raise ConfigError(f"the first learning rate must be positive and finite; got {start!r}.")
    if not (factor > 1 and math.isfinite(factor)):
        raise ConfigError(f"the search factor must be above 1; got {factor!r}. Use {SEARCH_FACTOR:.3g}.")
    if max_extensions < 0:
        raise ConfigError(f"max_extensions must be at least 0; got {max_extensions!r}.")
    if not tried:
        return [start / factor, start, start * factor]
    lowest, highest = min(tried), max(tried)
    limit = factor ** (max_extensions + 1) * _TOLERANCE
    down = [lowest / factor] if lowest / factor >= start / limit else []
    up = [highest * factor] if highest * factor <= start * limit else []
    fastest = fastest_lr(tried)
    if fastest is None:
        return down + ([] if math.isinf(tried[highest].bound) else up)
    if fastest == lowest:
        return down
    return up if fastest == highest else []


def fastest_lr(tried: Mapping[float, Outcome]) -> float | None:
    """Return the learning rate of the run with the fewest steps (the smaller one of a tie); None if none reached."""
    reached = [(outcome.steps, lr) for lr, outcome in tried.items() if outcome.steps is not None]
    return min(reached)[1] if reached else None


def best_lr(tried: Mapping[float, Outcome], factor: float = SEARCH_FACTOR) -> float | None:
    """Return the learning rate that should be fastest, or None when no run reached the goal.

    The minimum of `parabola`, rounded to a tried rate or half a factor (in log) from one so that goals can share
    runs, and never more than one factor from the fastest run. Where the runs say that this would cost more steps
    than noise explains (at a large batch the curve falls like 1/lr up to a cliff, which no parabola fits), the
    fastest run's own rate. Assumes one minimum. On a noise-free curve with one
    minimum the choice is within two factors of the best, because the fastest run is within one.

    Args:
        tried: outcome per learning rate.
        factor: spacing of the search, > 1.

    Source: ours; the shape is McCandlish 2018, (2.5): progress is eps |G|^2 minus a term in eps^2.
    """
    fastest = fastest_lr(tried)
    if fastest is None:
        return None
    vertex, _, _ = parabola(tried, factor)
    half_steps = max(-2, min(2, round(2 * (vertex - math.log(fastest)) / math.log(factor))))
    chosen = fastest * factor ** (half_steps / 2)
    return fastest if _chord(tried, fastest, chosen) > CLIFF else chosen


def _chord(tried: Mapping[float, Outcome], fastest: float, lr: float) -> float:
    """Log steps above the fastest run at `lr`, on the straight line to the next run on that side (0 without one)."""
    side = [other for other in tried if (other - fastest) * (lr - fastest) > 0 and tried[other].steps is not None]
    if not side:
        return 0.0
    other = min(side, key=lambda rate: abs(math.log(rate / fastest)))
    rise = math.log((tried[other].steps or math.inf) / (tried[fastest].steps or math.inf))
    return rise * math.log(lr / fastest) / math.log(other / fastest)


def parabola(tried: Mapping[float, Outcome], factor: float = SEARCH_FACTOR) -> tuple[float, float, float]:
    """Return (log lr of the minimum, curvature, log steps there) of the curve around the fastest run.

    Least squares of log steps on log lr over the runs within two factors of the fastest, the curvature pulled
    towards 1; a run that was stopped counts as "at least so many", one that diverged as stopped. Where the
    curve comes out flat or hollow the minimum is the fastest run and the curvature 0. At least one run has reached.
    """
    fastest = fastest_lr(tried)
    assert fastest is not None, "parabola needs a run that reached the goal"
    reach = 2 * math.log(factor) * _TOLERANCE
    near = [(math.log(lr / fastest), tried[lr]) for lr in sorted(tried) if abs(math.log(lr / fastest)) <= reach]
    best = tried[fastest].steps
    assert best is not None
    x = np.array([offset for offset, _ in near])
    reached = np.array([outcome.steps is not None for _, outcome in near])
    y = np.log([_at_least(outcome, STOP_SLACK * best) for _, outcome in near])
    design = np.column_stack([x * x, x, np.ones_like(x)])
    active, seen = reached, set[bytes]()
    while True:
        seen.add(active.tobytes())
        rows = np.vstack([design[active], [_CURVATURE_WEIGHT, 0.0, 0.0]])
        targets = np.append(y[active], _CURVATURE_WEIGHT * _CURVATURE)
        curvature, slope, level = np.linalg.lstsq(rows, targets, rcond=None)[0]
        active = reached | (y > design @ np.array([curvature, slope, level]))
        if active.tobytes() in seen:
            break
    if curvature <= 1e-6:
        return math.log(fastest), 0.0, math.log(best)
    offset = max(-reach, min(reach, -slope / (2 * curvature)))
    return math.log(fastest) + offset, float(curvature), float(level + slope * offset + curvature * offset**2)


def _at_least(outcome: Outcome, if_diverged: float) -> float:
    if outcome.steps is not None:
        return outcome.steps
    return if_diverged if math.isinf(outcome.bound) else max(outcome.bound, 1e-300)


def stop_bound(steps: Iterable[float | None], slack: float = STOP_SLACK) -> float:
    """Return the steps past which a run can no longer win, from the runs of earlier rounds (inf: no bound yet).

    >>> stop_bound([200.0, None, 100.0])
    150.0
    """
    return slack * min((s for s in steps if s is not None), default=math.inf)


@dataclass(frozen=True, slots=True)
class Curve:
    """Log steps against log lr of one finished search: level + curvature (log lr - vertex)^2."""

    tried: Mapping[float, Outcome]
    factor: float
    vertex: float
    level: float
    curvature: float

    def __call__(self, lr: float) -> float:
        """Return log steps at `lr`."""
        return self.level + self.curvature * (math.log(lr) - self.vertex) ** 2


def fit_curves(searches: Sequence[Search]) -> list[Curve | None]:
    """Return each search's curve (None where no run reached the goal); the curvature is the median over all of them.

    One search hardly shows its own curvature, and a study's batch sizes share their task.
    """
    tried = [_as_tried(search) if any(steps is not None for _, steps, _ in search) else None for search in searches]
    factors = [_spacing(search) for search in searches]
    found = [None if t is None else parabola(t, factor) for t, factor in zip(tried, factors, strict=True)]
    curvature = float(np.median([curve[1] for curve in found if curve is not None])) if any(found) else 0.0
    return [
        None if t is None or curve is None else Curve(t, factor, curve[0], curve[2], curvature)
        for t, factor, curve in zip(tried, factors, found, strict=True)
    ]


def level_at(curve: Curve, lr: float) -> tuple[float, float]:
    """Return (log steps at `lr`, its weight in runs) that a search tells by itself, from every run around `lr`.

    A straight line in log lr through the runs within 1.6 factors, the common curvature taken off first. All the
    runs enter, not the winner, so that being chosen does not flatter the level. Weight 0: too few runs to tell.
    """
    reach = _WINDOW * math.log(curve.factor)
    near = [(math.log(at / lr), o) for at, o in curve.tried.items() if abs(math.log(at / lr)) <= reach]
    best = min((o.steps for _, o in near if o.steps is not None), default=math.inf)
    rows = [
        (x, math.log(o.steps) - curve.curvature * x * x)
        for x, o in near
        if o.steps is not None and o.steps <= STOP_SLACK * best
    ]
    x = np.array([row[0] for row in rows])
    y = np.array([row[1] for row in rows])
    if len(rows) < 2 or not x.min() <= 0 <= x.max():
        return 0.0, 0.0
    design = np.column_stack([np.ones_like(x), x])
    inverse = np.linalg.inv(design.T @ design)
    return float((inverse @ design.T @ y)[0]), float(1 / inverse[0, 0])


def choose_again(curves: Sequence[Curve], noise: float, num_draws: int, rng: np.random.Generator) -> np.ndarray:
    """Return how far above its curve's minimum (in log steps) each chosen rate lies when the choices are made again.

    Every run of each search is drawn anew about its curve, runs that diverged diverge again, the range is extended
    where the fastest run falls on its edge, and `best_lr` chooses anew.

    Args:
        curves: of the batch sizes of one goal.
        noise: standard deviation of log steps between runs, >= 0.
        num_draws: number of repetitions, >= 1.
        rng: source of the draws.

    Returns:
        Array (curves, num_draws), values >= 0.
    """
    excess = np.zeros((len(curves), num_draws))
    for cell, curve in enumerate(curves):
        diverged = min((lr for lr, outcome in curve.tried.items() if math.isinf(outcome.bound)), default=math.inf)
        bounds = {lr: math.inf if o.steps is not None else o.bound for lr, o in curve.tried.items()}
        middle = math.sqrt(min(bounds)) * math.sqrt(max(bounds))

        def run(lr: float, bound: float, curve: Curve = curve, diverged: float = diverged) -> Outcome:
            steps = math.exp(curve(lr) + noise * rng.standard_normal())
            if lr >= diverged:
                return Outcome(None, math.inf)
            return Outcome(steps, steps) if steps <= bound else Outcome(None, bound)

        for draw in range(num_draws):
            again = {lr: run(lr, bound) for lr, bound in bounds.items()}
            while lrs := next_lrs(again, middle, curve.factor):
                bound = stop_bound(o.steps for o in again.values())
                again.update({lr: run(lr, bound) for lr in lrs})
            chosen = best_lr(again, curve.factor)
            excess[cell, draw] = 0.0 if chosen is None else curve(chosen) - curve.level
    return excess


def _spacing(search: Search) -> float:
    """The finest factor between neighbouring rates of a search."""
    lrs = sorted({lr for lr, _, _ in search})
    return min((b / a for a, b in pairwise(lrs)), default=SEARCH_FACTOR)


def _as_tried(search: Search) -> dict[float, Outcome]:
    """A run that ended short of the goal before the best one reached it was not stopped: it diverged."""
    best = min(steps for _, steps, _ in search if steps is not None)
    return {lr: Outcome(steps, math.inf if steps is None and taken < best else taken) for lr, steps, taken in search}
