"""Is B_noise unbiased, whatever the draws, and does measuring it leave the model as it was?"""

import importlib.util
import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from largebatch.errors import ConfigError
from largebatch.noise.curvature.products import CurvatureMoments, b_noise, measure_curvature, solve_curvature
from largebatch.noise.estimate import noise_scale
from largebatch.noise.monitor import NoiseScaleMonitor
from oracles import curvature as oracle

# Nothing about these units is symmetric, and each one's gradient goes with its own Hessian.
GRADIENTS = np.array([[1.0, 0.5], [-0.5, 2.0], [3.0, -1.0], [0.0, 0.25], [-2.0, 1.0]])
HESSIANS = np.array([
    [[2.0, 0.5], [0.5, 1.0]], [[-1.0, 0.0], [0.0, 3.0]], [[0.5, 1.0], [1.0, 4.0]], [[1.0, -2.0], [-2.0, 0.5]],
    [[3.0, 0.25], [0.25, -0.5]],
])  # fmt: skip
EXACT = 1e-12  # expectations are enumerated, so only float64 rounding is left


def expectation(sizes, *, dataset_size=None, replacement, units=5):
    return np.mean(
        [
            solve_curvature(
                h_aa, h_ab, h_bb, units_a=sizes[0], units_b=sizes[1], h_own=h_own, h_cc=h_cc, units_c=sizes[2],
                dataset_size=dataset_size,
            )
            for h_aa, h_ab, h_bb, h_own, h_cc in oracle.outcomes(
                GRADIENTS[:units], HESSIANS[:units], sizes, replacement=replacement
            )
        ],
        axis=0,
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 1, 1)])
def test_independent_draws_give_both_moments_without_bias(sizes):
    # McCandlish et al. 2018, eq. 2.8: the expectation over every draw of three units.
    truth = oracle.population(GRADIENTS[:3], HESSIANS[:3], divisor=3)
    assert expectation(sizes, replacement=True, units=3) == pytest.approx(truth, rel=EXACT)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 1, 3), (1, 2, 2)])
def test_without_replacement_dataset_size_gives_those_of_the_data_set(sizes):
    truth = oracle.population(GRADIENTS, HESSIANS, divisor=4)
    assert expectation(sizes, replacement=False, dataset_size=5) == pytest.approx(truth, rel=EXACT)
    assert not np.allclose(expectation(sizes, replacement=False), truth, rtol=0.1)


def test_reusing_the_hessians_examples_for_the_gradient_is_biased():
    # Why C is neither A nor B: the curvature an example sees goes with its gradient.
    draws = list(oracle.outcomes(GRADIENTS, HESSIANS, (1, 1, 1), replacement=True))
    _, curved = oracle.population(GRADIENTS, HESSIANS, divisor=5)
    assert abs(np.mean([h_own for *_, h_own, _ in draws]) - curved) > 0.1 * abs(curved)


def test_a_hessian_that_is_a_multiple_of_the_identity_gives_b_simple():
    # Eq. 2.9: H = 2 I, the gradients 1 and 3.
    trace, curved = solve_curvature(2.0, 6.0, 18.0, units_a=1, units_b=1)
    assert (trace, curved) == (2 * 2.0, 2 * 3.0)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(-10, 10), st.floats(-10, 10))
def test_expected_products_give_back_the_moments_for_any_sizes(units_a, units_b, trace, curved):
    solved = solve_curvature(
        curved + trace / units_a, curved, curved + trace / units_b, units_a=units_a, units_b=units_b
    )
    assert solved == pytest.approx((trace, curved), rel=1e-9, abs=1e-9)


# The torch side, against dense gradients and Hessians of every example.


class Small(nn.Module):
    """A curved model whose middle layer is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.middle.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).squeeze(-1)


def squared(model, batch):
    x, y = batch
    return (model(x) - y).square().sum() / 2


def small_problem(num_examples=32):
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Small().double()
    x = torch.randn(num_examples, 3, generator=generator, dtype=torch.float64)
    return model, x, torch.randn(num_examples, generator=generator, dtype=torch.float64)


def dense(model, x, y):
    """Every example's gradient (n, d) and Hessian (n, d, d) with respect to the trainable weights, flat."""
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    names, shapes = list(named), [p.shape for p in named.values()]
    flat = torch.cat([p.flatten() for p in named.values()])

    def loss_of(flat, one_x, one_y):
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        output = torch.func.functional_call(model, weights, (one_x.unsqueeze(0),))
        return (output[0] - one_y).square() / 2

    losses = [partial(loss_of, one_x=one_x, one_y=one_y) for one_x, one_y in zip(x, y, strict=True)]
    gradients = torch.stack([torch.autograd.functional.jacobian(loss, flat) for loss in losses])
    hessians = torch.stack([torch.autograd.functional.hessian(loss, flat) for loss in losses])
    return gradients.numpy(), hessians.numpy()


