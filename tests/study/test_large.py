"""Large-batch runs are judged by an interval against the baseline, and nothing is tuned at them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from helpers import linear_task
from largebatch.errors import DivergedError
from largebatch.records.schema import RunRecord, RunSpec
from largebatch.study.context import Context
from largebatch.study.large import NoiseRule, error_of, train_large, welch, winner
from largebatch.study.launch import Launcher
from largebatch.study.plan import Protocol
from largebatch.tasks.task import TensorSplit

RULE = NoiseRule(eps_max=1.0, b_simple=100.0)


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
    task = replace(task, held_out=TensorSplit((torch.zeros(10_000, 1),)))
    return Context(task=task, out=tmp_path, seed=0, protocol=Protocol(), launcher=Told(tmp_path, error))


def elbow_at(batch):
    """Error 5 % plus a little by seed, until `batch`, where the linear rule breaks."""
    return lambda spec: 0.05 + (spec.seed % 10) * 1e-4 + (0.3 if spec.batch >= batch and "linear" in spec.role else 0.0)


def test_the_search_for_the_elbow_goes_on_until_the_linear_rule_fails(tmp_path):
    runs = train_large(context_with(tmp_path, elbow_at(1024)), 32, RULE)
    by = {(run.batch, run.rule): run for run in runs}
    assert by[8, "baseline"].role == "baseline" and by[32, "linear"].role == "recommended"
    assert by[64, "linear"].role == "large" and by[1024, "linear"].role == "past the elbow"
    assert by[1024, "linear"].verdict == "worse" and (2048, "linear") not in by
    assert by[64, "linear"].verdict == "matches"
    assert by[32, "linear"].lr == pytest.approx(0.05 * 4), "linear scaling and nothing else"


def test_every_large_learning_rate_comes_from_a_rule(tmp_path):
    context = context_with(tmp_path, elbow_at(512))
    for run in train_large(context, 32, RULE):
        expected = {"baseline": 0.05, "linear": 0.05 * run.batch / 8, "noise": 1.0 / (1 + 100.0 / run.batch)}
        assert run.lr == pytest.approx(expected[run.rule])


def test_a_diverged_seed_is_said_and_never_averaged_away(tmp_path):
    def error(spec):
        return None if spec.batch == 64 and spec.seed % 3 == 0 else 0.05

    runs = train_large(context_with(tmp_path, error), 32, None)
    run = next(run for run in runs if run.batch == 64)
    assert (run.mean is None) == (None in run.errors)
    assert run.verdict == ("diverged" if None in run.errors else "matches")


def test_no_elbow_is_a_warning_and_no_invention(tmp_path):
    context = context_with(tmp_path, lambda spec: 0.05 + (spec.seed % 10) * 1e-4)
    train_large(context, 32, None)
    assert any("No batch visibly failed" in warning and "was 2048" in warning for warning in context.warnings)


def test_the_winner_is_named_with_its_interval(tmp_path):
    context = context_with(tmp_path, elbow_at(256))
    sentence = winner(train_large(context, 32, RULE), noise_resolved=True)
    assert "at batch 256 the noise-scale rule won by 29.99" in sentence
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


def test_a_little_worse_is_large_and_only_a_visible_failure_is_past_the_elbow(tmp_path):
    extra = {256: 0.006, 512: 0.008, 1024: 0.3}
    context = context_with(
        tmp_path,
        lambda spec: 0.05 + (spec.seed % 10) * 1e-4 + (extra.get(spec.batch, 0.0) if "linear" in spec.role else 0),
    )
    runs = {(run.batch, run.rule): run for run in train_large(context, 32, None)}
    assert [batch for (batch, _), run in runs.items() if run.role == "past the elbow"] == [1024]
    assert runs[512, "linear"].role == "large" and runs[512, "linear"].verdict == "worse"


def test_one_unlucky_seed_of_five_is_no_visible_failure(tmp_path):
    unlucky = []

    def error(spec):
        if spec.batch == 256 and "linear" in spec.role and (not unlucky or spec.seed in unlucky):
            unlucky.append(spec.seed)
            return 0.9
        return 0.05 if spec.batch < 512 else 0.9

    runs = {(run.batch, run.rule): run for run in train_large(context_with(tmp_path, error), 32, None)}
    assert runs[256, "linear"].role == "large" and runs[512, "linear"].role == "past the elbow"


def test_an_unresolved_noise_scale_trains_one_rule_and_says_so(tmp_path):
    runs = train_large(context_with(tmp_path, elbow_at(256)), 32, None)
    assert {run.rule for run in runs} == {"baseline", "linear"}
    assert "not resolved" in winner(runs, noise_resolved=False)


def test_equal_errors_of_few_examples_are_not_certainty():
    """Five seeds with the same error on 64 examples: the grain of the error is their least spread."""
    interval = welch([5.0] * 5, [5.0] * 5, least_std=100 / 64 / 12**0.5)
    assert interval.low < -0.3 and interval.high > 0.3


def test_a_baseline_that_always_diverges_is_said(tmp_path):
    with pytest.raises(DivergedError, match="every full run at the baseline"):
        train_large(context_with(tmp_path, lambda _: None), 32, None)
