"""Is the temperature that of the quadratic model, and does its sentence say no more than its interval?"""

import numpy as np
import pytest

from largebatch.errors import ConfigError
from largebatch.noise.curvature.products import CurvatureMoments, b_noise
from largebatch.noise.curvature.temperature import Temperature, temperature
from oracles import curvature as oracle


def blocks_of(trace_h_cov, grad_h_grad, grad_sq_norm, spread=0.0, num_blocks=32):
    rng = np.random.default_rng(0)
    return [
        CurvatureMoments(
            trace_h_cov=trace_h_cov * (1 + spread * rng.standard_normal()), trace_cov=1.0,
            grad_h_grad=grad_h_grad * (1 + spread * rng.standard_normal()),
            grad_sq_norm=grad_sq_norm * (1 + spread * rng.standard_normal()), units_gradient=8, units_hessian=8,
        )
        for _ in range(num_blocks)
    ]  # fmt: skip


@pytest.mark.parametrize(("lr", "batch"), [(0.02, 4), (0.3, 4), (0.3, 100), (0.45, 1)])
def test_sgd_that_has_settled_has_temperature_2_and_its_noise_scales_are_closed_forms(lr, batch):
    # McCandlish et al. 2018, app. C, in its exact discrete form M H + H M - lr H M H = (lr/B) Sigma. As printed,
    # B_simple = (B/lr) tr(Sigma)/tr(H^2 Sigma) and its like for B_noise are wrong.
    rng = np.random.default_rng(1)
    turn = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    hessian = turn @ np.diag([4.0, 1.0, 0.3, 0.01]) @ turn.T
    root = rng.standard_normal((4, 4))
    noise = root @ root.T
    settled = oracle.stationary(hessian, noise, lr, batch)
    second = hessian @ settled @ hessian  # E[G G']
    block = CurvatureMoments(
        trace_h_cov=float(np.trace(hessian @ noise)), grad_h_grad=float(np.trace(hessian @ second)),
        trace_cov=float(np.trace(noise)), grad_sq_norm=float(np.trace(second)), units_gradient=1, units_hessian=1,
    )  # fmt: skip
    told = temperature([block] * 8, lr=lr, batch=batch)
    assert told.value == pytest.approx(2.0, rel=1e-9)
    # Momentum makes the same step from a rate (1 - m) times as large.
    assert temperature([block] * 8, lr=0.1 * lr, batch=batch, momentum=0.9).value == pytest.approx(2.0, rel=1e-9)
    if lr == 0.02:  # the limit of short steps: B_simple = (B/lr) 2 tr(Sigma)/tr(H Sigma), B_noise one H further
        curved = [np.trace(np.linalg.matrix_power(hessian, power) @ noise) for power in range(3)]
        scale = b_noise([block] * 8)
        short = 0.05  # lr h/2 of the steepest direction is 0.04
        assert scale.b_simple.b_simple == pytest.approx(batch / lr * 2 * curved[0] / curved[1], rel=short)
        assert scale.b_noise == pytest.approx(batch / lr * 2 * curved[1] / curved[2], rel=short)


@pytest.mark.parametrize(("lr", "h", "batch"), [(0.1, 2.0, 8), (0.5, 3.0, 32), (0.01, 1.0, 1)])
def test_in_one_dimension_both_noise_scales_of_settled_sgd_are_b_2_minus_lr_h_over_lr_h(lr, h, batch):
    # App. C, exact: B_simple = B_noise = B (2 - lr h)/(lr h). Lowering lr/B by k raises both by about k (C.2).
    # T stays 2.
    level = float(oracle.stationary(np.array([[h]]), np.array([[5.0]]), lr, batch)[0, 0])
    block = CurvatureMoments(
        trace_h_cov=5 * h, grad_h_grad=h**3 * level, trace_cov=5.0, grad_sq_norm=h**2 * level, units_gradient=1,
        units_hessian=1,
    )  # fmt: skip
    scale = b_noise([block] * 8)
    expected = batch * (2 - lr * h) / (lr * h)
    assert scale.b_noise == pytest.approx(expected, rel=1e-9)
    assert scale.b_simple.b_simple == pytest.approx(expected, rel=1e-9)


def test_simulated_sgd_on_a_noisy_quadratic_has_b_simple_b_2_minus_lr_h_over_lr_h():
    # The same by simulation: 4,000 chains of 400 steps with lr h = 0.2, B = 8: B_simple = 72.
    lr, h, batch, noise = 0.1, 2.0, 8, 5.0
    rng = np.random.default_rng(0)
    theta, squares = np.zeros(4_000), []
    for step in range(400):
        theta = theta - lr * (h * theta + rng.standard_normal(4_000) * (noise / batch) ** 0.5)
        if step >= 50:
            squares.append(np.mean((h * theta) ** 2))
    assert noise / np.mean(squares) == pytest.approx(batch * (2 - lr * h) / (lr * h), rel=0.02)


def test_temperature_is_lr_over_the_best_lr():
    # Eq. 2.6 and C.1.
    blocks = blocks_of(60.0, 2.0, 4.0)
    scale = b_noise(blocks)
    for batch in (1, 30, 1000):
        told = temperature(blocks, lr=0.3, batch=batch)
        assert told.best_lr == pytest.approx(scale.best_lr(batch), rel=1e-9)
        assert told.value == pytest.approx(0.3 / told.best_lr, rel=1e-9)
        assert told.noise_share == pytest.approx((30 / batch) / (1 + 30 / batch), rel=1e-9)


