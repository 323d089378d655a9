"""What is said where examples to be evaluated cannot be read, and where a stop finds weights that are not finite."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from helpers import linear_task
from largebatch.errors import DataError
from largebatch.recipe.sampler import ShuffledStream
from largebatch.records.files import read_json
from largebatch.records.schema import RunSpec
from largebatch.tasks.task import TensorSplit
from largebatch.train.evaluate import goal_indices
from largebatch.train.feed import Feed
from largebatch.train.loop import StoppedError, train
from largebatch.train.workers import Workers
from workers import on_workers

SPEC = RunSpec(task="linear", role="test", batch=8, microbatch=4, lr=0.01, seed=3, max_steps=3, monitor=False)


class Torn(TensorSplit):
    """Examples of which those in `bad` cannot be read, and are named."""

    def __init__(self, tensors, bad):
        super().__init__(tensors)
        self.bad, self.skipped = set(bad), []

    def fetch(self, indices):
        kept = torch.tensor([int(index) not in self.bad for index in indices], dtype=torch.bool)
        self.skipped += [(f"row {int(index)}", "drawn to be bad") for index in indices[~kept]]
        return super().fetch(indices[kept])

    def fetch_augmented(self, indices, draws):
        return self.fetch(indices)

    def take_skipped(self):
        taken, self.skipped = self.skipped, []
        return taken


def torn_held_out():
    task = linear_task(num_examples=48)
    return replace(task, held_out=Torn(tuple(t[:7] for t in task.held_out.tensors), range(7)))


def torn_goals(bad=None):
    task = replace(linear_task(num_examples=400), num_goal_examples=6)
    return replace(task, train=Torn(task.train.tensors, goal_indices(task).tolist() if bad is None else bad))


def said(rank, world_size, make, spec, folder):
    try:
        train(make(), spec, folder, workers=Workers(rank=rank, world_size=world_size, group=dist.group.WORLD))
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize("world_size", [1, 2])
def test_held_out_examples_that_are_all_unreadable_are_named(tmp_path, world_size):
    spec = replace(SPEC, evaluate_epochs=True)
    if world_size == 1:
        with pytest.raises(DataError) as raised:
            train(torn_held_out(), spec, tmp_path)
        sentences = [str(raised.value)]
    else:
        sentences = on_workers(world_size, said, world_size, torn_held_out, spec, tmp_path)
    for sentence in sentences:
        assert "none of the 7 held-out examples of task 'linear' can be read: row 0 (drawn to be bad)" in sentence
        assert "and 2 more. Fetch them again" in sentence


@pytest.mark.parametrize("world_size", [1, 2])
def test_goal_examples_that_are_all_unreadable_are_named(tmp_path, world_size):
    spec = replace(SPEC, trace_loss=True)
    if world_size == 1:
        with pytest.raises(DataError) as raised:
            train(torn_goals(), spec, tmp_path)
        sentences = [str(raised.value)]
    else:
        sentences = on_workers(world_size, said, world_size, torn_goals, spec, tmp_path)
    for sentence in sentences:
        assert "none of the 6 training examples on which goals are measured of task 'linear' can be read" in sentence
        assert f"row {int(goal_indices(torn_goals())[0])} (drawn to be bad)" in sentence


def test_an_unreadable_goal_example_is_its_own_and_no_microbatchs(tmp_path, caplog, monkeypatch):
    """It is named before the first microbatch is asked for, and counted once; no step meets it."""
    task = replace(linear_task(num_examples=400), num_goal_examples=6)
    spec = replace(SPEC, trace_loss=True)
    trained_on = set(ShuffledStream(400, spec.seed).indices(0, spec.batch * spec.max_steps).tolist())
    bad = next(index for index in goal_indices(task).tolist() if index not in trained_on)
    named, step = [], Feed.step

    def noting(feed):
        named.append("left out" in caplog.text)
        return step(feed)

    monkeypatch.setattr(Feed, "step", noting)
    train(torn_goals([bad]), spec, tmp_path)
    assert named == [True] * 3
    assert read_json(tmp_path / "skipped.json") == {f"row {bad}": 1}


def test_a_stop_with_weights_that_are_not_finite_does_not_claim_a_checkpoint(tmp_path):
    spec = replace(SPEC, lr=1e30, max_steps=50)
    asked = iter([False] * 10 + [True] * 40)
    with pytest.raises(StoppedError, match=r"stopped after step 11 of 50; a weight is not finite.*no checkpoint"):
        train(linear_task(), spec, tmp_path, wants_stop=lambda: next(asked))
    assert not list(tmp_path.glob("checkpoint*"))
    asked = iter([False] * 10 + [True] * 40)
    with pytest.raises(StoppedError, match=r"stopped after step 11 of 50; its checkpoint stands\."):
        train(linear_task(), replace(spec, lr=1e-3), tmp_path / "good", wants_stop=lambda: next(asked))