@pytest.mark.parametrize("dataset_size", [None, 32])
def test_a_block_is_what_dense_gradients_and_hessians_give(dataset_size):
    model, x, y = small_problem()
    edges = [(0, 5), (5, 8), (8, 12), (12, 17), (17, 20), (20, 26)]  # A: 0 and 2, B: 1 and 3, C: 4 and 5
    (block,) = measure_curvature(
        model, squared, [(x[i:j], y[i:j]) for i, j in edges], gradient_microbatches=2, hessian_microbatches=2,
        dataset_size=dataset_size,
    )  # fmt: skip
    gradients, hessians = dense(model, x, y)
    rows_a, rows_b = np.r_[0:5, 8:12], np.r_[5:8, 12:17]
    a, b = gradients[rows_a].mean(axis=0), gradients[rows_b].mean(axis=0)
    expected = np.zeros(2)
    for start, end in edges[4:]:
        hessian, c = hessians[start:end].mean(axis=0), gradients[start:end].mean(axis=0)
        solved = solve_curvature(
            a @ hessian @ a, a @ hessian @ b, b @ hessian @ b, units_a=9, units_b=8, units_c=end - start,
            h_own=(a + b) @ hessian @ c / 2, h_cc=c @ hessian @ c, dataset_size=dataset_size,
        )  # fmt: skip
        expected += (end - start) / 9 * np.array(solved)
    assert (block.trace_h_cov, block.grad_h_grad) == pytest.approx(tuple(expected), rel=1e-10)
    trace, mean = (a - b) @ (a - b) / (1 / 9 + 1 / 8), (9 * a + 8 * b) / 17
    assert block.trace_cov == pytest.approx(trace, rel=1e-10)
    assert block.grad_sq_norm == pytest.approx(
        mean @ mean - trace / 17 + (0 if dataset_size is None else trace / 32), rel=1e-10
    )
    assert (block.units_gradient, block.units_hessian) == (17, 9)


def drawn_blocks(spectrum, delta, sigma, *, num_blocks, seed, units=(16, 16, 8)):
    """Blocks of linear regression, by numpy."""
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(num_blocks):
        x = rng.standard_normal((sum(units), len(spectrum))) * spectrum**0.5
        gradients = x * (x @ delta - sigma * rng.standard_normal(sum(units)))[:, None]
        a, b, _ = np.split(gradients, np.cumsum(units)[:-1])
        a, b, curved = a.mean(axis=0), b.mean(axis=0), x[-units[2] :]
        h_a, h_b = (curved.T @ (curved @ vector) / units[2] for vector in (a, b))
        trace_h_cov, grad_h_grad = solve_curvature(a @ h_a, b @ h_a, b @ h_b, units_a=units[0], units_b=units[1])
        blocks.append(
            CurvatureMoments(
                trace_h_cov=trace_h_cov, grad_h_grad=grad_h_grad, grad_sq_norm=a @ b,
                trace_cov=(a - b) @ (a - b) / (1 / units[0] + 1 / units[1]), units_gradient=32, units_hessian=8,
            )
        )  # fmt: skip
    return blocks


SPECTRUM, DELTA = np.array([4.0, 1.0, 0.25, 0.05]), np.array([0.6, -0.8, 1.0, 2.0])


