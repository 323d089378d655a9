"""Experiment: how does conditioning part B_simple, B_noise and the B_crit of a sweep? SGD on quadratics, exactly.

L = (1/2) sum h theta^2 with h spread evenly in logarithm from 1/condition to 1, noise sigma ~ h^power in the same
directions: power 1 is aligned with H, 0 is alike in all directions, -1 is against it. Only the noise's variance along
H's eigenvectors enters the expected loss, so that a rotated Sigma counts by that diagonal. Nothing is simulated:

    m = E[theta^2],   m <- (1 - lr h)^2 m + lr^2 sigma / B

is solved in closed form, and the fewest whole steps to a goal are searched over constant learning rates at each batch.
All three scales are proportional to the noise's level; it is set so that B_noise is 1 at the start.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

Array = NDArray[np.float64]

DIM = 16
CONDITIONS = (1.0, 10.0, 100.0, 1e3, 1e4)
NOISES = {"aligned": 1.0, "isotropic": 0.0, "against": -1.0}
GOALS = (0.3, 0.03)
"""Losses to be reached, from 1 at the start, where every direction has the same share of it."""
FRACTIONS = 2.0 ** np.arange(-3, 4)
"""Batches of the sweep, as multiples of a first guess at B_crit."""
MIN_STEPS, MAX_STEPS = 3, 1e9
"""A step cannot be cut: batches that need fewer are left out of the fit."""


def problem(condition: float, power: float, dim: int = DIM) -> tuple[Array, Array, Array]:
    """(h, sigma, m at the start), shape (dim,) each."""
    spectrum = np.geomspace(1 / condition, 1.0, dim)
    start = 2 / (dim * spectrum)
    noise = spectrum**power
    return spectrum, noise * float(spectrum**3 @ start) / float(spectrum @ noise), start


def expected_loss(
    spectrum: Array, noise: Array, start: Array, batch: float, lrs: Array, steps: Array
) -> Array:  # (num_lrs, num_steps)
    """E[L] after `steps` steps at each rate; both of shape (n,) or, for steps, (num_lrs, n)."""
    shrink = (1 - lrs[:, None] * spectrum) ** 2
    settled = lrs[:, None] ** 2 * noise / batch / (1 - shrink)
    with np.errstate(divide="ignore"):
        left = np.exp(np.log(shrink)[:, None, :] * np.broadcast_to(steps, (len(lrs), steps.shape[-1]))[:, :, None])
    return 0.5 * (settled[:, None, :] + left * (start - settled[:, None, :])) @ spectrum


def fewest_steps(
    spectrum: Array, noise: Array, start: Array, goal: float, batch: float, *, levels: int = 3
) -> tuple[float, float]:
    """(steps, lr): the fewest whole steps to E[L] <= goal over constant learning rates; infinity if none gets there."""
    low, high = np.log(1e-8), np.log(1.999 / spectrum.max())
    best, best_lr = np.inf, np.nan
    grid = np.unique(np.round(np.geomspace(1, MAX_STEPS, 600)))
    for _ in range(levels):
        lrs = np.exp(np.linspace(low, high, 121))
        there = expected_loss(spectrum, noise, start, batch, lrs, grid) <= goal
        found = there.any(axis=1)
        if not found.any():
            return np.inf, np.nan
        lrs, first = lrs[found], there[found].argmax(axis=1)
        # Between the last grid point above the goal and the first below it the loss falls: bisect.
        above, below = np.where(first == 0, 0.0, grid[np.maximum(first - 1, 0)]), grid[first]
        while ((below - above) > 1).any():
            middle = np.floor((above + below) / 2)
            reached = expected_loss(spectrum, noise, start, batch, lrs, middle[:, None])[:, 0] <= goal
            below, above = np.where(reached, middle, below), np.where(reached, above, middle)
        if below.min() < best:
            best = float(below.min())
        # A plateau of rates takes equally few steps: its middle.
        best_lr = float(np.exp(np.log(lrs[below == below.min()]).mean()))
        spacing = (high - low) / 120
        low, high = np.log(best_lr) - 4 * spacing, min(np.log(best_lr) + 4 * spacing, np.log(1.999 / spectrum.max()))
    return best, best_lr


def scales_along(
    spectrum: Array, noise: Array, start: Array, batch: float, lr: float, steps: float
) -> dict[str, float]:
    """B_simple and B_noise over a run: ratios of the moments' means over its steps, and means of the steps' ratios."""
    shrink = (1 - lr * spectrum) ** 2
    settled = lr**2 * noise / batch / (1 - shrink)
    mean = settled + (start - settled) * (1 - shrink**steps) / (1 - shrink) / steps
    traces = {"b_simple": (noise.sum(), spectrum**2), "b_noise": (spectrum @ noise, spectrum**3)}
    sampled = np.linspace(0, steps - 1, int(min(steps, 4000)))
    along = settled + shrink ** sampled[:, None] * (start - settled)
    result = {}
    for name, (trace, weight) in traces.items():
        result[name] = float(trace / (weight @ mean))
        result[f"{name}_mean_of_ratios"] = float((trace / (along @ weight)).mean())
        result[f"{name}_start"] = float(trace / (weight @ start))
    return result


def hyperbola(batches: Array, steps: Array) -> tuple[float, float, float]:
    """(B_crit, S_min, std of log S about it): S = S_min (1 + B_crit/B) in log space (McCandlish et al. 2018, A.3)."""

    def residuals(logs: Array) -> Array:
        return logs[0] + np.log1p(np.exp(logs[1]) / batches) - np.log(steps)

    fit = optimize.least_squares(residuals, [np.log(steps.min()), np.log(np.median(batches))], xtol=1e-12, ftol=1e-12)
    min_steps, b_crit = np.exp(fit.x)
    return float(b_crit), float(min_steps), float(np.sqrt(2 * fit.cost / (len(batches) - 2)))


def sweep(condition: float, power: float, goal: float, dim: int = DIM) -> dict[str, Any]:
    """One row: the swept B_crit, and both noise scales of the tuned run at the batch nearest to it."""
    parts = problem(condition, power, dim)
    centre, b_crit = 4.0, 0.0
    for _ in range(8):  # the batches go where B_crit is
        batches = centre * FRACTIONS
        steps, lrs = np.array([fewest_steps(*parts, goal, batch) for batch in batches]).T
        usable = np.isfinite(steps) & (steps >= MIN_STEPS)
        if usable.sum() < 4:
            centre /= 4
            continue
        batches, steps, lrs = batches[usable], steps[usable], lrs[usable]
        b_crit, min_steps, residual = hyperbola(batches, steps)
        if abs(np.log(b_crit / centre)) < 0.2:
            break
        centre *= min(max(b_crit / centre, 1 / 8), 8)
    nearest = int(np.abs(np.log(batches / b_crit)).argmin())
    scales = scales_along(*parts, batches[nearest], lrs[nearest], steps[nearest])
    points = zip(batches.tolist(), steps.tolist(), lrs.tolist(), strict=True)
    return {
        "condition": condition, "goal": goal, "b_crit": b_crit, "min_steps": min_steps, "residual_std": residual,
        **scales, "b_noise_over_b_crit": scales["b_noise"] / b_crit,
        "b_simple_over_b_crit": scales["b_simple"] / b_crit,
        "points": [{"batch": batch, "steps": count, "lr": lr} for batch, count, lr in points],
    }  # fmt: skip


if __name__ == "__main__":
    from _result import record_result

    started = time.perf_counter()
    rows = []
    for noise, power in NOISES.items():
        for goal in GOALS:
            for condition in CONDITIONS:
                row = {"noise": noise, **sweep(condition, power, goal)}
                rows.append(row)
                print(f"{noise:9s} goal {goal:<5g} condition {condition:<7g} "
                      f"B_crit {row['b_crit']:9.3g} B_noise {row['b_noise']:9.3g} B_simple {row['b_simple']:9.3g} "
                      f"ratios {row['b_noise_over_b_crit']:7.3g} {row['b_simple_over_b_crit']:7.3g} "
                      f"S_min {row['min_steps']:9.3g} std {row['residual_std']:.3f}", flush=True)  # fmt: skip
    record_result("conditioning_quadratic", {"schema_version": 1, "seed": 0, "dim": DIM, "rows": rows}, started=started)
