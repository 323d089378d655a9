"""Would our number fall into the faults that other estimators are known for?

Each test builds a case with an answer in closed form, computes what the fault would report (written out here, a line or
two each), and asks that ours is right where the fault is plainly not: a criterion that the fault passed would prove
nothing. Gradients are those of loss = w.x, so the gradient of an example is x.
"""

import numpy as np
import pytest
import torch
from torch import nn

from largebatch.errors import ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor

DIM, SIGMA, SIGNAL = 8, 1.0, 0.5
TRACE, GRAD = DIM * SIGMA**2, DIM * SIGNAL**2
MICRO, K = 4, 4


class Linear(nn.Module):
    def __init__(self, *dims):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(dim)) for dim in dims])

    def forward(self, x):
        return x @ torch.cat([*self.parts])


def draws(num_steps, seed=0):
    """Examples, shape (num_steps, K, MICRO, DIM)."""
    return SIGNAL + SIGMA * np.random.default_rng(seed).normal(size=(num_steps, K, MICRO, DIM))


def run(data, *, dims=(DIM,), clip=None, scale=lambda step: 1.0, **options):
    model = Linear(*dims)
    with NoiseScaleMonitor(model, microbatch=MICRO, every=1, **options) as monitor:
        for step, parts in enumerate(torch.tensor(data, dtype=torch.float32)):
            model.zero_grad()
            for part in parts:
                (scale(step) * model(part).mean() / K).backward()
            moments = monitor.step()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
        return monitor.noise_scale, moments


def sq(x):
    return (x**2).sum(-1)


def two_sizes(small, big, b_small, b_big):
    """(tr(Sigma), |G|^2) by McCandlish et al. 2018, eq. A.2."""
    return (small - big) / (1 / b_small - 1 / b_big), (b_big * big - b_small * small) / (b_big - b_small)


def near(found, wanted=TRACE / GRAD, rel=0.15):
    return abs(found / wanted - 1) < rel


def test_ratios_are_not_averaged():
    """gns-pytorch 0.1.5: a ratio each step, then their mean."""
    data = draws(2000) - 0.4 * SIGNAL
    small, big = sq(data.mean(2)).mean(1), sq(data.mean((1, 2)))
    trace, grad = two_sizes(small, big, MICRO, MICRO * K)
    wanted = TRACE / (GRAD * 0.6**2)
    assert not near(np.mean(trace / grad), wanted, rel=0.5)
    assert near(run(data)[0].b_simple, wanted)


def test_negative_estimates_are_not_clamped_before_averaging():
    """fairscale AdaScale, gns-pytorch: |G|^2 below 0 is set to 0, so its average is too large at low signal."""
    data = draws(400) - 0.9 * SIGNAL
    signal = DIM * (0.1 * SIGNAL) ** 2
    _, grad = two_sizes(sq(data.mean(2)).mean(1), sq(data.mean((1, 2))), MICRO, MICRO * K)
    clamped = np.maximum(grad, 0).mean()
    estimate, _ = run(data)
    error = grad.std() / np.sqrt(len(grad))
    assert clamped - signal > 4 * error
    assert abs(estimate.grad_sq_norm - signal) < 4 * error
    assert estimate.grad_sq_norm == pytest.approx(grad.mean(), abs=1e-4)


def test_accumulated_gradients_are_not_taken_for_a_microbatchs():
    """k-diffusion under accumulation: the norm of what has accumulated, solved as if over one microbatch."""
    data = draws(400)
    accumulated = np.cumsum(data.mean(2), axis=1) / K
    trace, grad = two_sizes(sq(accumulated).mean(1), sq(data.mean((1, 2))), MICRO, MICRO * K)
    assert not near(trace.mean() / grad.mean(), rel=0.5)
    assert near(run(data)[0].b_simple)


def test_one_microbatch_a_step_is_an_error_and_not_a_division_by_zero():
    """mesh-transformer-jax #95: accumulation 1 ended in ZeroDivisionError."""
    with pytest.raises(ConfigError, match=r"got microbatch=4 and batch=4\. Use accumulation >= 2"):
        run(draws(1)[:, :1])


