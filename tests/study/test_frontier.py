"""Does the fit find the planted front, say how surely, and admit what the runs cannot tell?"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.errors import ConfigError
from largebatch.records.schema import FrontierPoint, Interval
from largebatch.study import frontier
from largebatch.study.frontier import fit_front


def hyperbola(min_steps, b_crit, batches, seeds=3, std=0.0, seed=0):
    """Points on S = S_min (1 + B_crit/B), (2.11), with log-normal run noise."""
    rng = np.random.default_rng(seed)
    return [
        FrontierPoint(
            batch=batch,
            lr=0.1,
            steps=tuple(
                float(min_steps * (1 + b_crit / batch) * math.exp(std * rng.standard_normal())) for _ in range(seeds)
            ),
        )
        for batch in batches
    ]


POWERS = [2**k for k in range(4, 12)]


@given(
    min_steps=st.floats(10, 1e5),
    b_crit=st.floats(20, 2000),
    goal=st.floats(1e-3, 10),
    batches=st.sets(st.integers(1, 8192), min_size=3, max_size=10).filter(lambda b: max(b) > 4 * min(b)),
)
@settings(max_examples=60, deadline=None)
def test_without_noise_the_planted_front_is_recovered_to_1e_6(min_steps, b_crit, goal, batches) -> None:
    found = fit_front(hyperbola(min_steps, b_crit, batches), goal)
    assert found.b_crit.value == pytest.approx(b_crit, rel=1e-6)
    assert found.min_steps.value == pytest.approx(min_steps, rel=1e-6)
    assert found.min_units.value == pytest.approx(min_steps * b_crit, rel=1e-6)
    assert found.goal == goal


def test_b_crit_is_minus_the_slope_of_1_over_steps_on_1_over_examples() -> None:
    # 1/S = -B_crit/E + 1/S_min, the same line as (2.11), fitted here by numpy alone.
    points = hyperbola(120.0, 300.0, POWERS)
    found = fit_front(points, 0.3)
    steps = np.array([p.steps[0] for p in points])
    slope, level = np.polyfit(1 / (steps * np.array(POWERS)), 1 / steps, 1)
    assert found.b_crit.value == pytest.approx(-slope, rel=1e-6)
    assert found.min_steps.value == pytest.approx(1 / level, rel=1e-6)


def test_the_point_estimate_is_least_squares_in_log_steps() -> None:
    points = hyperbola(120.0, 300.0, POWERS, std=0.1)
    found = fit_front(points, 0.3)
    batch = np.repeat(POWERS, 3)
    steps = np.concatenate([p.steps for p in points])

    def squares(min_steps, min_units):
        return float((np.log(steps / (min_steps + min_units / batch)) ** 2).sum())

    best = squares(found.min_steps.value, found.min_units.value)
    for nudge in (0.999, 1.001):
        assert squares(found.min_steps.value * nudge, found.min_units.value) > best
        assert squares(found.min_steps.value, found.min_units.value * nudge) > best
    assert found.residual_std == pytest.approx(math.sqrt(best / 22))


def test_without_searches_the_interval_is_students_t_of_the_linearised_fit() -> None:
    # Independent oracle: (X'X)^-1 at the fit with 22 degrees of freedom; at small noise the profile equals it.
    points = hyperbola(120.0, 250.0, POWERS, std=0.01, seed=2)
    found = fit_front(points, 0.3)
    share = 1 / (1 + np.repeat(POWERS, 3) / found.b_crit.value)
    x = np.column_stack([np.ones(24), share])
    error = found.residual_std * math.sqrt(np.linalg.inv(x.T @ x)[1, 1])
    assert math.log(found.b_crit.high / found.b_crit.low) == pytest.approx(2 * 2.0738731 * error, rel=0.01)


def test_the_interval_scales_with_noise_and_holds_the_value() -> None:
    small, large = (fit_front(hyperbola(120.0, 250.0, POWERS, std=s, seed=3), 0.3) for s in (0.02, 0.2))
    for front in (small, large):
        assert front.resolved and not front.reason
        for interval in (front.b_crit, front.min_steps, front.min_units):
            assert interval.low < interval.value < interval.high
    assert large.b_crit.high / large.b_crit.low > 4 * (small.b_crit.high / small.b_crit.low - 1)


def test_cells_that_miss_the_hyperbola_widen_the_interval() -> None:
    points = hyperbola(120.0, 250.0, POWERS, std=0.02, seed=3)
    bent = [
        FrontierPoint(batch=p.batch, lr=p.lr, steps=tuple(s * math.exp(0.2 * (-1) ** i) for s in p.steps))
        for i, p in enumerate(points)
    ]
    straight, missed = fit_front(points, 0.3).b_crit, fit_front(bent, 0.3).b_crit
    # Cells 0.2 off in log, three runs each: std 0.4 a run with t(6) instead of 0.02 with t(22), about 23 times as
    # wide; pooling the same residuals with 22 degrees of freedom would give 10 times.
    assert math.log(missed.high / missed.low) > 15 * math.log(straight.high / straight.low)


@pytest.mark.parametrize("std", [0.0, 0.05])
@pytest.mark.parametrize(("batches", "open_end"), [([1, 2, 4, 8, 16, 32], "high"), ([2**13, 2**15, 2**18], "low")])
def test_all_batches_on_one_side_give_a_one_sided_bound(batches, open_end, std) -> None:
    found = fit_front(hyperbola(120.0, 400.0, batches, std=std), 0.3)
    assert not found.resolved and "bound" in found.reason
    closed_end = "low" if open_end == "high" else "high"
    assert getattr(found.b_crit, open_end) is None
    bound = getattr(found.b_crit, closed_end)
    assert bound is not None
    assert (bound <= 400.0 * (1 + 1e-6)) if closed_end == "low" else (bound >= 400.0 * (1 - 1e-6))
    assert (found.min_steps if open_end == "high" else found.min_units).low is None


def test_a_pure_power_law_has_no_b_crit_and_does_not_invent_one() -> None:
    doubling = [FrontierPoint(batch=b, lr=0.1, steps=(6400 / b,) * 2) for b in (1, 4, 16, 64)]
    found = fit_front(doubling, 0.3)
    assert found.b_crit.value is None and found.min_steps.value is None and not found.resolved
    assert found.min_units.value == pytest.approx(6400, rel=1e-3)
    flat = [FrontierPoint(batch=b, lr=0.1, steps=(50.0, 50.0)) for b in (64, 256, 1024)]
    found = fit_front(flat, 0.3)
    assert found.b_crit.value is None and found.min_units.value is None and not found.resolved
    assert found.min_steps.value == pytest.approx(50, rel=1e-3)


def test_fewer_than_three_batch_sizes_are_refused() -> None:
    points = hyperbola(120.0, 250.0, [16, 64], std=0.1)
    stopped = FrontierPoint(batch=256, lr=0.1, steps=(), bounds=(900.0, 900.0))
    found = fit_front([*points, stopped], 0.3)
    assert not found.resolved and "2 batch sizes" in found.reason and found.b_crit == Interval(value=None)
    assert not fit_front([], 0.3).resolved
    assert fit_front(hyperbola(120.0, 250.0, [16, 64, 256], std=0.01), 0.3).b_crit.value is not None


def test_stopped_runs_pull_the_front_up_where_they_were_stopped() -> None:
    points = hyperbola(120.0, 250.0, POWERS, std=0.1, seed=4)
    first, last = points[0], points[-1]
    early = FrontierPoint(batch=first.batch, lr=0.1, steps=first.steps, bounds=(max(first.steps) * 1.3,) * 2)
    late = FrontierPoint(batch=last.batch, lr=0.1, steps=last.steps, bounds=(max(last.steps) * 1.3,) * 2)
    ignored = fit_front(points, 0.3)
    up_small = fit_front([early, *points[1:]], 0.3)
    up_large = fit_front([*points[:-1], late], 0.3)
    # More steps at small batch: larger E_min and B_crit. More steps at large batch: larger S_min, smaller B_crit.
    assert up_small.min_units.value > ignored.min_units.value * 1.02
    assert up_small.b_crit.value > ignored.b_crit.value * 1.02
    assert up_large.min_steps.value > ignored.min_steps.value * 1.02
    assert up_large.b_crit.value < ignored.b_crit.value / 1.02


def test_a_bound_far_below_the_front_says_nothing() -> None:
    points = hyperbola(120.0, 250.0, POWERS, std=0.1, seed=4)
    harmless = [FrontierPoint(batch=p.batch, lr=p.lr, steps=p.steps, bounds=(min(p.steps) / 3,)) for p in points]
    assert fit_front(harmless, 0.3).b_crit.value == pytest.approx(fit_front(points, 0.3).b_crit.value, rel=1e-4)


def test_censoring_at_the_limit_is_corrected() -> None:
    # Runs at the largest batch are cut at the true median: dropping the slow ones would bias S_min down.
    logs = {"kept": [], "dropped": []}
    for seed in range(24):
        points = hyperbola(120.0, 250.0, POWERS[::2] + POWERS[-1:], std=0.15, seed=seed, seeds=4)
        limit = 120.0 * (1 + 250.0 / POWERS[-1])
        last = points[-1]
        inside = tuple(s for s in last.steps if s <= limit)
        cut = FrontierPoint(batch=last.batch, lr=0.1, steps=inside, bounds=(limit,) * (4 - len(inside)))
        dropped = FrontierPoint(batch=last.batch, lr=0.1, steps=inside)
        for name, point in (("kept", cut), ("dropped", dropped)):
            logs[name].append(math.log(fit_front([*points[:-1], point], 0.3).b_crit.value / 250.0))
    assert abs(np.mean(logs["kept"])) < 3 * np.std(logs["kept"]) / math.sqrt(24)
    assert np.mean(logs["dropped"]) > np.mean(logs["kept"]) + 0.01


def test_the_order_of_points_and_a_rerun_change_nothing() -> None:
    points = hyperbola(120.0, 250.0, POWERS, std=0.1)
    first = fit_front(points, 0.3)
    assert fit_front(points[::-1], 0.3) == first == fit_front(points, 0.3)


def test_the_ratio_combines_both_intervals_on_the_log_scale() -> None:
    noise, crit = Interval(value=200.0, low=100.0, high=400.0), Interval(value=100.0, low=50.0, high=300.0)
    ratio = frontier.ratio_interval(noise, crit)
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low == pytest.approx(2 * math.exp(-math.hypot(math.log(2), math.log(3))))
    assert ratio.high == pytest.approx(2 * math.exp(math.hypot(math.log(2), math.log(2))))
    half_open = frontier.ratio_interval(Interval(value=200.0, low=100.0), Interval(value=100.0, low=50.0))
    assert half_open.low is None and half_open.high is None
    assert frontier.ratio_interval(Interval(value=None), crit) == Interval(value=None)
    found = fit_front(hyperbola(120.0, 250.0, POWERS, std=0.1), 0.3, b_simple=noise)
    assert found.b_simple_over_b_crit.value == pytest.approx(200.0 / found.b_crit.value)


@given(b_crit=st.floats(0, 1e6), reference=st.integers(1, 4096), extra=st.floats(0.01, 1))
@settings(deadline=None)
def test_the_largest_worthwhile_batch_costs_exactly_the_extra_units(b_crit, reference, extra) -> None:
    batch = frontier.largest_worthwhile_batch(b_crit, reference, extra)
    baseline = frontier.units_at(1.0, b_crit, reference)
    assert frontier.units_at(1.0, b_crit, batch) == pytest.approx((1 + extra) * baseline)
    rounded = frontier.round_down_batch(batch, reference)
    assert reference <= rounded <= batch * (1 + 1e-9) < 2 * rounded * (1 + 1e-9)
    assert (rounded // reference).bit_count() == 1


def test_steps_and_units_lie_on_the_papers_table() -> None:
    # B/B_crit = 1/4, 1/2, 1, 2, 4: S/S_min = 5, 3, 2, 1.5, 1.25 and E/E_min = 1.25, 1.5, 2, 3, 5 (2.11).
    for ratio, steps, units in ((0.25, 5, 1.25), (0.5, 3, 1.5), (1, 2, 2), (2, 1.5, 3), (4, 1.25, 5)):
        assert frontier.steps_at(10.0, 1000.0, 100 * ratio) == pytest.approx(10 * steps)
        assert frontier.units_at(10.0, 1000.0, 100 * ratio) == pytest.approx(1000 * units)


def test_bad_input_is_one_clear_sentence() -> None:
    with pytest.raises(ConfigError, match="positive and finite"):
        fit_front([FrontierPoint(batch=8, lr=0.1, steps=(0.0,))], 0.3)
    with pytest.raises(ConfigError, match="reference_batch"):
        frontier.largest_worthwhile_batch(100.0, 0)
