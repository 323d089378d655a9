"""What the measured run says is used only where it is resolved, and its interval narrows with more runs."""

import dataclasses

import numpy as np
import pytest
from torch import nn

from helpers import linear_task
from largebatch.records.schema import Interval, RunRecord, RunSpec
from largebatch.study.context import Context
from largebatch.study.launch import Launcher
from largebatch.study.measure import forecast, is_wide
from largebatch.study.plan import Protocol
from largebatch.study.study import warn_of_batch_norm


def context_of(task, tmp_path):
    launcher = Launcher(task="linear", data=None, out=tmp_path)
    return Context(task=task, out=tmp_path, seed=0, protocol=Protocol(), launcher=launcher,
                   goals=(2.0, 1.0))  # fmt: skip


def measured(rng, trace, grad, crossings, noise=1.0):
    """A record and its moments: constants plus noise, one row a step."""
    steps = int(np.ceil(crossings[-1]))
    spec = RunSpec(task="linear", role="measure", batch=8, lr=0.1, seed=0, max_steps=1000, goals=(2.0, 1.0))
    record = RunRecord(spec=spec, status="reached", steps=steps, units=8 * steps, crossings=crossings)
    moments = {
        "step": np.arange(1, steps + 1),
        "loss": np.ones(steps),
        "trace_cov": trace + noise * trace * rng.standard_normal(steps),
        "grad_sq_norm": grad + noise * trace * rng.standard_normal(steps),
    }
    return record, moments


def test_an_unresolved_noise_scale_is_said_and_its_sign_is_no_excuse(tmp_path):
    context = context_of(linear_task(), tmp_path)
    prediction = forecast(context, [measured(np.random.default_rng(0), 8.0, 0.01, (20.0, 40.0))])
    assert not prediction.resolved and prediction.reason


def test_more_runs_are_averaged_step_by_step_and_narrow_the_interval(tmp_path):
    context = context_of(linear_task(), tmp_path)
    rng = np.random.default_rng(1)
    runs = [measured(rng, 8.0, 1.0, (50.0, 200.0 + 10 * number), noise=0.3) for number in range(7)]
    one, seven = forecast(context, runs[:1]), forecast(context, runs)
    assert (one.num_runs, seven.num_runs) == (1, 7)
    assert seven.b_simple.value == pytest.approx(8.0, rel=0.25)
    widths = [
        prediction.goals[-1].b_crit.high - prediction.goals[-1].b_crit.low for prediction in (one, seven)
    ]  # fmt: skip
    assert widths[1] < widths[0]


def test_a_goal_crossed_at_step_nought_is_not_a_goal_missed(tmp_path):
    context = context_of(linear_task(), tmp_path)
    record, moments = measured(np.random.default_rng(2), 8.0, 1.0, (20.0, 40.0))
    missed = dataclasses.replace(record, crossings=(20.0, None))
    assert not forecast(context, [(missed, moments)]).goals[1].resolved


@pytest.mark.parametrize(
    ("interval", "wide"),
    [((1.0, 2.0), False), ((1.0, 3.0), True), ((None, 2.0), True), ((1.0, None), True), ((-1.0, 2.0), True)],
)
def test_open_and_negative_intervals_are_wide(interval, wide):
    assert is_wide(Interval(value=1.5, low=interval[0], high=interval[1]), 2.5) is wide


def test_batch_norm_is_warned_of(tmp_path):
    plain = context_of(linear_task(), tmp_path)
    warn_of_batch_norm(plain)
    assert not plain.warnings
    normed = dataclasses.replace(
        linear_task(), model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    )
    context = context_of(normed, tmp_path)
    warn_of_batch_norm(context)
    assert "batch-norm layers" in context.warnings[0]
