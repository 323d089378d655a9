"""Is the noise scale a ratio of means, and does its interval hold what it says?"""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from largebatch.errors import CheckpointError, ConfigError
from largebatch.noise.estimate import RunningNoiseScale, _t_quantile, noise_scale, windows
from largebatch.noise.moments import solve_two_sizes
from largebatch.units import Duration
from oracles import noise_interval as oracle
from oracles import noise_moments


def draws(num_steps, *, trace=8.0, grad=1.0, spread=1.0, seed=0):
    """Independent normal moments, correlated with each other."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal(num_steps)
    return (
        trace + spread * (shared + rng.standard_normal(num_steps)),
        grad - spread * (0.5 * shared + rng.standard_normal(num_steps)),
    )


def replay(trace, grad, batch=None, **options):
    running = RunningNoiseScale(**options)
    for index, (t, g) in enumerate(zip(trace, grad, strict=True)):
        running.update(trace_cov=t, grad_sq_norm=g, batch=1 if batch is None else batch[index])
    return running


def test_the_ratio_is_of_means_and_single_steps_may_be_negative():
    trace, grad = draws(2_000, spread=3.0)
    scale = noise_scale(trace, grad)
    assert (grad < 0).any()
    assert scale.b_simple == pytest.approx(trace.mean() / grad.mean(), rel=1e-12)
    assert (scale.trace_cov, scale.grad_sq_norm) == pytest.approx((trace.mean(), grad.mean()), rel=1e-12)
    assert abs((trace / grad).mean() / scale.b_simple - 1) > 0.2


@pytest.mark.parametrize("half_life", [None, 10, 200])
def test_the_interval_is_fiellers_on_successive_differences(half_life):
    trace, grad = draws(300, spread=0.5)
    ages = np.arange(300)[::-1]
    weights = np.ones(300) if half_life is None else 0.5 ** (ages / half_life)
    mean_trace, mean_grad, covariance, freedom = oracle.weighted(trace, grad, weights)
    scale = noise_scale(trace, grad, half_life=half_life)
    expected = oracle.fieller(mean_trace, mean_grad, covariance, stats.t.ppf(0.975, freedom))
    # The t quantile is within 2e-4 of scipy's.
    assert scale.interval == pytest.approx(expected, rel=5e-4)
    assert scale.b_simple == pytest.approx(mean_trace / mean_grad, rel=1e-10)


def test_t_quantile_agrees_with_scipy():
    for freedom in (5, 5.3, 8, 30, 1e3, 1e6):
        assert _t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-4)


def test_drift_is_not_taken_for_noise():
    num_steps = 400
    trace, grad = draws(num_steps, spread=0.2)
    ramp = np.linspace(-0.9, 0.9, num_steps)
    still, drifting = noise_scale(trace, grad + 2), noise_scale(trace + 5 * ramp, grad + 2 + ramp)
    widths = [scale.interval[1] - scale.interval[0] for scale in (still, drifting)]
    assert widths[1] == pytest.approx(widths[0], rel=0.02)
    about_the_mean = oracle.fieller_of_independent_steps(trace + 5 * ramp, grad + 2 + ramp)
    assert about_the_mean[1] - about_the_mean[0] > 1.5 * widths[0]


def test_noise_that_changes_along_the_run_is_weighted_where_it_is():
    # An exponential average that sits on the quiet end must not carry the loud beginning's variance.
    rng = np.random.default_rng(1)
    loudness = np.repeat([5.0, 0.1], 500)
    trace, grad = 8 + loudness * rng.standard_normal(1_000), 2 + 0.2 * loudness * rng.standard_normal(1_000)
    scale = noise_scale(trace, grad, half_life=20)
    quiet = noise_scale(trace[500:], grad[500:], half_life=20)
    assert scale.interval == pytest.approx(quiet.interval, rel=0.05)


@given(
    st.integers(1, 40),
    st.sampled_from([None, 1, 7.5, Duration(3, "steps"), Duration(100, "tokens")]),
    st.integers(0, 2**32 - 1),
)
def test_step_by_step_equals_all_at_once(num_steps, half_life, seed):
    trace, grad = draws(num_steps, seed=seed)
    batch = np.random.default_rng(seed).integers(1, 200, num_steps).tolist()
    online = replay(trace, grad, batch, half_life=half_life, unit="tokens").estimate()
    offline = noise_scale(trace, grad, half_life=half_life, batch=batch, unit="tokens")
    assert (online.resolved, online.num_steps, online.unit) == (offline.resolved, offline.num_steps, "tokens")
    for mine, other in zip(
        (online.trace_cov, online.grad_sq_norm, *online.interval),
        (offline.trace_cov, offline.grad_sq_norm, *offline.interval),
        strict=True,
    ):
        # Ends of an interval that barely is bounded magnify rounding.
        assert (mine is None and other is None) or mine == pytest.approx(other, rel=1e-6, abs=1e-9)


def test_an_exponential_average_is_debiased():
    assert noise_scale([8.0] * 3, [2.0] * 3, half_life=1_000).trace_cov == pytest.approx(8.0, rel=1e-12)


def test_a_half_life_in_units_forgets_by_units():
    trace, grad = draws(50)
    by_units = noise_scale(trace, grad, half_life=Duration(640, "examples"), batch=64)
    assert by_units.trace_cov == pytest.approx(noise_scale(trace, grad, half_life=10).trace_cov, rel=1e-12)


@given(st.floats(1e-3, 1e3), st.integers(0, 2**32 - 1))
def test_scaling_the_loss_leaves_noise_scale_unchanged(factor, seed):
    trace, grad = draws(30, spread=0.5, seed=seed)
    plain, scaled = noise_scale(trace, grad), noise_scale(factor**2 * trace, factor**2 * grad)
    assert scaled.resolved == plain.resolved
    for mine, other in zip((scaled.b_simple, *scaled.interval), (plain.b_simple, *plain.interval), strict=True):
        assert (mine is None and other is None) or mine == pytest.approx(other, rel=1e-6)


def test_low_signal_is_resolved_as_often_and_as_sharply_as_independent_steps_allow():
    # d = 8, |delta| = 0.1, sigma = 1: true B_simple = 809; 100 seeds of 8,000 steps of 4 microbatches of 4.
    delta, num_steps = np.array([0.1, 0, 0, 0, 0, 0, 0, 0]), 8_000
    trace_cov, signal = noise_moments.linear_regression(delta, 1.0)
    truth = trace_cov / signal
    assert truth == pytest.approx(809)
    resolved, covered, estimates, widths, plain_widths = 0, 0, [], [], []
    for seed in range(100):
        parts = noise_moments.linear_regression_gradients(delta, 1.0, (num_steps, 4, 4), seed).mean(axis=2)
        small = np.einsum("skd,skd->s", parts, parts) / 4
        mean = parts.mean(axis=1)
        trace, grad = solve_two_sizes(small, 4, np.einsum("sd,sd->s", mean, mean), 16)
        scale = noise_scale(trace, grad)
        plain = oracle.fieller_of_independent_steps(trace, grad)
        if plain is not None:
            plain_widths.append(plain[1] - plain[0])
        if scale.resolved:
            low, high = scale.interval
            resolved += 1
            covered += low <= truth <= high
            estimates.append(scale.b_simple)
            widths.append(high - low)
    assert resolved >= 80
    assert 0.90 <= covered / resolved <= 0.99
    assert np.median(widths) <= 1.3 * np.median(plain_widths)
    assert np.median(estimates) == pytest.approx(truth, rel=0.10)


def test_a_signal_that_is_not_told_from_zero_is_unresolved_with_a_raw_ratio():
    trace, grad = draws(100, grad=0.02)
    scale = noise_scale(trace, grad + 0.02 - grad.mean())
    assert not scale.resolved
    assert scale.b_simple == pytest.approx(trace.mean() / 0.02)
    low, high = scale.interval
    assert 0 < low < scale.b_simple
    assert high is None
    assert "not told from 0" in scale.reason
    assert f"{scale.steps_to_resolve:,} more steps" in scale.reason
    # The lower end is the ratio that is just not rejected.
    mean_trace, mean_grad, covariance, freedom = oracle.weighted(trace, grad + 0.02 - grad.mean(), np.ones(100))
    direction = np.array([1, -low])
    deviation = abs(mean_trace - low * mean_grad) / math.sqrt(direction @ covariance @ direction)
    assert deviation == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-3)


def test_a_mean_below_zero_has_no_ratio_at_all():
    trace, grad = draws(100)
    scale = noise_scale(trace, grad - grad.mean() - 0.05)
    assert scale.b_simple is None
    assert not scale.resolved
    assert scale.steps_to_resolve > 0
    assert "at least about" in scale.reason


@pytest.mark.parametrize("half_life", [None, 5_000])
def test_the_steps_it_asks_for_are_those_it_needs(half_life):
    # A pattern with its mean and differences fixed: more of the same resolves just when it said so.
    trace, grad = np.tile([9.0, 7.0], 50), np.tile([1.1, -0.9], 50)
    asked = noise_scale(trace, grad, half_life=half_life).steps_to_resolve
    enough = math.ceil(1.1 * (100 + asked))
    few = math.floor(0.9 * (100 + asked))
    assert noise_scale(np.resize(trace, enough), np.resize(grad, enough), half_life=half_life).resolved
    assert not noise_scale(np.resize(trace, few), np.resize(grad, few), half_life=half_life).resolved


def test_a_half_life_that_can_never_resolve_says_so():
    trace, grad = np.tile([9.0, 7.0], 500), np.tile([1.1, -0.9], 500)
    scale = noise_scale(trace, grad, half_life=60)
    assert scale.steps_to_resolve is None
    half_life = int(scale.reason.split("about ")[1].split(" ")[0].replace(",", ""))
    long = 20 * half_life
    assert noise_scale(np.resize(trace, long), np.resize(grad, long), half_life=1.1 * half_life).resolved
    assert not noise_scale(np.resize(trace, long), np.resize(grad, long), half_life=0.85 * half_life).resolved


@pytest.mark.parametrize("num_steps", [0, 1, 7])
def test_few_steps_are_not_an_estimate(num_steps):
    scale = noise_scale(*draws(num_steps, spread=0.1))
    assert not scale.resolved
    assert scale.interval == (None, None)
    assert scale.num_steps == num_steps
    assert (scale.trace_cov is None) == (num_steps == 0)
    assert "at least 8 steps" in str(scale)


@pytest.mark.parametrize(("trace", "grad", "cause"), [(-8.0, 1.0, "not independent"), (8.0, -1.0, "dataset_size")])
def test_a_moment_far_below_zero_names_its_cause(trace, grad, cause):
    scale = noise_scale(*draws(200, trace=trace, grad=grad, spread=0.1))
    assert not scale.resolved
    assert scale.steps_to_resolve is None
    assert cause in scale.reason


def test_no_noise_at_all_is_a_measurement():
    scale = noise_scale([0.0] * 20, [2.0] * 20)
    assert scale.resolved
    assert (scale.b_simple, *scale.interval) == (0, 0, 0)


def test_windows_cover_every_step_and_know_nothing_of_each_other():
    trace, grad = draws(107, spread=0.2)
    found = windows(trace, grad, size=25)
    assert [(window.first, window.last) for window in found] == [(0, 24), (25, 49), (50, 74), (75, 106)]
    alone = noise_scale(trace[25:50], grad[25:50])
    assert found[1].noise_scale == alone
    assert windows([], [], size=3) == ()
    assert len(windows(trace[:5], grad[:5], size=25)) == 1


def test_it_prints_as_one_line():
    resolved = noise_scale(*draws(500, spread=0.2), unit="tokens")
    assert "\n" not in str(resolved)
    assert str(resolved).startswith("B_simple = ")
    assert "tokens (95 % interval" in str(resolved)
    assert str(noise_scale(*draws(100, grad=0.0))).startswith("B_simple unresolved after 100 steps")


@pytest.mark.parametrize("half_life", [None, 20, Duration(900, "examples")])
def test_resuming_is_exact_and_the_state_is_plain(half_life):
    trace, grad = draws(60)
    batch = [32 + index for index in range(60)]
    whole = replay(trace, grad, batch, half_life=half_life)
    file = io.BytesIO()
    torch.save(replay(trace[:25], grad[:25], batch[:25], half_life=half_life).state_dict(), file)
    file.seek(0)
    resumed = RunningNoiseScale(half_life=half_life)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for index in range(25, 60):
        resumed.update(trace_cov=trace[index], grad_sq_norm=grad[index], batch=batch[index])
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.estimate() == whole.estimate()


def test_a_state_of_another_half_life_is_refused():
    with pytest.raises(CheckpointError, match="half_life"):
        RunningNoiseScale(half_life=5).load_state_dict(RunningNoiseScale().state_dict())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: noise_scale([1.0, math.nan], [1.0, 1.0]), "step 1"),
        (lambda: noise_scale([1.0], [1.0, 1.0]), "shapes"),
        (lambda: noise_scale([1.0], [1.0], half_life=0), "half_life"),
        (lambda: noise_scale([1.0], [1.0], half_life=Duration(3, "epochs")), "half_life"),
        (lambda: noise_scale([1.0], [1.0], half_life=Duration(3, "examples")), "needs the batch"),
        (lambda: noise_scale([1.0], [1.0], batch=[1, 2]), "2 for 1 steps"),
        (lambda: noise_scale([1.0], [1.0], unit="pages"), "pages"),
        (lambda: windows([1.0], [1.0], size=0), "size=0"),
    ],
)
def test_unusable_input_is_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
