"""Does every way of running a backward give the same moments: autocast, gradient scalers, checkpointing, compilation?

Faults of others that these laws exclude: accumulation misread (k-diffusion), a loss scale left in (nanoGNS and
k-diffusion), gradients divided in place (AdaptDL), probes counted (fairscale, AdaptDL).
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from largebatch.errors import ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor as Monitor
from oracles import noise_moments as oracle

MICRO = 4
monitored = partial(Monitor, microbatch=MICRO, every=1)


class Net(nn.Module):
    """Two blocks that share a weight, each optionally run again in the backward."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for _ in range(2):
            if self.use_reentrant is None:
                x = torch.tanh(self.shared(x))
            else:
                x = checkpoint(lambda x: torch.tanh(self.shared(x)), x, use_reentrant=self.use_reentrant)
        return self.head(x)


def parts_of(step, num=3):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(MICRO, 6, generator=generator, requires_grad=True) for _ in range(num)]


def loss_of(model, part):
    return (model(part) - 1).square().sum(1).mean()


def expected(step, num=3):
    model = Net().double()
    means = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model, p.double()), [*model.parameters()])]).numpy()
        for p in parts_of(step, num)
    ]
    return oracle.of_microbatches(np.stack(means), [MICRO] * num)


def measure(model, step=0, scale=1.0, monitor=None, **options):
    model.zero_grad()
    with monitor or monitored(model, **options) as monitor:
        for part in parts_of(step):
            (scale * loss_of(model, part) / 3).backward()
        return monitor.step()


def assert_close(moments, step=0, rel=1e-4):
    assert (moments.trace_cov, moments.grad_sq_norm) == pytest.approx(expected(step), rel=rel)


def test_a_shared_weight_counts_once_with_the_sum_of_its_gradients():
    assert_close(measure(Net()))


def test_checkpointing_without_reentry_changes_nothing():
    assert_close(measure(Net(use_reentrant=False)))


def test_reentrant_checkpointing_of_a_shared_weight_is_refused_and_a_context_measures_it():
    """A leaf hook then fires twice in a backward, each time with a part of the gradient."""
    model = Net(use_reentrant=True)
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        measure(model)
    found = []
    with monitored(model) as monitor:
        for step in range(2):
            model.zero_grad()
            for part in parts_of(step):
                with monitor.microbatch(units=MICRO):
                    (loss_of(model, part) / 3).backward()
            found.append(monitor.step())
    assert found[0] is None
    assert_close(found[1], step=1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_measures_what_it_measures_uncompiled(backend):
    torch._dynamo.reset()
    model = Net()
    compiled = torch.compile(model, backend=backend)
    assert_close(measure(compiled))
    with monitored(model) as monitor:  # hooks that are there before the first call
        model.zero_grad()
        for part in parts_of(1):
            (loss_of(compiled, part) / 3).backward()
        assert_close(monitor.step(), step=1)


def test_bf16_autocast_is_measured_in_float32_from_the_gradients_as_they_are():
    model = Net()
    norms, total = [], 0.0
    for part in parts_of(0):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, part)
        # Of a third of the loss, as below: bfloat16 rounds that otherwise than a third of the gradient.
        flat = 3 * torch.cat([g.flatten() for g in torch.autograd.grad(loss / 3, [*model.parameters()])]).double()
        norms.append((flat @ flat).item())
        total = total + flat / 3
    with monitored(model) as monitor:
        for part in parts_of(0):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, part)
            (loss / 3).backward()
        moments = monitor.step()
    assert moments.sq_norm_small == pytest.approx(np.mean(norms), rel=1e-5)
    assert moments.sq_norm_step == pytest.approx((total @ total).item(), rel=1e-5)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_gradient_scaler_is_divided_out_whether_it_has_unscaled_or_not(unscale):
    """Squared norms carry the scale squared: leaving it in makes moments that jump whenever the scale does."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=1)
    with monitored(model, grad_scaler=scaler) as monitor:
        for step in range(3):
            optimizer.zero_grad()
            for part in parts_of(step):
                scaler.scale(loss_of(model, part) / 3).backward()
            if unscale:
                scaler.unscale_(optimizer)
            assert_close(monitor.step(), step)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0**10


def test_clipping_after_unscaling_is_still_seen():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with monitored(model, grad_scaler=scaler) as monitor:
        for part in parts_of(0):
            scaler.scale(loss_of(model, part) / 3).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(ConfigError, match="before clipping"):
            monitor.step()


def test_an_overflow_is_skipped_and_counted_and_the_next_step_is_measured(caplog):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with monitored(model, grad_scaler=scaler) as monitor:
        for step, factor in enumerate((float("inf"), 1.0)):
            optimizer.zero_grad()
            for part in parts_of(step):
                scaler.scale(factor * loss_of(model, part) / 3).backward()
            moments = monitor.step()
            scaler.step(optimizer)
            scaler.update()
    assert_close(moments, step=1)
    assert (monitor.num_skipped, monitor.noise_scale.num_steps) == (1, 1)
    assert "not finite" in caplog.text


def test_a_scaler_that_is_not_told_is_noticed_once_it_unscales():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with monitored(model) as monitor:
        for part in parts_of(0):
            scaler.scale(loss_of(model, part) / 3).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(ConfigError, match="grad_scaler"):
            monitor.step()


def test_groups_add_up_to_the_total_exactly():
    found = []
    model = Net()
    assert_close(measure(model, groups="modules", on_measured=[found.append]))
    measured = found[0]
    assert set(measured.groups) == {"shared", "head", "rest"}
    for key in ("trace_cov", "grad_sq_norm", "sq_norm_small", "sq_norm_step"):
        assert sum(getattr(part, key) for part in measured.groups.values()) == getattr(measured.moments, key)


def test_each_group_is_what_a_monitor_of_it_alone_would_say():
    found = []
    model = Net()
    with monitored(model, groups={"weights": "*weight", "biases": ["*.bias"]}, on_measured=[found.append]) as monitor:
        for part in parts_of(0):
            (loss_of(model, part) / 3).backward()
        monitor.step()
        assert set(monitor.group_noise_scales) == {"weights", "biases"}
    for name in ("weight", "bias"):
        alone = Net()
        for parameter, p in alone.named_parameters():
            p.requires_grad_(parameter.endswith(name))
        wanted = measure(alone)
        got = found[0].groups[{"weight": "weights", "bias": "biases"}[name]]
        assert (got.trace_cov, got.grad_sq_norm) == pytest.approx((wanted.trace_cov, wanted.grad_sq_norm), rel=1e-6)
    assert found[0].groups["rest"].trace_cov == 0.0


def test_a_group_that_fits_nothing_is_named():
    with pytest.raises(ConfigError, match=r"group 'norms' \(\*norm\*\) fits no trained parameter"):
        monitored(Net(), groups={"norms": "*norm*"})
    with pytest.raises(ConfigError, match="'modules'"):
        monitored(Net(), groups="module")


def test_an_accelerators_late_numbers_are_those_of_the_host(monkeypatch):
    """On an accelerator nothing waits: a step's numbers are read at the next measured step. Here by hand on a CPU."""
    plain, late = [], []
    model = Net()
    for found, defer in ((plain, False), (late, True)):
        with monitored(model, on_measured=[found.append]) as monitor:
            if defer:
                monkeypatch.setattr(monitor._meter, "defer", True)
            for step in range(4):
                model.zero_grad()
                for part in parts_of(step):
                    (loss_of(model, part) / 3).backward()
                assert (monitor.step() is None) == defer
                assert len(found) == step + (not defer)
            assert monitor.noise_scale.num_steps == 4
    assert plain == late
