"""Does the monitor measure a real model's gradients, and leave its training alone?"""

import copy
import io
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from largebatch.errors import ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor as Monitor
from oracles import noise_moments as oracle

UNEVEN = (4, 4, 4, 1)
monitored = partial(Monitor, every=1)
"""A monitor that measures every step, as the tests below count on."""


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, 3))
    return model.to(memory_format=torch.channels_last)


def make_step(sizes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 1, 6, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for size in sizes
    ]


def scaled_loss(model, part, loss_scaling, batch):
    inputs, labels = part
    total = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
    return total / {"step_mean": batch, "microbatch_mean": len(labels), "sum": 1}[loss_scaling]


def backward(model, parts, loss_scaling, monitor):
    batch = sum(len(labels) for _, labels in parts)
    for part in parts:
        loss = scaled_loss(model, part, loss_scaling, batch)
        if len(part[1]) == 4:
            loss.backward()
        else:
            with monitor.microbatch(units=len(part[1])):
                loss.backward()


def expected_moments(model, parts):
    """By a float64 copy and `torch.autograd.grad`, through the oracle."""
    model = copy.deepcopy(model).double()
    means = []
    for inputs, labels in parts:
        loss = nn.functional.cross_entropy(model(inputs.double()), labels)
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        means.append(torch.cat([gradient.flatten() for gradient in gradients]).numpy())
    return oracle.of_microbatches(np.stack(means), [len(labels) for _, labels in parts])


@pytest.mark.parametrize("loss_scaling", ["step_mean", "sum", "microbatch_mean"])
@pytest.mark.parametrize("sizes", [(4,) * 4, UNEVEN])
def test_a_real_models_moments_are_those_of_its_mean_gradient(loss_scaling, sizes):
    model = make_model().eval()
    parts = make_step(sizes)
    with monitored(model, microbatch=4, loss_scaling=loss_scaling) as monitor:
        backward(model, parts, loss_scaling, monitor)
        moments = monitor.step()
    assert (moments.batch, moments.num_microbatches) == (sum(sizes), len(sizes))
    if loss_scaling == "microbatch_mean" and sizes == UNEVEN:
        # Autograd's sum weights microbatches alike, so it is another unbiased estimate: its norms are checked.
        norms, total = [], 0
        for inputs, labels in parts:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).double()
            norms.append(flat.square().sum().item())
            total = total + flat
        assert moments.sq_norm_small == pytest.approx(np.mean(norms), rel=1e-5)
        assert moments.sq_norm_step == pytest.approx((total / 4).square().sum().item(), rel=1e-5)
        assert moments.units_small == pytest.approx(4 / (3 / 4 + 1))
        assert moments.units_step == pytest.approx(16 / (3 / 4 + 1))
    else:
        # Raw norms are right to 1e-5; solving magnifies that by their size over the moments'.
        assert (moments.trace_cov, moments.grad_sq_norm) == pytest.approx(expected_moments(model, parts), rel=1e-3)


def train(model, watch, steps=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = monitored(model, microbatch=4) if watch else None
    gradients = []
    torch.manual_seed(3)
    for step in range(steps):
        for part in make_step((4, 4, 4), seed=step):
            scaled_loss(model, part, "step_mean", 12).backward()
        gradients += [p.grad.clone() for p in model.parameters()]
        if monitor is not None:
            assert monitor.step() is not None
            assert str(monitor.noise_scale)
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients[-4:], strict=True))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return gradients, list(model.state_dict().values()), torch.get_rng_state()


def test_measuring_changes_no_gradient_no_weight_and_no_random_number():
    plain, watched = train(make_model(), watch=False), train(make_model(), watch=True)
    for mine, other in zip(plain[0] + plain[1], watched[0] + watched[1], strict=True):
        assert torch.equal(mine, other)
        assert mine.stride() == other.stride()
    assert torch.equal(plain[2], watched[2])


def test_scaling_the_loss_leaves_noise_scale_unchanged():
    def measure(factor):
        model = make_model().eval()
        with monitored(model, microbatch=4) as monitor:
            for seed in range(12):
                model.zero_grad()
                for part in make_step((4, 4), seed=seed):
                    (factor * scaled_loss(model, part, "step_mean", 8)).backward()
                monitor.step()
            return monitor.noise_scale

    # A power of two changes no mantissa bit.
    plain, scaled = measure(1.0), measure(1024.0)
    assert scaled.b_simple == plain.b_simple
    assert scaled.interval == plain.interval
    assert scaled.trace_cov == plain.trace_cov * 1024**2


class Linear(nn.Module):
    """loss = w.x for each x, so that its gradient is x."""

    def __init__(self, dim=1):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim))

    def backward(self, *gradients):
        for gradient in gradients:
            (self.w @ torch.as_tensor(gradient)).backward()


