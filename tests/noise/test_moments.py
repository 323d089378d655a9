"""Are the moments of a step unbiased, whatever the microbatches and however they are weighted?"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from largebatch.errors import ConfigError
from largebatch.noise.estimate import noise_scale
from largebatch.noise.moments import solve_moments, solve_per_example, solve_two_sizes
from oracles import noise_moments as oracle

# Two-point distributions keep the enumeration of every draw small; nothing about them is symmetric.
PAIR = np.array([[1.0, 0.5, -2.0], [-0.5, 2.0, 1.0]])
FIVE = np.array([[1.0, 0.5], [-0.5, 2.0], [3.0, -1.0], [0.0, 0.25], [-2.0, 1.0]])
EXACT = 1e-12  # expectations are enumerated, so only float64 rounding is left


def pair_of(moments):
    return moments.trace_cov, moments.grad_sq_norm


def test_linear_regression_gives_its_closed_form():
    # |G|^2 = |delta|^2, tr(Sigma) = (d + 1)|delta|^2 + d sigma^2.
    delta, sigma = np.array([0.6, -0.8, 0.3]), 0.5
    parts = oracle.linear_regression_gradients(delta, sigma, (20_000, 4, 3), seed=0).mean(axis=2)
    small = (parts**2).sum(axis=-1).mean(axis=1)
    step = (parts.mean(axis=1) ** 2).sum(axis=-1)
    for estimates, truth in zip(
        solve_two_sizes(small, 3, step, 12), oracle.linear_regression(delta, sigma), strict=True
    ):
        standard_error = estimates.std() / len(estimates) ** 0.5
        assert abs(estimates.mean() - truth) < 4 * standard_error
        assert standard_error < 0.02 * truth  # so that a wrong factor could not hide


def test_gradients_one_and_three_average_to_their_moments_and_not_their_ratios():
    # B_small = 1 (one of the two draws), B_big = 2; true tr(Sigma) = 1, |G|^2 = 4.
    draws = list(oracle.outcomes(np.array([[1.0], [3.0]]), (1, 1), (0.5, 0.5), replacement=True))
    moments = np.array([pair_of(solve_moments(norms, (1, 1), step, weights=(1, 0))) for norms, step in draws])
    assert moments.mean(axis=0) == pytest.approx([1.0, 4.0], abs=EXACT)
    assert (moments[:, 0] / moments[:, 1]).mean() == pytest.approx(-19 / 7, abs=EXACT)
    assert noise_scale(*np.tile(moments, (50, 1)).T).b_simple == pytest.approx(1 / 4, abs=EXACT)


def test_orthogonal_gradients_are_noise_alone():
    assert pair_of(solve_moments([9.0] * 4, [1] * 4, 9.0 / 4)) == pytest.approx((9.0, 0.0), abs=EXACT)


def test_identical_gradients_have_no_noise():
    assert pair_of(solve_moments([9.0] * 4, [2, 2, 2, 1], 9.0)) == pytest.approx((0.0, 9.0), abs=EXACT)


def test_per_example_trace_is_the_trace_of_torch_cov():
    gradients = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    norms, mean = gradients.square().sum(dim=1).tolist(), gradients.mean(dim=0)
    moments = solve_per_example(norms, float(mean @ mean))
    assert moments.trace_cov == pytest.approx(torch.cov(gradients.T).trace().item(), rel=EXACT)
    assert moments.num_microbatches == moments.batch == 7


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1, 1)])
def test_without_replacement_dataset_size_gives_the_empirical_gradient(sizes):
    # Footnote 6 of McCandlish et al. 2018, exact: var = (1/B - 1/D) D/(D - 1) Sigma.
    coefficients = [size / sum(sizes) for size in sizes]
    trace, signal = oracle.finite_population(FIVE)

    def estimate(dataset_size):
        draws = oracle.outcomes(FIVE, sizes, coefficients, replacement=False)
        return oracle.expectation(
            draws, lambda norms, step: pair_of(solve_moments(norms, sizes, step, dataset_size=dataset_size))
        )

    assert estimate(5) == pytest.approx([trace, signal], rel=EXACT)
    assert estimate(None) == pytest.approx([trace, signal - trace / 5], rel=EXACT)


@pytest.mark.parametrize("coefficients", [(1.0, 1.0), (3.0, 1.0)])
def test_without_replacement_is_corrected_for_any_coefficients(coefficients):
    draws = oracle.outcomes(FIVE, (3, 1), coefficients, replacement=False)
    mean = oracle.expectation(
        draws,
        lambda norms, step: pair_of(solve_moments(norms, (3, 1), step, coefficients=coefficients, dataset_size=5)),
    )
    assert mean == pytest.approx(oracle.finite_population(FIVE), rel=EXACT)


def test_ignoring_the_data_set_size_reads_a_noise_scale_seven_times_too_large():
    trace, signal, size = 1248.0, 1.0, 1437
    small, step = (signal + trace * (1 / units - 1 / size) for units in (8, 64))
    wrong = solve_two_sizes(small, 8, step, 64)
    right = solve_two_sizes(small, 8, step, 64, dataset_size=size)
    assert wrong[0] / wrong[1] == pytest.approx(1 / (1 / 1248 - 1 / 1437), rel=1e-9)
    assert wrong[0] / wrong[1] > 9_400
    assert right == pytest.approx((trace, signal), rel=1e-9)


def test_uneven_microbatches_are_unbiased_where_equal_weights_are_not():
    sizes = (3, 3, 3, 1)
    truth = oracle.population(PAIR)
    coefficients = [size / 10 for size in sizes]
    draws = list(oracle.outcomes(PAIR, sizes, coefficients, replacement=True))
    assert oracle.expectation(
        iter(draws), lambda norms, step: pair_of(solve_moments(norms, sizes, step))
    ) == pytest.approx(truth, rel=EXACT)

    def equal_weights(norms, step):
        trace = 10 * (np.mean(norms) - step) / 3
        return trace, step - trace / 10

    # E mean_i |g_i|^2 = |G|^2 + tr(Sigma) (1/3 + 1/3 + 1/3 + 1)/4, so the shortcut reads 4/3 of the trace.
    shortcut = oracle.expectation(iter(draws), equal_weights)
    assert shortcut[0] == pytest.approx(truth[0] * 4 / 3, rel=EXACT)


def test_a_small_last_microbatch_does_not_move_a_noise_scale_of_37():
    sizes = (32, 32, 32, 4)
    norms, step = [1 + 37 / size for size in sizes], 1 + 37 / 100
    moments = solve_moments(norms, sizes, step)
    assert moments.trace_cov / moments.grad_sq_norm == pytest.approx(37, rel=1e-9)
    trace, signal = solve_two_sizes(float(np.mean(norms)), 25, step, 100)
    assert trace / signal > 200  # equal weights


@pytest.mark.parametrize("split", [(1,) * 8, (2,) * 4, (4,) * 2])
def test_splits_of_a_step_agree_in_expectation(split):
    coefficients = [size / 8 for size in split]
    draws = oracle.outcomes(PAIR, split, coefficients, replacement=True)
    mean = oracle.expectation(draws, lambda norms, step: pair_of(solve_moments(norms, split, step)))
    assert mean == pytest.approx(oracle.population(PAIR), rel=EXACT)


SIZES = st.lists(st.integers(1, 64), min_size=2, max_size=6)


@given(SIZES, st.data())
def test_expected_norms_give_back_the_moments_for_any_sizes_coefficients_and_weights(sizes, data):
    share = st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes))
    a, q, b = np.array(data.draw(share)), np.array(data.draw(share)), np.array(sizes)
    # Two nearly equal effective sizes magnify rounding; a factor 1.05 apart keeps it below 1e-9.
    small, step = q.sum() / (q / b).sum(), a.sum() ** 2 / (a**2 / b).sum()
    if max(small, step) < 1.05 * min(small, step):
        return
    trace, signal = 5.0, 2.0
    moments = solve_moments(
        signal + trace / b, sizes, signal * a.sum() ** 2 + trace * (a**2 / b).sum(), coefficients=a, weights=q
    )
    assert pair_of(moments) == pytest.approx((trace, signal), rel=1e-9)


@given(SIZES, st.floats(1e-3, 1e3), st.integers(0, 2**32 - 1))
def test_scaling_the_loss_leaves_the_noise_scale_unchanged(sizes, factor, seed):
    means = np.random.default_rng(seed).standard_normal((len(sizes), 3))
    weights = np.array(sizes) / sum(sizes)
    norms, step = (means**2).sum(axis=1), float(((weights @ means) ** 2).sum())
    plain, scaled = solve_moments(norms, sizes, step), solve_moments(factor**2 * norms, sizes, factor**2 * step)
    assert scaled.trace_cov == pytest.approx(factor**2 * plain.trace_cov, rel=1e-9)
    # |G|^2 is a difference of the norms: rounding is relative to those.
    assert scaled.grad_sq_norm == pytest.approx(factor**2 * plain.grad_sq_norm, abs=1e-9 * factor**2 * norms.max())


@given(SIZES, st.integers(0, 2**32 - 1))
def test_weighted_spread_about_the_mean_is_the_solution(sizes, seed):
    means = np.random.default_rng(seed).standard_normal((len(sizes), 3))
    weights = np.array(sizes) / sum(sizes)
    moments = solve_moments((means**2).sum(axis=1), sizes, float(((weights @ means) ** 2).sum()))
    assert pair_of(moments) == pytest.approx(oracle.of_microbatches(means, sizes), rel=1e-9, abs=1e-9)


def test_raw_norms_give_the_moments_back():
    moments = solve_moments([1.0, 4.0, 2.0], [3, 1, 2], 6.0, coefficients=[1.0, 1.0, 1.0], dataset_size=50)
    again = solve_two_sizes(moments.sq_norm_small, moments.units_small, moments.sq_norm_step, moments.units_step, 50)
    assert again == pair_of(moments)
    plain = solve_moments([1.0, 4.0, 2.0], [3, 1, 2], 6.0)
    assert (plain.units_small, plain.units_step) == pytest.approx((6 / 3, 6))


def test_negative_estimates_are_kept():
    assert solve_moments([9.0] * 2, [1] * 2, 1.0).grad_sq_norm == -7.0
    assert solve_moments([1.0] * 2, [1] * 2, 4.0).trace_cov == -6.0


def test_one_size_is_not_enough():
    message = (
        "noise scale needs two batch sizes; got microbatch=64 and batch=64. "
        "Use accumulation >= 2, world_size >= 2, or per_example=True."
    )
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        solve_moments([1.0], [64], 1.0)
    with pytest.raises(ConfigError, match="two batch sizes"):
        solve_per_example([1.0], 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": [4]}, "2 norms and 1 sizes"),
        ({"units": [4, 0]}, "at least 1 unit"),
        ({"dataset_size": 7}, "batch of 8 .* dataset_size=7"),
        ({"coefficients": [1.0]}, "as many coefficients"),
        ({"coefficients": [1.0, -1.0]}, "sum to 0"),
        ({"weights": [0.0, 0.0]}, "sum to 0"),
    ],
)
def test_unusable_input_is_named(change, message):
    values = {"sq_norms": [1.0, 2.0], "units": [4, 4], "sq_norm_step": 1.0} | change
    with pytest.raises(ConfigError, match=message):
        solve_moments(values.pop("sq_norms"), values.pop("units"), values.pop("sq_norm_step"), **values)
