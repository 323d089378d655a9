"""Does a line search find B_noise, and does it say so where the form does not hold?"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from largebatch.errors import ConfigError
from largebatch.noise.curvature.line_search import _chi_square_tail, fit_line_search, measure_line_search

SPECTRUM, NOISE, THETA = np.array([2.0, 0.5, 0.1]), np.array([3.0, 20.0, 8.0]), np.array([1.0, -2.0, 3.0])
GRADIENT = SPECTRUM * THETA
CURVED = float(SPECTRUM @ GRADIENT**2)
B_NOISE = float(SPECTRUM @ NOISE) / CURVED
LR_MAX = float(GRADIENT @ GRADIENT) / CURVED
DECREASE_MAX = float(GRADIENT @ GRADIENT) ** 2 / CURVED / 2
BATCHES = [2, 4, 8, 16, 32]
LRS = [LR_MAX * factor for factor in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)]


def exact_draws(batch, dataset_size=None):
    """Gradients whose mean is G and whose covariance is Sigma (1/B - 1/D), exactly: G +- along each axis."""
    spread = np.sqrt(3 * NOISE * (1 / batch - (1 / dataset_size if dataset_size else 0)))
    return np.tile(np.concatenate([GRADIENT + np.diag(spread), GRADIENT - np.diag(spread)]), (4, 1))


def normal_draws(batch, num_draws, rng):
    return GRADIENT + rng.standard_normal((num_draws, 3)) * np.sqrt(NOISE / batch)


def decreases_of(draws, lrs=LRS):
    """Decreases of (1/2) theta'H theta, shape (num_draws, num_lrs)."""
    after = THETA - np.array(lrs)[:, None] * draws[:, None, :]
    return 0.5 * (THETA**2 @ SPECTRUM) - 0.5 * after**2 @ SPECTRUM


@pytest.mark.parametrize("dataset_size", [None, 50])
def test_on_a_quadratic_it_is_the_closed_form(dataset_size):
    # McCandlish et al. 2018, eq. 2.6 and 2.7; footnote 6 for draws without replacement.
    table = np.stack([decreases_of(exact_draws(batch, dataset_size)) for batch in BATCHES])
    search = fit_line_search(table, batches=BATCHES, lrs=LRS, dataset_size=dataset_size)
    # The search for B_noise is right to 1e-7.
    assert search.b_noise == pytest.approx(B_NOISE, rel=1e-6)
    assert search.loss_decrease_max == pytest.approx(DECREASE_MAX, rel=1e-6)
    assert search.lr_max == pytest.approx(LR_MAX, rel=1e-6)
    assert search.form_p_value == pytest.approx(1.0, abs=1e-6)
    for point in search.points:
        share = 1 / (1 + B_NOISE * (1 / point.batch - (1 / dataset_size if dataset_size else 0)))
        assert point.best_lr == pytest.approx(LR_MAX * share, rel=1e-9)
        assert point.loss_decrease == pytest.approx(DECREASE_MAX * share, rel=1e-9)
        assert point.fitted == pytest.approx(DECREASE_MAX * share, rel=1e-6)


def test_the_form_is_tested_by_chi_square_with_two_numbers_fitted():
    rng = np.random.default_rng(3)
    table = np.stack([decreases_of(normal_draws(batch, 24, rng)) for batch in BATCHES])
    search = fit_line_search(table, batches=BATCHES, lrs=LRS)
    excess = sum(((p.loss_decrease - p.fitted) / p.standard_error) ** 2 for p in search.points)
    assert search.form_p_value == pytest.approx(stats.chi2.sf(excess, 3), rel=1e-6)