def test_gradients_one_and_three_through_the_whole_way():
    model = Linear()
    with monitored(model, microbatch=1, loss_scaling="sum") as monitor:
        for first in (1.0, 3.0):
            for second in (1.0, 3.0):
                model.zero_grad()
                model.backward([first], [second])
                monitor.step()
    assert (monitor.noise_scale.trace_cov, monitor.noise_scale.grad_sq_norm) == pytest.approx((1.0, 4.0))


def test_two_losses_in_a_context_are_one_microbatch(caplog):
    model = Linear(2)
    with monitored(model, microbatch=1, loss_scaling="sum") as monitor:
        for step in range(3):
            model.zero_grad()
            for sign in (1.0, 3.0):
                with monitor.microbatch(units=1):
                    model.backward([sign, 5.0], [0.0, -5.0])
            moments = monitor.step()
            assert (moments is None) == (step == 0)
    assert (moments.trace_cov, moments.grad_sq_norm) == pytest.approx((2.0, 3.0))
    assert monitor.num_skipped == 1
    assert "second backward" in caplog.text


def test_data_set_size_is_passed_on():
    def measure(**options):
        model = Linear()
        with monitored(model, microbatch=1, loss_scaling="sum", **options) as monitor:
            model.backward([1.0], [3.0])
            return monitor.step()

    assert measure(dataset_size=10).grad_sq_norm == pytest.approx(measure().grad_sq_norm + 2.0 / 10)
    with pytest.raises(ConfigError, match="dataset_size=1"):
        measure(dataset_size=1)


def test_every_third_step_is_measured_from_the_first_on():
    model = Linear()
    with monitored(model, microbatch=1, every=3) as monitor:
        measured = []
        for _ in range(8):
            model.zero_grad()
            with monitor.microbatch(units=1):
                model.backward([1.0])
            model.backward([2.0])
            measured.append(monitor.step() is not None)
    assert measured == [True, False, False, True, False, False, True, False]
    assert (monitor.num_steps, monitor.noise_scale.num_steps) == (8, 3)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_skips_the_step(bad, caplog):
    model = Linear()
    with monitored(model, microbatch=1) as monitor:
        for gradient in (1.0, bad, 3.0):
            model.zero_grad()
            model.backward([1.0], [gradient])
            assert (monitor.step() is None) == (gradient is bad)
    assert monitor.num_skipped == 1
    assert monitor.noise_scale.num_steps == 2
    assert "not finite" in caplog.text


def test_resuming_is_exact():
    def run(monitor, model, steps):
        for step in steps:
            model.zero_grad()
            for part in make_step((4, 4), seed=step):
                with monitor.microbatch(units=4):
                    loss = scaled_loss(model, part, "step_mean", 8)
                    (0.5 * loss).backward(retain_graph=True)
                    (0.5 * loss).backward()
            monitor.step()

    options = {"microbatch": 4, "every": 2, "half_life": 5}
    model = make_model().eval()
    whole = monitored(model, **options)
    run(whole, model, range(30))
    whole.close()
    first = monitored(model, **options)
    run(first, model, range(13))
    first.close()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = monitored(model, **options)
    second.load_state_dict(torch.load(file, weights_only=True))
    run(second, model, range(13, 30))
    assert second.state_dict() == whole.state_dict()
    assert second.noise_scale == whole.noise_scale
    assert second.num_skipped == 1


def test_frozen_and_unused_parameters_are_left_out():
    model = make_model().eval()
    model[0].weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3))
    model.unused.grad = torch.full((3,), 7.0)  # left over from elsewhere, no part of this step
    parts = make_step((4, 4))
    with monitored(model, microbatch=4) as monitor:
        for inputs, labels in parts:
            hidden = inputs
            for layer in list(model.children()):
                hidden = layer(hidden)
            (nn.functional.cross_entropy(hidden, labels, reduction="sum") / 8).backward()
        moments = monitor.step()
    del model.unused
    assert (moments.trace_cov, moments.grad_sq_norm) == pytest.approx(expected_moments(model, parts), rel=1e-3)


def test_closing_removes_every_hook():
    model = make_model()
    with monitored(model, microbatch=4):
        pass
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


def test_one_microbatch_is_refused_with_the_way_out():
    model = Linear()
    with monitored(model, microbatch=64) as monitor:
        model.backward([1.0])
        with pytest.raises(ConfigError, match=r"got microbatch=64 and batch=64\. Use accumulation >= 2"):
            monitor.step()


def test_one_microbatch_at_an_epoch_s_end_is_skipped(caplog):
    model = nn.Linear(2, 1)
    measured = []
    with monitored(model, microbatch=3) as monitor:
        for num in (2, 1, 2):
            model.zero_grad()
            for part in torch.randn(num, 3, 2, generator=torch.Generator().manual_seed(num)):
                (model(part).square().mean() / num).backward()
            measured.append(monitor.step())
    assert [moments is None for moments in measured] == [False, True, False]
    assert (monitor.num_steps, monitor.num_skipped, monitor.noise_scale.num_steps) == (3, 1, 2)
    assert "step 2 is not measured: it has one microbatch only" in caplog.text


