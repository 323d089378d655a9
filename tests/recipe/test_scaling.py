"""Do the learning rate and Adam's numbers follow the batch as the papers say?"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.errors import ConfigError
from largebatch.recipe.adam_rules import ADAM_RULES, half_life, malladi, scaled_adam
from largebatch.recipe.scaling import (
    MEASURED_RULES,
    RULES,
    eps_max_from,
    linear,
    noise_scale_lr,
    none,
    scaled_lr,
    sqrt,
    surge_lr,
)
from oracles.recipe_scaling import (
    adam_spread_per_unit,
    best_sgd_step,
    best_sign_step,
    horizon_in_units,
    surge_peak,
)
from oracles.recipe_sgd import large_step, small_steps

positive = st.floats(1e-6, 1e3)
batches = st.integers(1, 10**6)


@pytest.mark.parametrize(
    ("batch", "lr"),
    [(64, 0.025), (128, 0.05), (256, 0.1), (512, 0.2), (1024, 0.4), (2048, 0.8), (4096, 1.6), (8192, 3.2),
     (16384, 6.4), (32768, 12.8), (65536, 25.6)],
)  # fmt: skip
def test_linear_rule_gives_the_learning_rates_of_goyal_2017_figure_1(batch: int, lr: float):
    assert linear(0.1, 256, batch) == lr  # exact: k is a power of two


@pytest.mark.parametrize(("rule", "lr"), [("linear", 0.1 * 32), ("sqrt", 0.1 * math.sqrt(32)), ("none", 0.1)])
def test_the_rules_give_the_8k_rows_of_goyal_2017_table_2a(rule: str, lr: float):
    assert scaled_lr(rule, 0.1, 256, 8192) == pytest.approx(lr, rel=1e-15)


@pytest.mark.parametrize("k", [2, 5, 32])
def test_k_steps_at_lr_equal_one_step_at_k_lr_for_a_loss_linear_in_the_weights(k: int):
    # Goyal 2017, eq. (3), (4): the gradient does not depend on w, so the rule's condition holds exactly.
    rng = np.random.default_rng(k)
    n, slopes = 4, rng.normal(size=(4 * k, 6))
    parts = [range(n * j, n * (j + 1)) for j in range(k)]
    w = rng.normal(size=6)
    after = small_steps(w, lambda w, unit: slopes[unit], parts, lr=0.1)
    np.testing.assert_allclose(
        large_step(w, lambda w, unit: slopes[unit], parts, linear(0.1, n, k * n)), after, rtol=1e-12
    )
    for rule in (sqrt, none):  # the match holds for the linear rule only
        assert np.abs(large_step(w, lambda w, unit: slopes[unit], parts, rule(0.1, n, k * n)) - after).max() > 1e-3


def test_for_a_quadratic_the_gap_is_of_second_order_in_k_lr():
    # Goyal 2017, sec. 2.1. For h w^2 / 2 it is |(1 - lr h)^k - (1 - k lr h)| w, about k (k-1) lr^2 h^2 w / 2.
    def gradient(w: np.ndarray, unit: int) -> np.ndarray:
        return 0.7 * w

    def gap(k: int, lr: float) -> float:
        parts = [range(j, j + 1) for j in range(k)]
        w = np.ones(1)
        return abs(large_step(w, gradient, parts, linear(lr, 1, k)) - small_steps(w, gradient, parts, lr)).item()

    for k in (2, 4, 8):
        assert gap(k, 1e-4) == pytest.approx(k * (k - 1) / 2 * (1e-4 * 0.7) ** 2, rel=1e-3)
        assert gap(k, 1e-4) / gap(k, 0.5e-4) == pytest.approx(4, rel=1e-3)  # halving lr quarters it


@given(eps_max=positive, b_simple=st.floats(0, 1e6), batch=batches)
def test_eps_max_is_the_inverse_of_the_noise_scale_rule(eps_max: float, b_simple: float, batch: int):
    assert eps_max_from(noise_scale_lr(eps_max, b_simple, batch), b_simple, batch) == pytest.approx(eps_max, rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "share"), [(0.25, 0.2), (0.5, 1 / 3), (1, 0.5), (2, 2 / 3), (4, 0.8)]
)  # McCandlish 2018, eq. (2.6)
def test_noise_scale_rule_gives_the_share_of_eps_max(ratio: float, share: float):
    assert noise_scale_lr(3.0, 1000.0, int(1000 * ratio)) == pytest.approx(3.0 * share, rel=1e-12)


@pytest.mark.parametrize(("batch", "lr"), [(32, 0.0675), (96, 0.135), (128, 0.1543), (512, 0.2274), (4096, 0.2638)])
def test_noise_scale_rule_gives_the_svhn_rates_of_mccandlish_2018_d2(batch: int, lr: float):
    assert noise_scale_lr(0.27, 96, batch) == pytest.approx(lr, abs=5e-5)


def test_noise_scale_rule_is_linear_far_below_and_flat_far_above():
    assert noise_scale_lr(1.0, 1e6, 64) / noise_scale_lr(1.0, 1e6, 32) == pytest.approx(2, rel=1e-4)
    assert noise_scale_lr(1.0, 1.0, 10**6) == pytest.approx(1, rel=1e-5)
    assert noise_scale_lr(1.0, 0.0, 1) == 1.0


@pytest.mark.parametrize("batch", [1, 30, 1000])
def test_noise_scale_rule_is_the_best_step_on_a_quadratic_with_equal_curvatures(batch: int):
    # McCandlish 2018, eq. (2.5), (2.6), (2.9): with H proportional to I, B_noise is B_simple.
    rng = np.random.default_rng(batch)
    mean, spread = rng.normal(size=7), rng.normal(size=(7, 7))
    cov = 40 * spread @ spread.T
    eps_max = best_sgd_step(mean, cov, 2.5 * np.eye(7), math.inf)
    b_simple = float(np.trace(cov) / (mean @ mean))
    assert noise_scale_lr(eps_max, b_simple, batch) == pytest.approx(
        best_sgd_step(mean, cov, 2.5 * np.eye(7), batch), rel=1e-12
    )
    tuned = best_sgd_step(mean, cov, 2.5 * np.eye(7), 64)
    assert scaled_lr("noise", tuned, 64, batch, b_simple=b_simple) == pytest.approx(
        best_sgd_step(mean, cov, 2.5 * np.eye(7), batch), rel=1e-12
    )


@pytest.mark.parametrize(("ratio", "share"), [(0.1, 0.575), (0.25, 0.8), (1, 1.0), (4, 0.8), (10, 0.575)])
def test_surge_rule_rises_to_its_peak_and_falls_beyond(ratio: float, share: float):
    # Li 2024: the rate at B / B_noise, over its peak.
    assert surge_lr(3.0, 1000.0, int(1000 * ratio)) == pytest.approx(3.0 * share, abs=1e-3)


@pytest.mark.parametrize("batch", [10, 100, 1000, 10_000])
def test_surge_rule_is_the_best_step_of_sign_descent_where_gradients_are_noise(batch: int):
    # Li 2024, from the expected signs themselves. The rule takes erf(x) for 2 x / sqrt(pi); with mean / std at most
    # 2e-3 and 10,000 units that is off by x^2 / 3, under 1 %.
    rng = np.random.default_rng(3)
    mean, std = rng.uniform(2e-4, 2e-3, size=400), np.ones(400)
    hessian = np.full((400, 400), 1.0) + np.diag(rng.uniform(0.5, 1.5, size=400))
    b_noise = surge_peak(mean, std, hessian)
    assert 1e3 < b_noise < 9e3  # the batches lie on both sides
    tuned = best_sign_step(mean, std, hessian, 500)
    lr = scaled_lr("surge", tuned, 500, batch, b_crit=b_noise)
    assert lr == pytest.approx(best_sign_step(mean, std, hessian, batch), rel=0.01)


def test_surge_rule_is_the_square_root_far_below_its_peak():
    assert surge_lr(1.0, 1e9, 64) / surge_lr(1.0, 1e9, 16) == pytest.approx(2, rel=1e-6)


def test_surge_rule_peaks_at_the_critical_batch_and_at_the_noise_scale_only_without_one():
    both = scaled_lr("surge", 0.1, 64, 512, b_simple=50.0, b_crit=5000.0)
    assert both == scaled_lr("surge", 0.1, 64, 512, b_crit=5000.0)
    assert both > 0.2 > scaled_lr("surge", 0.1, 64, 512, b_simple=50.0)


@given(rule=st.sampled_from([*RULES, *MEASURED_RULES]), lr=positive, a=batches, b=batches, c=batches)
def test_going_to_a_batch_by_way_of_another_changes_nothing(rule: str, lr: float, a: int, b: int, c: int):
    measured = {"b_simple": 300.0, "b_crit": 700.0}
    there = scaled_lr(rule, scaled_lr(rule, lr, a, b, **measured), b, c, **measured)
    assert there == pytest.approx(scaled_lr(rule, lr, a, c, **measured), rel=1e-9)
    assert scaled_lr(rule, lr, a, a, **measured) == pytest.approx(lr, rel=1e-12)


betas_then_k = st.tuples(st.floats(0.5, 0.999), st.floats(0.5, 0.9999), st.floats(0.05, 1.9))


@pytest.mark.parametrize("rule", ["malladi", "marek"])
@pytest.mark.parametrize("k", [0.5, 32.0])
def test_a_second_moment_without_memory_has_none_to_keep(rule: str, k: float):
    with pytest.raises(ConfigError, match=r"beta2 of 0 remembers nothing.*adam_rule='none'"):
        scaled_adam(rule, (0.9, 0.0), 1e-8, k)
    assert scaled_adam("none", (0.9, 0.0), 1e-8, k) == ((0.9, 0.0), 1e-8)


@given(betas_then_k, st.floats(1e-12, 1e-2), st.floats(1e-3, 1e3))
def test_malladi_keeps_what_adam_does_with_each_unit_of_noise(numbers, eps: float, noise_std: float):
    # Malladi 2022: lr sqrt(k) and eps / sqrt(k) leave the spread added by each unit as it is, 1 - beta times k the
    # horizon of both averages, in units.
    beta1, beta2, k = numbers
    betas, scaled_eps = scaled_adam("malladi", (beta1, beta2), eps, k)
    before = adam_spread_per_unit(1e-3, eps, noise_std, 1000)
    assert adam_spread_per_unit(1e-3 * math.sqrt(k), scaled_eps, noise_std, 1000 * k) == pytest.approx(before, rel=1e-9)
    assert [(1 - beta) / k for beta in betas] == pytest.approx([1 - beta1, 1 - beta2], rel=1e-9)


@pytest.mark.parametrize("k", [0.25, 2.0, 8.0])
def test_malladi_looks_back_over_as_many_units_as_before(k: float):
    (beta1, beta2), eps = malladi((0.9, 0.999), 1e-8, k)
    for tuned, beta in ((0.9, beta1), (0.999, beta2)):
        assert horizon_in_units(beta, 64 * k) == pytest.approx(horizon_in_units(tuned, 64), rel=1e-9)
    assert eps == pytest.approx(1e-8 / math.sqrt(k), rel=1e-12)


@given(st.floats(0.01, 0.9999), st.integers(1, 4096), st.floats(0.01, 20))
def test_marek_keeps_the_second_moments_half_life_in_units_and_nothing_else(beta2: float, batch: int, k: float):
    # Marek 2025: after half_life units the decays of the steps multiply to one half.
    (beta1, scaled), eps = scaled_adam("marek", (0.9, beta2), 1e-8, k)
    assert (beta1, eps) == (0.9, 1e-8)
    life = half_life(beta2, batch)
    assert beta2 ** (life / batch) == pytest.approx(0.5, rel=1e-9)
    assert scaled ** (life / (batch * k)) == pytest.approx(0.5, rel=1e-9)


def test_marek_gives_batch_1_of_the_paper_its_beta2():
    # Marek 2025: beta2 = 0.95 tuned at 512 becomes 0.9999 at batch 1.
    assert scaled_adam("marek", (0.9, 0.95), 1e-8, 1 / 512)[0][1] == pytest.approx(0.9999, abs=5e-6)


@given(rule=st.sampled_from([*ADAM_RULES]), a=st.floats(0.3, 1.5), b=st.floats(0.3, 1.5))
def test_adams_numbers_go_by_way_of_another_batch_unchanged(rule: str, a: float, b: float):
    (one, two), eps = scaled_adam(rule, *scaled_adam(rule, (0.9, 0.999), 1e-8, a), b)
    (beta1, beta2), straight = scaled_adam(rule, (0.9, 0.999), 1e-8, a * b)
    assert [one, two, eps] == pytest.approx([beta1, beta2, straight], rel=1e-9)
    assert scaled_adam(rule, (0.9, 0.95), 1e-8, 1.0) == ((0.9, 0.95), 1e-8)


def test_without_a_first_moment_malladis_rule_is_rmsprops():
    assert malladi((0.0, 0.99), 1e-8, 4)[0] == (0.0, pytest.approx(0.96, rel=1e-12))


def test_an_unknown_rule_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"rule 'cubic' is not known\. Use one of: linear, sqrt, none, noise, surge;"):
        scaled_lr("cubic", 0.1, 256, 8192)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: linear(0.0, 256, 512), "reference_lr is a finite number above 0; got 0.0"),
        (lambda: sqrt(float("nan"), 256, 512), "reference_lr is a finite number above 0; got nan"),
        (lambda: none(0.1, 0, 512), "reference_batch counts the units of a step and is at least 1; got 0"),
        (lambda: linear(0.1, 256, 0), "batch counts the units of a step and is at least 1; got 0"),
        (lambda: noise_scale_lr(0.0, 10, 4), "eps_max is a finite number above 0; got 0.0"),
        (lambda: noise_scale_lr(0.1, -1, 4), "b_simple is a finite number of at least 0; got -1"),
        (lambda: noise_scale_lr(0.1, math.inf, 4), "unresolved noise scale gives no learning rate: measure for more"),
        (lambda: eps_max_from(-0.1, 10, 4), "lr is a finite number above 0; got -0.1"),
        (lambda: surge_lr(0.1, 0.0, 4), "b_noise is a finite number above 0; got 0.0"),
        (lambda: scaled_lr("noise", 0.1, 64, 128), "rule 'noise' needs a measured noise scale; got b_simple=None"),
        (lambda: scaled_lr("surge", 0.1, 64, 128), "rule 'surge' needs the batch at which the rate peaks"),
        (lambda: scaled_lr("noise", -0.1, 64, 128, b_simple=9), "reference_lr is a finite number above 0; got -0.1"),
        (
            lambda: scaled_adam("malladi", (0.9, 0.999), 1e-8, 32),
            "beta1 of 0.9 becomes 1 - 32 (1 - 0.9) = -2.2 at 32 times the reference batch, outside (0, 1). Let the "
            "batch grow less than 10-fold, or use adam_rule='marek' or 'none'.",
        ),
        (lambda: scaled_adam("malladi", (0.9, 0.95), 1e-8, 10), "beta1 of 0.9 becomes 1 - 10 (1 - 0.9) ="),
        (lambda: scaled_adam("malladi", (0.0, 0.95), 1e-8, 20), "beta2 of 0.95 becomes 1 - 20 (1 - 0.95) ="),
        (lambda: scaled_adam("marek", (0.9, 0.5), 1e-8, 2000), "beta2 of 0.5 becomes 0.5^2000 = 0 at 2000 times"),
        (lambda: scaled_adam("cubic", (0.9, 0.95), 1e-8, 2), "adam_rule 'cubic' is not known. Use one of: malladi"),
        (lambda: scaled_adam("none", (0.9, 1.0), 1e-8, 2), "betas are two numbers in [0, 1); got (0.9, 1.0)"),
        (lambda: scaled_adam("none", (0.9, 0.95), 0.0, 2), "eps is a finite number above 0; got 0.0"),
        (lambda: scaled_adam("none", (0.9, 0.95), 1e-8, 0), "k is the batch over the reference batch"),
        (lambda: half_life(1.0, 64), "a moment with a half-life has a beta in (0, 1); got 1.0"),
        (lambda: half_life(0.9, 0), "batch counts the units of a step and is at least 1; got 0"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_value(call, words: str):
    with pytest.raises(ConfigError) as error:
        call()
    assert words in str(error.value)