def test_the_best_length_is_common_to_all_draws():
    # Choosing the length for each draw after seeing it finds more, and less noise than there is.
    table = np.stack([decreases_of(exact_draws(batch)) for batch in BATCHES])
    hindsight = table.max(axis=2).mean(axis=1)
    points = fit_line_search(table, batches=BATCHES, lrs=LRS).points
    assert all(later > point.loss_decrease for later, point in zip(hindsight[:2], points, strict=False))


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_scaling_loss_or_length_leaves_b_noise_unchanged(loss_factor, length_factor):
    table = np.stack([decreases_of(exact_draws(batch)) for batch in BATCHES])
    lrs = [length_factor * lr for lr in LRS]
    search = fit_line_search(loss_factor * table, batches=BATCHES, lrs=lrs, num_resamples=20)
    assert search.b_noise == pytest.approx(B_NOISE, rel=1e-6)
    assert search.loss_decrease_max == pytest.approx(loss_factor * DECREASE_MAX, rel=1e-6)
    assert search.lr_max == pytest.approx(length_factor * LR_MAX, rel=1e-6)


@pytest.mark.parametrize("num_draws", [24, 32])
def test_the_interval_covers_the_truth_and_the_form_is_not_rejected(num_draws):
    covered, rejected, resolved = 0, 0, 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        table = np.stack([decreases_of(normal_draws(batch, num_draws, rng)) for batch in BATCHES])
        search = fit_line_search(table, batches=BATCHES, lrs=LRS, num_resamples=200)
        resolved += search.resolved
        low, high = search.interval
        covered += (low is None or low <= B_NOISE) and (high is None or high >= B_NOISE)
        rejected += search.form_p_value < 0.05
    assert resolved >= 98
    # Binomial 95 % of 100: 0.90 to 0.99.
    assert covered >= 90
    # 9 of 100 are expected with 24 draws; 95 % of such hundreds reject at most 14.
    assert rejected <= 14


def test_a_form_that_does_not_hold_is_rejected():
    # Progress that goes with the square root of the batch is no dL_max / (1 + B_noise/B).
    rng = np.random.default_rng(0)
    heights = np.sqrt(np.array([1, 4, 16, 64, 256, 1024]))
    shape = 1 - (np.array(LRS) / LR_MAX - 0.5) ** 2
    table = heights[:, None, None] * shape * (1 + 0.05 * rng.standard_normal((6, 32, 1)))
    assert fit_line_search(table, batches=[1, 4, 16, 64, 256, 1024], lrs=LRS).form_p_value < 1e-6


def test_what_is_not_resolved_says_why():
    table = np.stack([decreases_of(exact_draws(batch)) for batch in BATCHES])
    short = fit_line_search(table[:, :, :3], batches=BATCHES, lrs=LRS[:3])
    assert not short.resolved and short.b_noise is None
    assert "the longest step, 0.149548, is the best: search longer ones" in short.reason
    risen = fit_line_search(table - 100, batches=BATCHES, lrs=LRS)
    assert "at batch 2 no step lowers the loss" in risen.reason and "unresolved" in str(risen)
    rng = np.random.default_rng(0)
    loud = np.stack([decreases_of(normal_draws(batch, 24, rng)) for batch in (4000, 8000, 16000)])
    wide = fit_line_search(loud, batches=[4000, 8000, 16000], lrs=LRS)
    assert not wide.resolved and "do not bound B_noise" in wide.reason


def test_a_step_that_blows_up_is_no_progress():
    table = np.stack([decreases_of(exact_draws(batch)) for batch in BATCHES])
    table[:, 0, -1] = -np.inf
    search = fit_line_search(table, batches=BATCHES, lrs=LRS)
    assert search.b_noise == pytest.approx(B_NOISE, rel=1e-6)
    for point in search.points:
        assert point.best_lr == pytest.approx(LR_MAX / (1 + B_NOISE / point.batch), rel=1e-9)


def test_chi_square_tail_agrees_with_scipy():
    for freedom in (1, 2, 3, 4, 7, 10):
        for value in (0.0, 0.1, 1.0, 3.84, 20.0):
            assert _chi_square_tail(value, freedom) == pytest.approx(stats.chi2.sf(value, freedom), rel=1e-10)


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(THETA))
        self.register_buffer("calls", torch.zeros(()))


def quadratic(model, batch):
    """Sum of (1/2) theta'H theta + theta.x: units whose gradients are H theta + x."""
    model.calls += 1
    return len(batch) * 0.5 * (torch.tensor(SPECTRUM) @ model.theta**2) + (batch @ model.theta).sum()