def test_linear_regression_gives_its_closed_form():
    truth = oracle.linear_regression(SPECTRUM, DELTA, 1.0)
    generator = torch.Generator().manual_seed(3)
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(DELTA))
    x = torch.randn(400 * 3, 64, 4, generator=generator) * torch.tensor(SPECTRUM).sqrt().float()
    y = torch.randn(400 * 3, 64, generator=generator)

    def loss(model, batch):
        return (model(batch[0]).squeeze(-1) - batch[1]).square().sum() / 2

    blocks = measure_curvature(model, loss, zip(x, y, strict=True), gradient_microbatches=1)
    for name, value in truth.items():
        values = np.array([getattr(block, name) for block in blocks])
        error = values.std() / len(values) ** 0.5
        assert abs(values.mean() - value) < 4 * error, name
        assert error < 0.08 * value, name  # so that a wrong factor could not hide
    scale = b_noise(blocks)
    assert scale.resolved and scale.b_simple.resolved
    assert scale.interval[0] < truth["trace_h_cov"] / truth["grad_h_grad"] < scale.interval[1]
    assert scale.lr_max_interval[0] < truth["grad_sq_norm"] / truth["grad_h_grad"] < scale.lr_max_interval[1]


def test_the_interval_covers_the_truth():
    truth = oracle.linear_regression(SPECTRUM, DELTA, 1.0)
    b, lr = truth["trace_h_cov"] / truth["grad_h_grad"], truth["grad_sq_norm"] / truth["grad_h_grad"]
    covered, covered_lr, resolved = 0, 0, 0
    for seed in range(200):
        scale = b_noise(drawn_blocks(SPECTRUM, DELTA, 1.0, num_blocks=32, seed=seed))
        if scale.resolved:
            resolved += 1
            covered += scale.interval[0] <= b <= scale.interval[1]
            covered_lr += scale.lr_max_interval[0] <= lr <= scale.lr_max_interval[1]
    assert resolved >= 195
    # Binomial 95 % of 200 is 0.92 to 0.98; the moments are skewed, not normal.
    assert covered / resolved >= 0.90 and covered_lr / resolved >= 0.90


@given(st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_scaling_the_loss_moves_the_learning_rate_and_not_b_noise(factor, seed):
    # L -> f L: gradients times f, H times f; B_noise stays, eps_max goes with 1/f, dL_max with f (eq. 2.6, 2.7).
    blocks = drawn_blocks(SPECTRUM, DELTA, 0.2, num_blocks=16, seed=seed)
    scaled = [
        CurvatureMoments(
            trace_h_cov=factor**3 * b.trace_h_cov, grad_h_grad=factor**3 * b.grad_h_grad,
            trace_cov=factor**2 * b.trace_cov, grad_sq_norm=factor**2 * b.grad_sq_norm,
            units_gradient=b.units_gradient, units_hessian=b.units_hessian,
        )
        for b in blocks
    ]  # fmt: skip
    plain, other = b_noise(blocks), b_noise(scaled)
    assert other.resolved == plain.resolved
    assert other.b_noise == pytest.approx(plain.b_noise, rel=1e-9)
    if plain.lr_max is not None:
        assert other.lr_max == pytest.approx(plain.lr_max / factor, rel=1e-9)
        assert other.loss_decrease_max == pytest.approx(factor * plain.loss_decrease_max, rel=1e-9)


def test_b_noise_is_noise_scales_ratio_and_interval():
    blocks = drawn_blocks(SPECTRUM, DELTA, 0.5, num_blocks=16, seed=0)
    scale = b_noise(blocks)
    core = noise_scale([b.trace_h_cov for b in blocks], [b.grad_h_grad for b in blocks])
    assert (scale.b_noise, scale.interval) == (core.b_simple, core.interval)


def moments(trace_h_cov, grad_h_grad, spread=0.1, num_blocks=16):
    rng = np.random.default_rng(0)
    return [
        CurvatureMoments(
            trace_h_cov=trace_h_cov + spread * rng.standard_normal(), trace_cov=4.0, grad_sq_norm=2.0,
            grad_h_grad=grad_h_grad + spread * rng.standard_normal(), units_gradient=8, units_hessian=4,
        )
        for _ in range(num_blocks)
    ]  # fmt: skip


def test_the_optimum_follows_the_batch():
    # Eq. 2.6 and 2.7: at B = B_noise half the learning rate and half the progress.
    scale = b_noise(moments(8.0, 2.0, spread=0.0))
    assert (scale.b_noise, scale.lr_max, scale.loss_decrease_max) == (4.0, 1.0, 1.0)
    assert [scale.best_lr(batch) for batch in (1, 4, 16)] == [0.2, 0.5, 0.8]
    assert scale.loss_decrease(4) == 0.5
    with pytest.raises(ConfigError, match="batch is positive; got 0"):
        scale.best_lr(0)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        (moments(8.0, -2.0), "G'HG = -.* curves downwards along the gradient"),
        (moments(-8.0, 2.0), "tr.H Sigma. = -.* curves downwards along the noise"),
        (moments(8.0, 0.02, spread=0.5), "not told from 0; about .* more blocks"),
        (moments(8.0, 2.0, num_blocks=7), "at least 8 blocks; got 7"),
        ([], "at least 8 blocks; got 0"),
    ],
)
def test_what_is_not_resolved_says_why_and_is_not_clamped(blocks, reason):
    scale = b_noise(blocks)
    assert not scale.resolved
    assert scale.lr_max is scale.loss_decrease_max is scale.best_lr(8) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(scale).startswith("B_noise unresolved")
    assert re.search(reason, scale.reason)


