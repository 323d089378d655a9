"""The loop is Goyal's update, a run is a pure function of its spec, and a kill changes no bit of it."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import linear_task
from largebatch.errors import CheckpointError, ConfigError, RecordError
from largebatch.recipe.sampler import ShuffledStream
from largebatch.records.files import read_lines
from largebatch.records.schema import RunSpec
from largebatch.train.checkpoint import load_weights
from largebatch.train.checkpoint_files import Writer
from largebatch.train.evaluate import crossing, goal_indices
from largebatch.train.loop import train

SPEC = RunSpec(task="linear", role="test", batch=16, microbatch=4, lr=0.05, seed=3, max_steps=40, monitor=True)


def final_weights(folder):
    return load_weights(folder / "model.pt")


def oracle_sgd(task, spec, steps):
    """Plain SGD on the mean loss over the batch, in float64 numpy (Goyal 2017, eq. 2)."""
    x, y = (tensor.double().numpy() for tensor in task.train.tensors)
    torch.manual_seed(spec.seed)
    weights = task.model()[-1].weight.detach().double().numpy()[0]
    stream = ShuffledStream(len(x), spec.seed)
    for step in range(steps):
        rows = stream.indices(step * spec.batch, spec.batch)
        residual = x[rows] @ weights - y[rows]
        weights = weights - spec.lr * (residual[:, None] * x[rows]).mean(0)
    return weights


@pytest.mark.parametrize("microbatch", [None, 4, 5])
def test_any_split_into_microbatches_is_one_step_of_the_mean_gradient(tmp_path, microbatch):
    task = linear_task()
    spec = replace(SPEC, microbatch=microbatch, monitor=microbatch is not None)
    train(task, spec, tmp_path, keep_model=True)
    weights = next(iter(final_weights(tmp_path).values()))[0]
    np.testing.assert_allclose(weights, oracle_sgd(task, spec, 40), rtol=2e-5)


class KilledError(Exception):
    pass


@pytest.mark.parametrize("stop_at", [1, 17, 39])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, stop_at):
    """With dropout and augmentation, so that every random stream must come back too."""
    task = linear_task(
        dropout=0.3, momentum=0.9, nesterov=True, weight_decay=1e-3,
        augment=lambda batch, draws: (batch[0] + 0.1 * draws[:, :4], batch[1]),
    )  # fmt: skip
    spec = replace(SPEC, goals=(1e-9,), evaluate_epochs=True, schedule="goyal")
    whole = train(task, spec, tmp_path / "whole", keep_model=True)

    def kill(progress, _loss, _monitor):
        if progress.step == stop_at:
            raise KilledError

    with pytest.raises(KilledError):
        train(task, spec, tmp_path / "killed", keep_model=True, checkpoint_seconds=0.0, on_step=kill)
    resumed = train(task, spec, tmp_path / "killed", keep_model=True)
    assert resumed == whole
    for name in ("steps.jsonl", "evaluations.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    whole_weights, resumed_weights = (final_weights(tmp_path / name) for name in ("whole", "killed"))
    for name, weights in whole_weights.items():
        assert torch.equal(weights, resumed_weights[name])


def test_a_run_that_fails_leaves_no_save_on_its_way(tmp_path, monkeypatch):
    """The next one in the same process would find its files changed under it."""
    finish = Writer.finish

    def slow(self, **options):
        time.sleep(0.3)
        finish(self, **options)

    monkeypatch.setattr(Writer, "finish", slow)

    def fail(progress, _loss, _monitor):
        if progress.step == 3:
            raise KilledError

    with pytest.raises(KilledError):
        train(linear_task(), replace(SPEC, goals=(1e-9,)), tmp_path, checkpoint_seconds=0.0, on_step=fail)
    assert sorted(path.name[:5] for path in (tmp_path / "checkpoints").iterdir()) == ["step-", "step-"]


def test_a_save_that_fails_beside_a_run_that_fails_is_said_and_leaves_nothing(tmp_path, monkeypatch, caplog):
    def full(self, **options):
        time.sleep(0.2)
        raise OSError(28, "No space left on device")

    def fail(progress, _loss, _monitor):
        if progress.step == 2:  # the save of step 1 is on its way
            raise KilledError

    monkeypatch.setattr(Writer, "finish", full)
    with pytest.raises(KilledError):
        train(linear_task(), replace(SPEC, goals=(1e-9,)), tmp_path, checkpoint_seconds=0.0, on_step=fail)
    assert "No space left" in caplog.text
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_damaged_checkpoint_costs_steps_and_no_bit(tmp_path):
    task, spec = linear_task(), replace(SPEC, goals=(1e-9,))
    whole = train(task, spec, tmp_path / "whole")

    def kill(progress, _loss, _monitor):
        if progress.step == 20:
            raise KilledError

    with pytest.raises(KilledError):
        train(task, spec, tmp_path / "hurt", checkpoint_seconds=0.0, on_step=kill)
    newest = max((tmp_path / "hurt" / "checkpoints").glob("step-*"))
    for path in newest.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert train(task, spec, tmp_path / "hurt") == whole
    assert (tmp_path / "whole" / "steps.jsonl").read_bytes() == (tmp_path / "hurt" / "steps.jsonl").read_bytes()


def test_the_monitor_changes_no_bit_of_the_run(tmp_path):
    task = linear_task(dropout=0.2)
    watched = train(task, replace(SPEC, trace_loss=True), tmp_path / "a", keep_model=True)
    alone = train(task, replace(SPEC, trace_loss=True, monitor=False), tmp_path / "b", keep_model=True)
    assert watched.goal_loss == alone.goal_loss
    assert torch.equal(*(next(iter(final_weights(tmp_path / name).values())) for name in "ab"))


def test_training_leaves_the_callers_random_numbers_alone(tmp_path):
    before = torch.get_rng_state()
    train(linear_task(dropout=0.2), SPEC, tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_every_example_is_seen_once_an_epoch_although_epochs_end_inside_steps(tmp_path):
    """Goyal 2017, remark 4: one permutation an epoch; 100 examples in batches of 16 are 6.25 steps."""
    seen = []
    task = linear_task(num_examples=100)
    original = task.train.fetch

    class Watching:
        def __len__(self):
            return 100

        def fetch(self, indices):
            seen.extend(indices.tolist())
            return original(indices)

    spec = replace(SPEC, max_steps=25, monitor=False, microbatch=None)
    train(replace(task, train=Watching()), spec, tmp_path)
    assert len(seen) == 400
    for epoch in range(4):
        assert sorted(seen[100 * epoch : 100 * epoch + 100]) == list(range(100))


def test_goals_are_crossed_where_log_interpolation_says(tmp_path):
    assert crossing((10, 4.0), (20, 1.0), 2.0) == pytest.approx(15.0)
    assert crossing((10, 1.0), (20, -1.0), 0.0) == pytest.approx(15.0), "a loss that can be negative: linear"
    task = linear_task()
    record = train(task, replace(SPEC, goals=(1.0, 0.5), max_steps=500), tmp_path)
    lines = read_lines(tmp_path / "evaluations.jsonl")
    assert record.status == "reached" and record.steps == lines[-1]["step"]
    for goal, found in zip((1.0, 0.5), record.crossings, strict=True):
        later = next(index for index, line in enumerate(lines) if line["goal_loss"] <= goal)
        assert lines[later - 1]["step"] <= found <= lines[later]["step"]
    gaps = [(b["step"] - a["step"]) / b["step"] for a, b in itertools.pairwise(lines) if b["step"] > 50]
    assert all(gap <= 0.02 for gap in gaps), "evaluated at least every 2 % of the steps"


def test_a_run_that_cannot_win_stops_and_is_a_bound(tmp_path):
    spec = replace(SPEC, goals=(1.0, 1e-9), stop_after=(5.0, 30.0), max_steps=500)
    record = train(linear_task(), spec, tmp_path)
    assert record.status == "stopped" and record.steps >= 30 and record.crossings[1] is None


def test_divergence_is_said_and_ends_the_run(tmp_path):
    record = train(linear_task(), replace(SPEC, lr=1e6, goals=(1e-9,), max_steps=5000), tmp_path)
    assert record.status == "diverged" and record.steps < 200
    record = train(linear_task(), replace(SPEC, lr=1e6, evaluate_epochs=True, monitor=False), tmp_path / "epochs")
    assert record.status == "diverged"


def test_a_finished_run_is_never_trained_again(tmp_path):
    first = train(linear_task(), SPEC, tmp_path)

    class Untouchable:
        def __getattr__(self, _):
            raise AssertionError("trained again")

    task = linear_task()
    assert train(replace(task, model=Untouchable()), SPEC, tmp_path) == first


def test_another_runs_folder_is_refused(tmp_path):
    train(linear_task(), SPEC, tmp_path)
    with pytest.raises(RecordError, match="belongs to another run"):
        train(linear_task(), replace(SPEC, lr=0.1), tmp_path)


def test_a_batch_larger_than_the_data_is_refused_with_the_largest_allowed(tmp_path):
    with pytest.raises(ConfigError, match="at most 256"):
        train(linear_task(), replace(SPEC, batch=512), tmp_path)


def test_epochs_are_evaluated_once_each_on_all_held_out_examples(tmp_path):
    task = linear_task(num_examples=100)
    steps = task.recipe.resolve(16, 100).num_steps
    spec = replace(SPEC, evaluate_epochs=True, schedule="goyal", max_steps=steps, monitor=False)
    record = train(task, spec, tmp_path, keep_model=True)
    assert [row["epoch"] for row in record.epochs] == [1, 2, 3, 4, 5, 6]
    x, y = (tensor.double().numpy() for tensor in task.held_out.tensors)
    weights = next(iter(final_weights(tmp_path).values()))[0].double().numpy()
    assert record.epochs[-1]["held_out_loss"] == pytest.approx(0.5 * np.mean((x @ weights - y) ** 2), rel=1e-5)


def test_the_goal_examples_are_the_same_for_every_run():
    task = linear_task()
    assert torch.equal(goal_indices(task), goal_indices(task)) and len(set(goal_indices(task).tolist())) == 128


def test_a_checkpoint_that_counts_on_lost_lines_is_not_gone_on_with(tmp_path):
    def kill(progress, _loss, _monitor):
        if progress.step == 31:
            raise KilledError

    with pytest.raises(KilledError):
        train(linear_task(), SPEC, tmp_path, checkpoint_seconds=0.0, on_step=kill)
    (tmp_path / "steps.jsonl").unlink()
    with pytest.raises(CheckpointError, match="has lost"):
        train(linear_task(), SPEC, tmp_path)