def test_a_loss_scale_that_changes_leaves_no_trace():
    """nanoGNS, k-diffusion: norms of scaled gradients enter the average, so each change of the scale moves it."""
    data = draws(40)
    factors = np.where(np.arange(40) < 20, 2.0**8, 2.0**4)[:, None]
    faulty = two_sizes(
        (factors**2 * sq(data.mean(2))).mean(1), sq(factors * data.mean((1, 2))), MICRO, MICRO * K
    )  # the newest steps count for nothing beside the first
    model = Linear(DIM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with NoiseScaleMonitor(model, microbatch=MICRO, every=1, grad_scaler=scaler) as monitor:
        for step, parts in enumerate(torch.tensor(data, dtype=torch.float32)):
            if step == 20:
                scaler.update(2.0**4)
            optimizer.zero_grad()
            for part in parts:
                scaler.scale(model(part).mean() / K).backward()
            monitor.step()
    plain = run(data)[0]
    assert monitor.noise_scale.b_simple == pytest.approx(plain.b_simple, rel=1e-5)
    assert not near(faulty[0].mean() / faulty[1].mean(), plain.b_simple, rel=0.05)


def test_clipping_is_not_measured():
    """A callback after clipping sees 1.000 for 1.100: the mean's norm is clipped, the microbatches' are not."""
    data = draws(50)
    big = sq(data.mean((1, 2)))
    clipped = two_sizes(sq(data.mean(2)).mean(1), np.minimum(big, 1.0), MICRO, MICRO * K)
    estimate, _ = run(data, clip=1.0)
    assert estimate.b_simple == pytest.approx(run(data)[0].b_simple, rel=1e-6)
    assert not near(clipped[0].mean() / clipped[1].mean())


@pytest.mark.parametrize("dims", [(2, 6), (1, 2, 5), (8,)])
def test_no_parameter_is_left_out_for_its_size(dims):
    """nanoGNS: under DDP every parameter of two elements is dropped, being taken for a buffer."""
    data = draws(1)
    wanted = two_sizes(sq(data.mean(2)).mean(), sq(data.mean((1, 2))).mean(), MICRO, MICRO * K)
    moments = run(data, dims=dims)[1]
    assert (moments.trace_cov, moments.grad_sq_norm) == pytest.approx(wanted, rel=1e-4)
    dropped = data[..., : dims[0]] if 2 not in dims else np.delete(data, slice(sum(dims[: dims.index(2)]), None), -1)
    if 2 in dims:
        assert not near(sq(dropped.mean(2)).mean(), sq(data.mean(2)).mean(), rel=0.01)


def test_a_bias_adds_its_tokens_up_before_it_is_squared():
    """nanoGNS: the squared norm of a bias's gradient as the sum over tokens of squares."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    x, direction = torch.randn(6, 5, 3), torch.randn(6, 5, 2)
    with NoiseScaleMonitor(layer, per_example=True, unit="sequences", every=1) as monitor:
        ((layer(x) * direction).sum((1, 2)).mean()).backward()
        moments = monitor.step()
    right, faulty = sq(direction.sum(1).double().numpy()).mean(), sq(direction.double().numpy()).sum(1).mean()
    assert moments.sq_norm_small == pytest.approx(right, rel=1e-5)
    assert not near(faulty, right, rel=0.05)


def test_uneven_token_counts_are_weighted_by_tokens():
    """transformers #34191, trl #2175: a mean of microbatch means is not the mean over tokens."""
    counts, generator = (1, 7), np.random.default_rng(0)
    tokens = [generator.normal(size=(n, DIM)) + 1 for n in counts]
    model = Linear(DIM)
    with NoiseScaleMonitor(model, microbatch=1, every=1, unit="tokens") as monitor:
        for part in tokens:
            with monitor.microbatch(units=len(part)):
                (model(torch.tensor(part, dtype=torch.float32)).sum() / sum(counts)).backward()
        moments = monitor.step()
    g = [part.mean(0) for part in tokens]
    mean = (g[0] + 7 * g[1]) / 8
    assert moments.sq_norm_step == pytest.approx(sq(mean), rel=1e-5)
    assert moments.trace_cov == pytest.approx(8 * (sq(g[0]) / 8 + 7 * sq(g[1]) / 8 - sq(mean)), rel=1e-4)
    assert not near(sq((g[0] + g[1]) / 2), sq(mean), rel=0.05)
    assert monitor.noise_scale.unit == "tokens"


def test_batch_norm_in_training_is_warned_of(caplog):
    """backpack #160: with batch statistics an example has no gradient of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with NoiseScaleMonitor(model, microbatch=8):
        assert "1 batch norm layer(s)" in caplog.text
        assert "microbatch" in caplog.text
    caplog.clear()
    with NoiseScaleMonitor(model.eval(), microbatch=8):
        assert not caplog.text


def test_a_state_survives_and_nothing_is_counted_twice():
    """gpt-neox: no state in checkpoints, and a correction by another counter than the average's."""
    data = draws(30)
    whole, _ = run(data)
    model = Linear(DIM)
    first = NoiseScaleMonitor(model, microbatch=MICRO, every=1)
    state = None
    for step, parts in enumerate(torch.tensor(data, dtype=torch.float32)):
        if step == 13:
            state = first.state_dict()
            first.close()
            first = NoiseScaleMonitor(model, microbatch=MICRO, every=1)
            first.load_state_dict(state)
        model.zero_grad()
        for part in parts:
            (model(part).mean() / K).backward()
        first.step()
    assert first.noise_scale == whole