def test_the_interval_is_of_one_ratio_and_needs_no_resolved_curvature_along_the_gradient():
    blocks = blocks_of(60.0, 0.001, 4.0, spread=0.3)
    blocks = [
        CurvatureMoments(
            trace_h_cov=b.trace_h_cov, grad_h_grad=b.grad_h_grad + 0.01 * (-1) ** i, trace_cov=1.0,
            grad_sq_norm=b.grad_sq_norm, units_gradient=8, units_hessian=8,
        )
        for i, b in enumerate(blocks)
    ]  # fmt: skip
    assert not b_noise(blocks).resolved
    told = temperature(blocks, lr=0.3, batch=10)
    assert told.resolved and told.interval[0] < 0.3 * 6 / 4 < told.interval[1]
    assert told.best_lr_interval == pytest.approx((0.3 / told.interval[1], 0.3 / told.interval[0]))


@pytest.mark.parametrize(
    ("lr", "batch", "spread", "words"),
    [
        (0.1, 30, 0.0, "0.1 times the best single step (1); a longer step would lower the loss more"),
        (1.0, 30, 0.1, "it is not told from the best; noise and curvature limit it about alike"),
        (1.5, 30, 0.01, "longer than the best, as in ordinary training, and it still lowers the loss"),
        (2.0, 30, 0.02, "steps about hold the loss where it is"),
        (3.0, 30, 0.0, "such a step raises the loss"),
        (0.1, 3000, 0.1, "curvature limits it more than noise does, so a larger batch allows little more"),
        (0.1, 3, 0.1, "noise limits it more than curvature does, so a larger batch allows a larger learning rate"),
    ],
)
def test_the_sentence_says_what_the_interval_shows(lr, batch, spread, words):
    told = temperature(blocks_of(60.0, 2.0, 4.0, spread=spread), lr=lr, batch=batch)
    assert words in str(told)


def told_of(interval=(0.9, 1.1), share=(0.49, 0.51), noise_share=0.5):
    return Temperature(
        value=1.5, interval=interval, resolved=True, reason="", lr=1.0, momentum=0.0, batch=8, unit="examples",
        best_lr=0.7, best_lr_interval=(None, None), noise_share=noise_share, noise_share_interval=share,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("share", "words"),
    [
        ((0.49, 0.51), "noise and curvature limit it about alike"),
        ((0.36, 0.64), "noise and curvature limit it about alike"),
        ((0.34, 0.6), "whether noise or curvature limits it is not told"),
        ((0.4, 0.9), "whether noise or curvature limits it is not told"),
        ((0.05, None), "whether noise or curvature limits it is not told"),
        ((None, None), "whether noise or curvature limits it is not told"),
        ((0.51, 0.9), "noise limits it more than curvature does"),
        ((0.1, 0.49), "curvature limits it more than noise does"),
    ],
)
def test_a_cause_is_named_only_where_the_interval_of_the_share_tells_it(share, words):
    assert words in str(told_of(share=share, noise_share=None if share == (None, None) else 0.5))


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((1.1, 1.9), "longer than the best, as in ordinary training, and it still lowers the loss"),
        ((1.9, 2.1), "steps about hold the loss where it is"),
        ((1.1, None), "longer than the best; whether it still lowers the loss is not told"),
        ((1.1, 2.1), "longer than the best; whether it still lowers the loss is not told"),
        ((1.9, 5.0), "longer than the best; whether it still lowers the loss is not told"),
        ((0.9, None), "it is not told from the best"),
    ],
)
def test_steps_are_said_to_hold_the_loss_only_where_the_interval_is_near_2(interval, words):
    assert words in str(told_of(interval))


def test_with_momentum_a_long_step_is_not_said_to_raise_the_loss_of_the_run():
    told = temperature(blocks_of(60.0, 2.0, 4.0), lr=0.3, batch=30, momentum=0.9)
    assert "taken at once" in str(told) and "and momentum 0.9 is 3 times the best single step (0.1)" in str(told)


@pytest.mark.parametrize(
    ("moments", "num_blocks", "words"),
    [
        ((60.0, 2.0, 4.0), 7, "at least 8 blocks; got 7"),
        ((-60.0, 2.0, 4.0), 8, "curves downwards along the steps"),
        ((60.0, 2.0, -4.0), 8, "not told from 0"),
    ],
)
def test_what_is_not_resolved_says_why(moments, num_blocks, words):
    told = temperature(blocks_of(*moments, num_blocks=num_blocks), lr=0.1, batch=8)
    assert not told.resolved and told.best_lr is None and told.noise_share is None
    assert words in told.reason and "unresolved" in str(told)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, "lr is above 0; got 0.0"),
        ({"batch": 0}, "at least 1 unit; got 0"),
        ({"momentum": 1.0}, "below 1; got 1.0"),
        ({"unit": "apples"}, "apples"),
    ],
)
def test_unusable_input_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        temperature(blocks_of(60.0, 2.0, 4.0), **({"lr": 0.1, "batch": 8} | change))
