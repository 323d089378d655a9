"""Does the learning rate follow the batch as the papers say?"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.errors import ConfigError
from largebatch.recipe.scaling import eps_max_from, linear, noise_scale_lr, none, scaled_lr, sqrt
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


def test_an_unknown_rule_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"rule 'cubic' is not known\. Use one of: linear, sqrt, none"):
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
    ],
)
def test_a_number_out_of_range_is_named_with_its_value(call, words: str):
    with pytest.raises(ConfigError) as error:
        call()
    assert words in str(error.value)
