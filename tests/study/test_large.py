"""Large-batch runs are judged by an interval against the baseline, and nothing is tuned at them."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from helpers import linear_task
from largebatch.records.schema import RunRecord, RunSpec
from largebatch.study.context import Context
from largebatch.study.large import error_of, noise_lr, train_large, welch, winner
from largebatch.study.launch import Launcher
from largebatch.study.plan import Protocol


class Told(Launcher):
    """A launcher that is told each run's error instead of training."""

    def __init__(self, out, error):
        super().__init__(task="linear", data=None, out=out)
        self.error, self.asked = error, []

    def run(self, specs, on_step=None):
        self.asked += specs
        return [record_with(spec, self.error(spec)) for spec in specs]


def record_with(spec, error):
    rows = tuple(
        {"epoch": float(epoch), "train_loss": 1.0, "error": error, "held_out_loss": 1.0} for epoch in range(1, 7)
    )
    status = "diverged" if error is None else "exhausted"
    return RunRecord(spec=spec, status=status, steps=10, units=10 * spec.batch, epochs=() if error is None else rows)


def context_with(tmp_path, error):
    task = linear_task(num_examples=4096)
    return Context(
        task=task, task_name="linear", out=tmp_path, seed=0, protocol=Protocol(), launcher=Told(tmp_path, error)
    )


def elbow_at(batch):
    """Error 5 % plus a little by seed, until `batch`, where the linear rule breaks."""
    return lambda spec: 0.05 + (spec.seed % 10) * 1e-4 + (0.3 if spec.batch >= batch and "linear" in spec.role else 0.0)


def test_the_search_for_the_elbow_goes_on_until_the_linear_rule_fails(tmp_path):
    runs = train_large(context_with(tmp_path, elbow_at(1024)), 32, b_simple=100.0)
    by = {(run.batch, run.rule): run for run in runs}
    assert by[8, "baseline"].role == "baseline" and by[32, "linear"].role == "recommended"
    assert by[64, "linear"].role == "large" and by[1024, "linear"].role == "past the elbow"
    assert by[1024, "linear"].verdict == "worse" and (2048, "linear") not in by
    assert by[64, "linear"].verdict == "matches"
    assert by[32, "linear"].lr == pytest.approx(0.05 * 4), "linear scaling and nothing else"


def test_every_large_learning_rate_comes_from_a_rule(tmp_path):
    context = context_with(tmp_path, elbow_at(512))
    for run in train_large(context, 32, b_simple=100.0):
        expected = {"baseline": 0.05, "linear": 0.05 * run.batch / 8, "noise": noise_lr(context, 100.0, run.batch)}
        assert run.lr == pytest.approx(expected[run.rule])
    assert noise_lr(context, 100.0, 8) == pytest.approx(0.05), "both rules meet at the reference"


def test_a_diverged_seed_is_said_and_never_averaged_away(tmp_path):
    def error(spec):
        return None if spec.batch == 64 and spec.seed % 3 == 0 else 0.05

    runs = train_large(context_with(tmp_path, error), 32, b_simple=None)
    run = next(run for run in runs if run.batch == 64)
    assert (run.mean is None) == (None in run.errors)
    assert run.verdict == ("diverged" if None in run.errors else "matches")


def test_no_elbow_is_a_warning_and_no_invention(tmp_path):
    context = context_with(tmp_path, lambda spec: 0.05 + (spec.seed % 10) * 1e-4)
    train_large(context, 32, b_simple=None)
    assert any("No batch up to 2048 failed" in warning for warning in context.warnings)


def test_the_winner_is_named_with_its_interval(tmp_path):
    context = context_with(tmp_path, elbow_at(256))
    sentence = winner(context, train_large(context, 32, b_simple=10.0))
    assert "at batch 256 the noise-scale rule won by 30" in sentence
    assert "at batch 32 they cannot be told apart" in sentence


@given(
    st.lists(st.floats(0, 100), min_size=2, max_size=8), st.lists(st.floats(0, 100), min_size=2, max_size=8),
)  # fmt: skip
def test_welch_agrees_with_scipy(first, second):
    assume(np.std(first) > 1e-3 and np.std(second) > 1e-3)
    interval = welch(first, second)
    oracle = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((oracle.low, oracle.high), rel=1e-6, abs=1e-9)


def test_the_error_is_the_median_of_the_last_five_epochs():
    spec = RunSpec(task="t", role="large", batch=8, lr=0.1, seed=0, max_steps=1)
    rows = tuple({"epoch": float(i), "train_loss": 0.0, "error": error, "held_out_loss": 0.0}
                 for i, error in enumerate([0.9, 0.9, 0.5, 0.1, 0.3, 0.2, 0.4]))  # fmt: skip
    assert error_of(RunRecord(spec=spec, status="exhausted", steps=1, units=8, epochs=rows)) == pytest.approx(30.0)
