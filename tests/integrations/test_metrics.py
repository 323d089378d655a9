"""Does a tracker get every raw moment, the running noise scale with its unit, and never a step's own ratio?"""

import math

import pytest
import torch
from torch import nn

from largebatch.integrations.metrics import as_metrics, metrics_sink
from largebatch.noise.monitor import NoiseScaleMonitor


def train(monitor, model, steps):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        model.zero_grad()
        for inputs in torch.randn(4, 8, 3, generator=generator):
            targets = inputs.sum(1, keepdim=True) + torch.randn(8, 1, generator=generator)
            ((model(inputs) - targets).square().mean() / 4).backward()
        monitor.step()


class Wandb:
    """Records calls of `wandb.log`, by its signature."""

    def __init__(self):
        self.rows = []

    def log(self, data, step=None, commit=None):
        self.rows.append((step, data))


class Mlflow:
    """Records calls of `mlflow.log_metrics`, by its signature; refuses names that it refuses."""

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None):
        allowed = "_-. /:"
        assert all(letter.isalnum() or letter in allowed for name in metrics for letter in name)
        self.rows.append((step, metrics))


@pytest.fixture
def measured():
    """(steps seen, rows of W&B, rows of MLflow, the monitor's estimate after each step)."""
    torch.manual_seed(0)
    model, wandb, mlflow, seen, estimates = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), Wandb(), Mlflow(), [], []
    monitor = NoiseScaleMonitor(
        model, microbatch=8, every=2, unit="tokens", groups={"first": "0.*"},
        on_measured=[
            seen.append,
            lambda step: estimates.append(monitor.noise_scale),
            metrics_sink(wandb.log, noise_scale=lambda: monitor.noise_scale),
            metrics_sink(mlflow.log_metrics),
        ],
    )  # fmt: skip
    train(monitor, model, 40)
    monitor.close()
    return seen, wandb.rows, mlflow.rows, estimates


def test_every_tracker_gets_the_raw_moments_under_the_optimizers_step(measured):
    seen, *trackers, _ = measured
    assert [one.step for one in seen] == list(range(1, 41, 2))
    for rows in trackers:
        assert [step for step, _ in rows] == [one.step for one in seen]
        for one, (_, metrics) in zip(seen, rows, strict=True):
            assert metrics["noise/trace_cov"] == one.moments.trace_cov
            assert metrics["noise/grad_sq_norm"] == one.moments.grad_sq_norm
            assert metrics["noise/batch"] == 32
            assert metrics["noise/trace_cov/first"] == one.groups["first"].trace_cov
            assert metrics["noise/grad_sq_norm/rest"] == one.groups["rest"].grad_sq_norm


def test_the_noise_scale_is_the_monitors_running_one_and_never_a_steps_ratio(measured):
    seen, wandb, mlflow, estimates = measured
    assert estimates[-1].resolved
    for one, (_, metrics), estimate in zip(seen, wandb, estimates, strict=True):
        assert metrics.get("noise/b_simple_tokens") == (estimate.b_simple if estimate.resolved else None)
        ends = metrics.get("noise/b_simple_tokens_low"), metrics.get("noise/b_simple_tokens_high")
        assert ends == estimate.interval
        ratio = one.moments.trace_cov / one.moments.grad_sq_norm
        assert not any(math.isclose(value, ratio) for value in metrics.values())
    assert "noise/b_simple_tokens" not in wandb[0][1]
    assert not any("b_simple" in name for _, metrics in mlflow for name in metrics)


def test_the_optimizers_metric_has_its_own_names():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    seen = []
    with NoiseScaleMonitor(
        model, microbatch=8, every=1, precondition_by=optimizer, on_measured=[seen.append]
    ) as monitor:
        train(monitor, model, 1)
        optimizer.step()
        train(monitor, model, 1)
    assert not any("preconditioned" in name for name in as_metrics(seen[0]))
    assert as_metrics(seen[1])["noise/preconditioned_trace_cov"] == seen[1].preconditioned.trace_cov
    assert not any(name.endswith("/rest") for name in as_metrics(seen[1]))
