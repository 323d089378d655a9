"""Does the interval of B_crit cover the planted one, over sweeps run by the study's own protocol?"""

import math

import numpy as np
import pytest

from largebatch.records.schema import FrontierPoint
from largebatch.study import choose
from largebatch.study.frontier import fit_front
from oracles.front_protocol import simulate_sweep


def sweep(seed, **settings):
    return simulate_sweep(seed, choose.next_lrs, choose.best_lr, choose.stop_bound, choose.Outcome, **settings)


def points_of(swept, with_search=True):
    return [
        FrontierPoint(batch=batch, lr=lr, steps=steps, bounds=bounds, search=search if with_search else ())
        for batch, lr, steps, bounds, search in swept.cells
        if lr is not None
    ]


def study(seeds, **settings):
    """Coverage of B_crit, high/low of every sweep, log errors, and how many sweeps had stopped seeds."""
    inside, widths, errors, stopped = 0, [], [], 0
    for seed in seeds:
        swept = sweep(seed, **settings)
        found = fit_front(points_of(swept), 0.3).b_crit
        inside += (found.low is None or found.low <= swept.b_crit) and (
            found.high is None or swept.b_crit <= found.high
        )
        widths.append(found.high / found.low if found.low and found.high else math.inf)
        errors.append(math.log(found.value / swept.b_crit))
        stopped += any(bounds for _, _, _, bounds, _ in swept.cells)
    return inside / len(widths), float(np.median(widths)), errors, stopped


def test_sixty_sweeps_cover_the_planted_b_crit() -> None:
    # At a true 95 % the chance of fewer than 52 of 60 is 1 %; the median of 60 widths is sharp to 2 %.
    coverage, width, errors, stopped = study(range(60))
    assert coverage >= 52 / 60
    assert width <= 1.32
    assert stopped >= 10
    assert abs(np.mean(errors)) < 3 * np.std(errors) / math.sqrt(60)


@pytest.mark.proofs
@pytest.mark.parametrize("first_seed", [0, 1000])
def test_two_hundred_sweeps_cover_the_planted_b_crit(first_seed) -> None:
    coverage, width, _, stopped = study(range(first_seed, first_seed + 200))
    assert 0.90 <= coverage <= 0.99
    assert width <= 1.3
    assert stopped >= 40


@pytest.mark.proofs
@pytest.mark.parametrize("settings", [{"flatness": 0.3}, {"std": 0.2}, {"num_batches": 6, "span": 8.0}])
def test_other_curves_and_noise_are_covered_too(settings) -> None:
    coverage, _, _, _ = study(range(2000, 2200), **settings)
    assert 0.90 <= coverage <= 1.0


def naive_interval(points, rng, draws=100):
    """What not to do: draw each cell's three seeds with replacement, refit, take percentiles."""
    batch = np.array([p.batch for p in points])
    grid = np.exp(np.linspace(-1, 1, 401)) * np.exp(np.log(batch).mean())
    curve = np.log1p(grid[:, None] / batch)
    logs = [np.log(p.steps) for p in points]
    found = []
    for _ in range(draws):
        means = np.array([rng.choice(cell, len(cell)).mean() for cell in logs])
        off = means - curve
        found.append(grid[np.argmin(((off - off.mean(-1, keepdims=True)) ** 2).sum(-1))])
    return np.percentile(found, [2.5, 97.5])


def test_drawing_three_seeds_again_covers_clearly_less() -> None:
    """The control: seeds alone know neither that three are few nor that the learning rate was chosen."""
    rng = np.random.default_rng(0)
    naive = 0
    for seed in range(150):
        swept = sweep(seed, censor=False)
        low, high = naive_interval(points_of(swept, with_search=False), rng)
        naive += low <= swept.b_crit <= high
    assert naive / 150 < 0.87


def test_choosing_again_widens_the_interval_where_the_choice_matters() -> None:
    # The same runs, judged as if every search had been sharp: the pooled std must grow with what is drawn anew.
    swept = [sweep(seed, censor=False) for seed in range(6)]
    for each in swept:
        curves = [curve for curve in choose.fit_curves([p.search for p in points_of(each)]) if curve is not None]
        quiet = choose.choose_again(curves, 0.02, 24, np.random.default_rng(0))
        noisy = choose.choose_again(curves, 0.2, 24, np.random.default_rng(0))
        assert quiet.min() >= 0 and noisy.std() > 1.5 * quiet.std()


def test_a_search_narrows_the_interval_and_leaves_the_value_alone() -> None:
    narrower, shifts = [], []
    for seed in range(20):
        points = points_of(sweep(seed, censor=False))
        alone = [FrontierPoint(batch=p.batch, lr=p.lr, steps=p.steps, bounds=p.bounds) for p in points]
        with_search, without = fit_front(points, 0.3).b_crit, fit_front(alone, 0.3).b_crit
        narrower.append(math.log(with_search.high / with_search.low) / math.log(without.high / without.low))
        shifts.append(math.log(with_search.value / without.value))
    assert np.median(narrower) < 0.95
    assert abs(np.mean(shifts)) < 3 * np.std(shifts) / math.sqrt(20)
