"""Does one monitored run predict S_min, E_min and B_crit (McCandlish 2018, D.1)?"""

import math

import numpy as np
import pytest

from largebatch.errors import ConfigError
from largebatch.study import predict
from oracles import front_noise

GOAL = 0.5


def test_a_constant_noise_scale_gives_the_closed_form() -> None:
    trace, grad = np.full(100, 6.0), np.full(100, 0.1)  # Bn = 60; B = 20: w = 1/4
    (found,) = predict.predict_goals(trace, grad, batch=20, crossings={GOAL: 80.5})
    assert found.min_steps.value == pytest.approx(80.5 / 4)
    assert found.min_units.value == pytest.approx(60 * 80.5 / 4)
    assert found.b_crit.value == pytest.approx(60)


@pytest.mark.parametrize(("min_steps", "factor", "batch"), [(300, 5, 64), (100, 20, 64), (1000, 2, 32)])
def test_noise_that_grows_like_the_root_of_progress_is_integrated_within_one_percent(min_steps, factor, batch) -> None:
    # Exact moments: what is left is Bn changing inside a window, mostly in the first one.
    noise, crossing, true_steps, true_units = front_noise.sqrt_noise_run(min_steps, factor, batch)
    (found,) = predict.predict_goals(np.ones_like(noise), 1 / noise, batch=batch, crossings={GOAL: crossing})
    assert found.min_steps.value == pytest.approx(true_steps, rel=0.01)
    assert found.min_units.value == pytest.approx(true_units, rel=0.01)


def test_the_planted_run_is_the_one_of_the_paper() -> None:
    # (D.5), (D.7): gamma = (integral sqrt Bn)^2 / (S_min E_min) = 24/25 for Bn ~ sqrt s.
    s = (np.arange(200_000) + 0.5) / 200_000 * 300
    _, _, true_steps, true_units = front_noise.sqrt_noise_run(300, 5, 64)
    root = np.sqrt(5 * np.sqrt(s)).mean() * 300
    assert root**2 / (true_steps * true_units) == pytest.approx(24 / 25, rel=1e-4)


@pytest.mark.parametrize(
    ("num_runs", "least", "most"), [(60, 0.85, 1.0), pytest.param(400, 0.90, 0.99, marks=pytest.mark.proofs)]
)
@pytest.mark.parametrize(("dim", "microbatches"), [(50, 4), (8, 2)])
def test_planted_noise_is_recovered_without_bias_and_covered(num_runs, least, most, dim, microbatches) -> None:
    noise, crossing, true_steps, true_units = front_noise.sqrt_noise_run(200, 5, 64)
    truth = {"min_steps": true_steps, "min_units": true_units, "b_crit": true_units / true_steps}
    logs, inside = {name: [] for name in truth}, dict.fromkeys(truth, 0)
    for seed in range(num_runs):
        trace, grad = front_noise.draw_moments(noise, 64, dim, microbatches, seed)
        (found,) = predict.predict_goals(trace, grad, batch=64, crossings={GOAL: crossing})
        assert found.resolved, found.reason
        for name, true in truth.items():
            interval = getattr(found, name)
            logs[name].append(math.log(interval.value / true))
            inside[name] += interval.low <= true <= interval.high
    for name in truth:
        # Bias: below half a run's own spread, up to the error of the mean.
        assert abs(np.mean(logs[name])) < (0.3 + 3 / math.sqrt(num_runs)) * np.std(logs[name]), name
        assert least <= inside[name] / num_runs <= most, name


def test_steps_at_the_measured_batch_are_the_steps_taken() -> None:
    # w + Bn w / B = 1 at every step, noise or not.
    noise, crossing, _, _ = front_noise.sqrt_noise_run(60, 5, 64)
    trace, grad = front_noise.draw_moments(noise, 64, 8, 2, seed=1)
    (found,) = predict.predict_goals(trace, grad, batch=64, crossings={GOAL: crossing})
    assert found.min_steps.value + found.min_units.value / 64 == pytest.approx(crossing)
    assert found.b_crit.value == pytest.approx(found.min_units.value / found.min_steps.value)


def test_a_signal_lost_in_noise_leaves_the_upper_end_open() -> None:
    rng = np.random.default_rng(0)
    trace, grad = 100 + rng.standard_normal(64), 0.01 * rng.standard_normal(64)
    grad += 1e-4 - grad.mean()
    (found,) = predict.predict_goals(trace, grad, batch=64, crossings={GOAL: 60.0})
    assert not found.resolved and "S_min" in found.reason
    assert found.b_crit.high is None and found.b_crit.low is not None
    assert found.min_steps.low is None


def test_a_goal_that_was_not_reached_says_so() -> None:
    missed, reached = predict.predict_goals(np.ones(50), np.ones(50), batch=4, crossings={0.1: None, 0.5: 40.0})
    assert not missed.resolved and "did not reach" in missed.reason and missed.b_crit.value is None
    assert reached.goal == 0.5


def test_bad_input_is_one_clear_sentence() -> None:
    with pytest.raises(ConfigError, match="50 steps have moments"):
        predict.predict_goals(np.ones(50), np.ones(50), batch=4, crossings={0.1: 51.0})
    with pytest.raises(ConfigError, match="step 1"):
        predict.predict_goals([1.0, math.nan], [1.0, 1.0], batch=4, crossings={})
    with pytest.raises(ConfigError, match="two moments"):
        predict.predict_goals([1.0], [1.0, 1.0], batch=4, crossings={})


@pytest.mark.parametrize("num_steps", [0, 1, 7, 8, 9, 100, 1000])
def test_windows_cut_every_step_once(num_steps) -> None:
    windows = predict.geometric_windows(num_steps)
    assert [step for first, end in windows for step in range(first, end)] == list(range(num_steps))
    assert all(end - first >= min(8, num_steps) for first, end in windows)


def test_noise_windows_are_ratios_of_mean_moments() -> None:
    rng = np.random.default_rng(0)
    trace, grad = rng.normal(8, 1, 100), rng.normal(2, 0.2, 100)
    records = predict.noise_windows(trace, grad, np.linspace(2, 1, 100), windows=[(0, 40), (40, 100)])
    assert [(r.first_step, r.last_step) for r in records] == [(0, 39), (40, 99)]
    assert records[1].b_simple.value == pytest.approx(trace[40:].mean() / grad[40:].mean())
    assert records[1].b_simple.low < records[1].b_simple.value < records[1].b_simple.high and records[1].resolved