def test_measured_on_a_model_it_is_what_the_quadratic_gives_and_nothing_is_changed():
    rng = np.random.default_rng(5)
    drawn = []

    def draw(batch):
        x = rng.standard_normal((batch, 3)) * NOISE**0.5
        drawn.append(GRADIENT + x.mean(axis=0))
        return torch.tensor(x).split(5)

    model = Point()
    model.theta.grad = torch.ones(3, dtype=torch.float64)
    torch.manual_seed(0)
    random = torch.get_rng_state()
    table = measure_line_search(
        model, quadratic, draw, [torch.zeros(2, 3, dtype=torch.float64)] * 2, batches=BATCHES, lrs=LRS, num_draws=6
    )
    expected = decreases_of(np.stack(drawn)).reshape(5, 6, len(LRS))
    assert table == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert torch.equal(model.theta.detach(), torch.tensor(THETA)) and model.calls == 0
    assert torch.equal(model.theta.grad, torch.ones(3, dtype=torch.float64))
    assert torch.equal(torch.get_rng_state(), random)


def test_an_error_on_the_way_leaves_the_weights():
    calls = SimpleNamespace(num=0)

    def loss(model, batch):
        calls.num += 1
        if calls.num == 4:
            raise ValueError("stop")
        return quadratic(model, batch)

    model = Point()
    x = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="stop"):
        measure_line_search(model, loss, lambda units: [x], [x], batches=[2, 4, 8], lrs=LRS)
    assert torch.equal(model.theta.detach(), torch.tensor(THETA))


def test_dropout_is_the_same_before_and_after_a_step_and_differs_between_draws():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1, bias=False))
    x = torch.ones(4, 8)
    table = measure_line_search(
        model, lambda m, b: m(b).sum(), lambda units: [x[:1].expand(units, 8)], [x], batches=[1, 2, 4], lrs=[1e-3, 2e-3]
    )
    # The loss is linear: with the same masks on the evaluation examples twice the length is twice the decrease.
    assert table[..., 1] == pytest.approx(2 * table[..., 0], rel=1e-2, abs=1e-4)
    assert len(np.unique(table[0, :, 0].round(5))) > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": [2, 4]}, r"give 3 different batches; got \[2, 4\]"),
        ({"batches": [2, 4, 4]}, "give 3 different batches"),
        ({"batches": [0, 4, 8]}, "batch is a whole number of at least 1; got 0"),
        ({"lrs": [0.1, 0.1]}, "rising"),
        ({"lrs": [0.1]}, "at least 2 step lengths"),
        ({"lrs": [0.1, math.inf]}, "finite"),
        ({"num_draws": 0}, "num_draws is a whole number of at least 1; got 0"),
        ({"evaluation": []}, "evaluation is empty"),
        ({"draw": lambda units: [torch.zeros(3, 3, dtype=torch.float64)]}, r"draw\(2\) gave .* 3 units"),
    ],
)
def test_unusable_input_is_named(change, message):
    values = {
        "draw": lambda units: [torch.zeros(units, 3, dtype=torch.float64)], "batches": [2, 4, 8], "lrs": LRS,
        "evaluation": [torch.zeros(2, 3, dtype=torch.float64)], "num_draws": 2,
    } | change  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        measure_line_search(Point(), quadratic, values.pop("draw"), values.pop("evaluation"), **values)


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (np.zeros((3, 4)), {}, r"shape .* got \(3, 4\)"),
        (np.zeros((3, 24, 3)), {}, r"shape .* got \(3, 24, 3\)"),
        (np.zeros((3, 23, 2)), {}, "at least 24 draws at each batch size; got 23"),
        (np.full((3, 24, 2), np.nan), {}, "not a number"),
        (np.zeros((3, 24, 2)), {"dataset_size": 7}, "batch of 8 .* dataset_size=7"),
        (np.zeros((3, 24, 2)), {"num_resamples": 0}, "num_resamples"),
    ],
)
def test_unusable_decreases_are_named(table, options, message):
    with pytest.raises(ConfigError, match=message):
        fit_line_search(table, batches=[2, 4, 8], lrs=[0.1, 0.2], **options)