def test_measuring_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 1))
    model[1].eval()
    model.register_buffer("calls", torch.zeros(()))
    model[0].weight.grad = torch.ones_like(model[0].weight)

    def loss(model, x):
        model.calls += 1  # a buffer that a forward changes
        return model(x).square().sum()

    def state():
        return [
            *[value.clone() for value in model.state_dict().values()], model[0].weight.grad.clone(),
            torch.get_rng_state(), torch.tensor([module.training for module in model.modules()]),
        ]  # fmt: skip

    x = torch.randn(27, 4, 3)
    before = state()
    blocks = measure_curvature(model, loss, x, gradient_microbatches=1)
    assert all(torch.equal(old, new) for old, new in zip(before, state(), strict=True))
    assert all(parameter.grad is None for parameter in model[4].parameters())
    assert measure_curvature(model, loss, x, gradient_microbatches=1) == blocks
    torch.manual_seed(1)
    assert measure_curvature(model, loss, x, gradient_microbatches=1) != blocks  # dropout was on


def test_each_microbatch_draws_its_own_random_numbers():
    # Were the masks of A and B the same, their noise would count as signal.
    drawn = []

    def loss(model, x):
        drawn.append(torch.rand(()).item())
        return model(x).square().sum()

    measure_curvature(nn.Linear(2, 1), loss, torch.randn(18, 4, 2), gradient_microbatches=1)
    assert len(set(drawn)) == len(drawn) == 18


def test_a_monitor_beside_it_does_not_see_it():
    def losses(probe):
        torch.manual_seed(0)
        model, x = nn.Linear(3, 1), torch.randn(8, 4, 3)
        with NoiseScaleMonitor(model, microbatch=4) as monitor:
            for index, part in enumerate(x):
                (model(part).square().mean() / 8).backward()
                if probe and index == 3:
                    measure_curvature(model, lambda m, b: m(b).square().sum(), torch.ones(3, 4, 3),
                                      gradient_microbatches=1)  # fmt: skip
            return monitor.step()

    assert losses(probe=True) == losses(probe=False)


def test_a_loss_without_curvature_has_none():
    blocks = measure_curvature(nn.Linear(2, 1), lambda m, x: m(x).sum(), torch.randn(24, 4, 2), gradient_microbatches=1)
    assert [block.grad_h_grad for block in blocks] == [0.0] * 8
    assert not b_noise(blocks).resolved


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False).eval()])
def test_batch_norm_on_batch_statistics_is_refused(layer):
    with pytest.raises(ConfigError, match=r"batch norm '1' uses batch statistics, which couple"):
        measure_curvature(nn.Sequential(nn.Linear(3, 3), layer), lambda m, x: m(x).sum(), torch.randn(9, 4, 3))


def test_a_sharded_model_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[1].__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})  # what fully_shard does to a module
    with pytest.raises(ConfigError, match=r"fully_shard splits the weights .* '1'"):
        measure_curvature(model, lambda m, x: m(x).sum(), torch.randn(9, 4, 3))