def test_no_step_yet_is_not_an_estimate():
    with monitored(Linear(), microbatch=1, unit="tokens") as monitor:
        assert not monitor.noise_scale.resolved
        assert monitor.noise_scale.unit == "tokens"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatch": 0}, "microbatch"),
        ({"microbatch": 1.5}, "microbatch"),
        ({"every": 0}, "every"),
        ({"dataset_size": 0}, "dataset_size"),
        ({"loss_scaling": "mean"}, "'step_mean', 'local_mean', 'microbatch_mean', 'sum'"),
        ({"unit": "pages"}, "pages"),
        ({"half_life": -1}, "not negative"),
        ({"half_life": "5"}, "half_life is a number"),
        ({"half_life": True}, "half_life is a number"),
        ({"microbatch": None}, "or use per_example=True"),
        ({"microbatch": 10**400}, "microbatch"),
        ({"every": "always"}, "every is 'auto' or"),
        ({"on_measured": [None]}, "on_measured is a function"),
        ({"on_measured": "abc"}, "on_measured is a function"),
        ({"groups": {"a": 5}}, "all text"),
        ({"groups": {1: "*"}}, "all text"),
        ({"grad_scaler": object()}, "GradScaler"),
        ({"precondition_by": "adam"}, "precondition_by is an optimizer"),
        ({"per_example": torch.tensor([1, 2])}, "per_example is False"),
        ({"per_example": True}, "leave microbatch=1 out"),
        ({"per_example": True, "microbatch": None, "unit": "tokens"}, "unit='sequences'"),
    ],
)
def test_unusable_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        monitored(Linear(), **{"microbatch": 1, **options})


def _small():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    inputs = torch.randn(64, 5)

    def backward(start):
        (model(inputs[start : start + 8]).square().mean() / 4).backward()

    return model, backward


def test_a_step_given_up_by_zeroing_in_place_leaves_no_trace():
    """A loop that meets a spike calls zero_grad and goes on: what came before is no part of the next step."""
    model, backward = _small()
    with monitored(model, microbatch=8) as monitor:
        for start in (0, 8, 16, 24):
            backward(start)
        wanted = monitor.step()
        model.zero_grad(set_to_none=False)
        backward(32)
        backward(40)
        model.zero_grad(set_to_none=False)
        for start in (0, 8, 16, 24):
            backward(start)
        assert monitor.step() == wanted


@pytest.mark.parametrize("change", ["clip", "step", "scale"])
def test_gradients_changed_before_step_are_refused(change):
    """Clipping, a foreach optimizer with momentum, unscaling: each would give moments of something else."""
    model, backward = _small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    with monitored(model, microbatch=8) as monitor:
        for start in (0, 8, 16, 24):
            backward(start)
        if change == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        elif change == "step":
            optimizer.step()
        else:
            for parameter in model.parameters():
                parameter.grad.mul_(2.0)
        with pytest.raises(ConfigError, match="changed after the last backward"):
            monitor.step()


def test_clipping_each_microbatch_is_refused():
    model, backward = _small()
    with monitored(model, microbatch=8) as monitor:
        backward(0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        backward(8)
        with pytest.raises(ConfigError, match="between two backwards"):
            monitor.step()


def test_a_parameter_that_joins_later_gives_one_step_up_and_is_measured_from_then_on(caplog):
    model, backward = _small()
    model.bias.requires_grad_(False)
    with monitored(model, microbatch=8) as monitor:
        model.bias.requires_grad_(True)
        for start in (0, 8):
            backward(start)
        assert monitor.step() is None
        assert "joined" in caplog.text
        model.zero_grad()
        for start in (0, 8):
            backward(start)
        late = monitor.step()
    model.zero_grad()
    with monitored(model, microbatch=8) as monitor:
        for start in (0, 8):
            backward(start)
        assert monitor.step() == late


def test_gradients_that_were_not_zeroed_are_refused():
    model, backward = _small()
    with monitored(model, microbatch=8) as monitor:
        for start in (0, 8):
            backward(start)
        monitor.step()
        for start in (0, 8):
            backward(start)
        with pytest.raises(ConfigError, match="zero_grad"):
            monitor.step()
        model.zero_grad(set_to_none=False)  # zeros are fine
        for start in (0, 8):
            backward(start)
        assert monitor.step() is not None


def test_a_single_function_is_a_sink_too():
    found = []
    model, backward = _small()
    with monitored(model, microbatch=8, on_measured=found.append) as monitor:
        for start in (0, 8):
            backward(start)
        assert found == [] and monitor.step() == found[0].moments
