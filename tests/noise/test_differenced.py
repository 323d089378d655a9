"""Is the differenced estimate what its closed form says, bias included?"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from largebatch.errors import CheckpointError, ConfigError
from largebatch.noise.differenced import DifferencedNoise

H = np.array([0.2, 1.0, 3.0])
SIGMA = np.array([2.0, 0.5, 1.0])
THETA = np.array([3.0, -1.0, 0.5])
BATCH = 4


class Quadratic(nn.Module):
    """(1/2) theta' H theta with the noise of a batch added to its gradient."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(THETA))

    def backward(self, noise, scale=1.0):
        loss = (self.theta**2 * torch.tensor(H)).sum() / 2 + self.theta @ torch.tensor(noise)
        (scale * loss).backward()


def pair(lr, noises, **options):
    model = Quadratic()
    difference = DifferencedNoise(model, batch=BATCH, every=2, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for noise in noises:
        optimizer.zero_grad()
        model.backward(noise)
        moments = difference.step()
        optimizer.step()
    return moments


@pytest.mark.parametrize("lr", [0.0, 0.1, 0.5])
def test_its_mean_is_the_closed_form_with_the_bias_of_the_step_between(lr):
    """E over the noise, by all sign patterns of Rademacher noise: exact, since only second moments enter."""
    size = np.sqrt(SIGMA / BATCH)
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 6)).reshape(6, -1).T
    found = [pair(lr, (s[:3] * size, s[3:] * size)) for s in signs]
    trace, grad = np.mean([(m.trace_cov, m.grad_sq_norm) for m in found], axis=0)
    G = H * THETA
    wanted_trace = SIGMA.sum() + lr * H @ SIGMA + lr**2 / 2 * (H**2 @ SIGMA + BATCH * (G * H**2 * G).sum())
    wanted_grad = (G * (1 - lr * H) * G).sum() - lr * (H @ SIGMA) / BATCH
    assert (trace, grad) == pytest.approx((wanted_trace, wanted_grad), rel=1e-10)


def test_a_scaler_is_divided_out_of_each_gradient_with_its_own_scale():
    noises = np.ones(3), -np.ones(3)
    model = Quadratic()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    difference = DifferencedNoise(model, batch=BATCH, every=2, grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for noise in noises:
        optimizer.zero_grad()
        model.backward(noise, scaler.scale(torch.ones(())))
        moments = difference.step()
        scaler.step(optimizer)
        scaler.update()
    wanted = pair(0.1, noises)
    assert (moments.trace_cov, moments.grad_sq_norm) == pytest.approx((wanted.trace_cov, wanted.grad_sq_norm), rel=1e-6)


def test_pairs_begin_every_so_many_steps_and_nothing_is_held_in_between(caplog):
    model = Quadratic()
    difference = DifferencedNoise(model, batch=BATCH, every=5)
    assert "differenced" in caplog.text
    found = []
    for step in range(12):
        model.zero_grad()
        model.backward(np.full(3, np.nan if step == 5 else float(step)))
        before = model.theta.grad.clone()
        found.append(difference.step() is not None)
        assert torch.equal(model.theta.grad, before) or step == 5
        assert (difference._first is not None) == (step % 5 == 0)
    assert [step for step, ended in enumerate(found) if ended] == [1, 11]
    assert difference.num_skipped == 1
    assert difference.noise_scale.num_steps == 2


class Waits(TorchFunctionMode):
    """Counts what makes a host wait for an accelerator."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_pair_waits_for_the_accelerator_once():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    difference = DifferencedNoise(model, batch=BATCH, every=2)
    for waits in ([], ["tolist"]):
        model.zero_grad()
        model(torch.randn(BATCH, 2)).mean().backward()
        with Waits() as found:
            difference.step()
        assert found.found == waits


def test_it_goes_on_from_its_state_and_refuses_what_is_none():
    model = Quadratic()
    first = DifferencedNoise(model, batch=BATCH, every=2)
    for step in range(20):
        if step == 8:
            state = first.state_dict()
            first = DifferencedNoise(model, batch=BATCH, every=2)
            first.load_state_dict(state)
        model.zero_grad()
        model.backward(np.sin(np.arange(3) + step))
        first.step()
    assert first.noise_scale.num_steps == 10
    with pytest.raises(CheckpointError, match="no state of a DifferencedNoise"):
        first.load_state_dict({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch"),
        ({"batch": 1, "every": 1}, "every"),
        ({"batch": True}, "batch"),
        ({"batch": 1, "unit": "m"}, "unit"),
    ],
)
def test_unusable_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        DifferencedNoise(Quadratic(), **options)


def test_a_step_without_gradients_is_refused():
    with pytest.raises(ConfigError, match="after the backward"):
        DifferencedNoise(Quadratic(), batch=1).step()