def test_attention_without_a_second_derivative_is_named_with_the_way_out():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=-1))
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    x = torch.randn(24, 2, 4, 8)

    def measure():
        return measure_curvature(Attention(), lambda m, x: m(x).square().sum(), x, gradient_microbatches=1)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(ConfigError, match=r"sdpa_kernel\(SDPBackend.MATH\)"):
        measure()
    with sdpa_kernel(SDPBackend.MATH):
        assert len(measure()) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient_microbatches": 0}, "gradient_microbatches is a whole number of at least 1; got 0"),
        ({"num_blocks": 1.5}, "num_blocks is a whole number of at least 1; got 1.5"),
        ({"batches": torch.randn(2, 4, 2)}, "a block takes 3 microbatches; the batches ended after 2"),
        ({"model": nn.Linear(2, 1).requires_grad_(False)}, "no parameter that requires a gradient"),
        ({"loss": lambda m, x: m(x)}, r"one number.*shape \(4, 1\)"),
        ({"count": lambda batch: 0}, r"count\(batch\) is a whole number of at least 1; got 0"),
        ({"batches": [{"x": 1}] * 3}, "how many units a dict holds"),
        ({"dataset_size": 8}, "dataset_size=8"),
    ],
)  # fmt: skip
def test_unusable_input_is_named(change, message):
    values = {"model": nn.Linear(2, 1), "loss": lambda m, x: m(x).sum(), "batches": torch.randn(9, 4, 2),
              "gradient_microbatches": 1} | change  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        measure_curvature(values.pop("model"), values.pop("loss"), values.pop("batches"), **values)


def test_unusable_products_are_named():
    with pytest.raises(ConfigError, match="at least 1 unit; got 0"):
        solve_curvature(1.0, 1.0, 1.0, units_a=0, units_b=1)
    with pytest.raises(ConfigError, match="give h_own, h_cc and units_c"):
        solve_curvature(1.0, 1.0, 1.0, units_a=1, units_b=1, dataset_size=9)
    with pytest.raises(ConfigError, match=r"block of 3 .* dataset_size=2"):
        solve_curvature(1.0, 1.0, 1.0, units_a=1, units_b=1, units_c=1, h_own=1.0, h_cc=1.0, dataset_size=2)


# The experiment on quadratics, at a small scale: runs/conditioning_quadratic.py.


@pytest.fixture(scope="module")
def experiment(root):
    spec = importlib.util.spec_from_file_location("conditioning_quadratic", root / "runs" / "conditioning_quadratic.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("condition", "power", "batch"), [(1.0, 0.0, 2.0), (20.0, 1.0, 4.0), (20.0, -1.0, 0.5)])
def test_the_swept_steps_are_those_of_the_recursion(experiment, condition, power, batch):
    # E[theta^2] step by step, over as many rates: the closed form finds as few steps or fewer.
    spectrum, noise, start = experiment.problem(condition, power, dim=4)
    rates = np.exp(np.linspace(np.log(1e-3), np.log(1.999), 300))
    expected = oracle.steps_to_goal(spectrum, noise, start, 0.1, batch, rates, 1_000)
    steps, lr = experiment.fewest_steps(spectrum, noise, start, 0.1, batch)
    assert steps <= np.ceil(expected - 1e-9) <= steps + max(1, 0.02 * steps)
    assert oracle.steps_to_goal(spectrum, noise, start, 0.1, batch, [lr], 1_000) == pytest.approx(
        steps - 0.5, abs=0.501
    )


def test_noise_scales_along_a_run_are_those_of_its_steps(experiment):
    spectrum, noise, start = experiment.problem(50.0, 0.0, dim=5)
    second, squares, curved, ratios = start.copy(), [], [], []
    for _ in range(40):
        squares.append(spectrum**2 @ second)
        curved.append(spectrum**3 @ second)
        ratios.append(spectrum @ noise / curved[-1])
        second = (1 - 0.3 * spectrum) ** 2 * second + 0.3**2 * noise / 4
    scales = experiment.scales_along(spectrum, noise, start, 4.0, 0.3, 40)
    assert scales["b_simple"] == pytest.approx(noise.sum() / np.mean(squares), rel=1e-9)
    assert scales["b_noise"] == pytest.approx(spectrum @ noise / np.mean(curved), rel=1e-9)
    assert scales["b_noise_mean_of_ratios"] == pytest.approx(np.mean(ratios), rel=1e-9)
    assert scales["b_noise_start"] == pytest.approx(1.0, rel=1e-12)


def test_conditioning_parts_b_simple_from_b_crit_where_noise_is_against_h_and_not_b_noise_where_it_is_aligned(
    experiment,
):
    aligned, against = (experiment.sweep(1000.0, power, 0.1, dim=4) for power in (1.0, -1.0))
    assert 0.5 < aligned["b_noise_over_b_crit"] < 1.5 and 0.5 < aligned["b_simple_over_b_crit"] < 2
    assert against["b_simple_over_b_crit"] > 3 * aligned["b_simple_over_b_crit"]
