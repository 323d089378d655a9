"""Does a job of several workers train what one worker trains, evaluate each example once, and end together?

Workers are real gloo processes. What they train is compared to plain SGD in float64 numpy (Goyal 2017, eq. 2), which
knows nothing of workers, and to one worker that accumulates.
"""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # once here instead of in every worker
from torch import nn

from helpers import linear_task
from largebatch.errors import ConfigError, DataError
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sampler import ShuffledStream
from largebatch.records.files import read_json, read_lines
from largebatch.records.schema import RunSpec
from largebatch.tasks.task import Task, TensorSplit, count_wrong, cross_entropy_sum
from largebatch.train.checkpoint import load_weights
from largebatch.train.loop import Run, StoppedError, train
from largebatch.train.spread import Execution
from largebatch.train.workers import Workers, is_already_said
from workers import on_workers

SPEC = RunSpec(task="linear", role="test", batch=24, microbatch=4, lr=0.05, seed=3, max_steps=12, monitor=False)


def here(rank, world_size):
    return Workers(rank=rank, world_size=world_size, group=dist.group.WORLD)


def trained(rank, world_size, make, spec, folder, options):
    train(make(), spec, folder, workers=here(rank, world_size), keep_model=True, **options)


def on(world_size, make, spec, folder, **options):
    """Train on so many workers; return the final weights, flat, in float64."""
    if world_size == 1:
        train(make(), spec, folder, keep_model=True, **options)
    else:
        on_workers(world_size, trained, world_size, make, spec, folder, options)
    weights = load_weights(folder / "model.pt")
    return torch.cat([value.flatten() for value in weights.values()]).double().numpy()


def oracle_sgd(task, spec, kept=lambda rows: rows):
    """Plain SGD on the mean loss over the rows that are kept, in float64 numpy (Goyal 2017, eq. 2)."""
    x, y = (tensor.double().numpy() for tensor in task.train.tensors)
    torch.manual_seed(spec.seed)
    weights = task.model()[-1].weight.detach().double().numpy()[0]
    stream = ShuffledStream(len(x), spec.seed)
    for step in range(spec.max_steps):
        rows = kept(stream.indices(step * spec.batch, spec.batch))
        residual = x[rows] @ weights - y[rows]
        weights = weights - spec.lr * (residual[:, None] * x[rows]).mean(0)
    return weights


@pytest.mark.parametrize(
    ("world_size", "parallel"), [(1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "fsdp"), (3, "fsdp")]
)  # fmt: skip
def test_any_number_of_workers_takes_the_steps_of_the_mean_gradient(tmp_path, world_size, parallel):
    """Microbatches of 5 leave a shorter last one on each worker."""
    execution = Execution(parallel=parallel)
    weights = on(world_size, linear_task, replace(SPEC, microbatch=5), tmp_path, execution=execution)
    np.testing.assert_allclose(weights, oracle_sgd(linear_task(), SPEC), rtol=2e-5)  # float32 over 12 steps


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 6)) for _ in range(2)]
        )
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def dropout_task(num_held_out=41):
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(120 + num_held_out, 6, generator=draw)
    labels = inputs[:, :3].argmax(1)
    return Task(
        name="dropout", train=TensorSplit((inputs[:120], labels[:120])),
        held_out=TensorSplit((inputs[120:], labels[120:])), model=Blocks, loss=cross_entropy_sum, errors=count_wrong,
        recipe=Recipe(reference_batch=8, reference_lr=0.05, epochs=3, warmup_epochs=1.0), num_goal_examples=31,
        max_microbatch=12, augment=lambda batch, draws: (batch[0] + 0.1 * draws[:, :6], batch[1]),
    )  # fmt: skip


DROPOUT = replace(SPEC, task="dropout", schedule="goyal", microbatch=12, monitor=True, max_steps=10)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_dropout_is_the_same_for_one_worker_that_accumulates_and_for_two(tmp_path, parallel):
    """Draws belong to a microbatch's position. Two microbatches of 12 are one worker's two, or one each of two."""
    execution = Execution(parallel=parallel)
    alone = on(1, dropout_task, DROPOUT, tmp_path / "one")
    together = on(2, dropout_task, DROPOUT, tmp_path / "two", execution=execution)
    weights = [load_weights(tmp_path / name / "model.pt") for name in ("one", "two")]
    own = [name for name in weights[0] if "running" in name or "tracked" in name]
    assert own, "running statistics are worker 0's, which saw half as many microbatches: they are not compared"
    for name, value in weights[0].items():
        if name not in own:  # float32 over 10 steps
            torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6)
    assert alone.shape == together.shape
    lines = [read_lines(tmp_path / name / "steps.jsonl") for name in ("one", "two")]
    assert len(lines[0]) == len(lines[1]) == 10
    for ours, theirs in zip(*lines, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            # Moments are differences of larger numbers: what float32 leaves of 10 steps, relative to tr(Sigma).
            assert theirs[key] == pytest.approx(value, rel=1e-3, abs=1e-3 * abs(ours["trace_cov"])), key


class Leaky(TensorSplit):
    """Examples whose index is a multiple of 7 cannot be read."""

    def fetch_augmented(self, indices, draws):
        return self.fetch(indices[indices % 7 != 0])

    def take_skipped(self):
        return []


def leaky_task():
    task = linear_task()
    return replace(task, train=Leaky(task.train.tensors))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_batch_that_lost_examples_is_divided_by_what_is_left_over_all_workers(tmp_path, world_size):
    """Workers lose unequal numbers; positions in the stream count on as if none was lost."""
    weights = on(world_size, leaky_task, replace(SPEC, microbatch=8), tmp_path)
    np.testing.assert_allclose(
        weights, oracle_sgd(linear_task(), SPEC, kept=lambda rows: rows[rows % 7 != 0]), rtol=2e-5
    )


class Gone(TensorSplit):
    """Held-out examples of which row 3 cannot be read; each time it is left out it is named."""

    left_out: ClassVar[list[tuple[str, str]]] = []

    def fetch(self, indices):
        self.left_out.extend([("row 3", "drawn to be bad")] if 3 in indices else [])
        return super().fetch(indices[indices != 3])

    def fetch_augmented(self, indices, draws):
        return self.fetch(indices)

    def take_skipped(self):
        taken = self.left_out[:]
        self.left_out.clear()
        return taken


def gone_task():
    task = linear_task(num_examples=48)
    return replace(task, held_out=Gone(task.held_out.tensors))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_held_out_example_that_cannot_be_read_is_named_and_counted(tmp_path, world_size):
    """12 steps of 24 are 6 passes over 48 examples, each with an evaluation."""
    on(world_size, gone_task, replace(SPEC, evaluate_epochs=True), tmp_path)
    assert read_json(tmp_path / "skipped.json") == {"row 3": 6}


@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_steps_follow_float32_within_its_eight_bits(tmp_path, world_size):
    spec = replace(SPEC, max_steps=3)
    bf16 = on(world_size, linear_task, spec, tmp_path, execution=Execution(precision="bf16"))
    exact = oracle_sgd(linear_task(), spec)
    np.testing.assert_allclose(bf16, exact, rtol=3e-2)  # 3 steps, each rounded by 2^-8
    assert abs(bf16 - exact).max() > 1e-5, "a forward in float32 would agree to 1e-6"


@pytest.mark.parametrize(
    ("world_size", "parallel"), [(1, "ddp"), (2, "ddp"), (3, "ddp"), (2, "fsdp"), (3, "fsdp")]
)  # fmt: skip
def test_every_held_out_example_counts_once_on_any_number_of_workers(tmp_path, world_size, parallel):
    """41 held-out and 31 goal examples, in forwards of 12 at most: uneven shares and uneven numbers of forwards.

    No weight moves (the rate is 1e-30): the oracle is the mean over the examples, in float64 numpy. An example counted
    twice on one worker, as padding to even shares would, moves it.
    """
    task = partial(linear_task, num_examples=120)
    spec = replace(SPEC, lr=1e-30, trace_loss=True, evaluate_epochs=True, max_steps=5)

    def make():
        made = task()
        return replace(
            made, held_out=TensorSplit(tuple(tensor[:41] for tensor in made.held_out.tensors)), max_microbatch=12,
            num_goal_examples=31,
        )  # fmt: skip

    weights = on(world_size, make, spec, tmp_path, execution=Execution(parallel=parallel))
    x, y = (tensor.double().numpy() for tensor in make().held_out.tensors)
    lines = read_lines(tmp_path / "evaluations.jsonl")
    expected = 0.5 * np.mean((x @ weights - y) ** 2)
    assert [line["held_out_loss"] for line in lines if "error" in line] == pytest.approx([expected], rel=1e-6)
    chosen = np.sort(np.random.default_rng(0).permutation(120)[:31])
    x, y = (tensor.double().numpy()[chosen] for tensor in make().train.tensors)
    expected = 0.5 * np.mean((x @ weights - y) ** 2)
    assert [line["goal_loss"] for line in lines if "goal_loss" in line] == pytest.approx([expected] * 6, rel=1e-6)


def stopped(rank, world_size, make, spec, folder, step, asker):
    """Train until worker `asker` wants to stop after so many steps; return where this worker stood then."""
    asked = []

    def wants_stop():
        asked.append(rank == asker)
        return rank == asker and len(asked) > step

    run = Run(make(), spec, folder, workers=here(rank, world_size), wants_stop=wants_stop)
    try:
        run.run()
    except StoppedError as why:
        return run.progress.step, str(why)
    return None


def test_one_worker_asked_to_stop_stops_all_after_the_same_step_and_other_numbers_go_on(tmp_path):
    whole = on(1, dropout_task, DROPOUT, tmp_path / "whole")
    for leg, (world_size, step, asker) in enumerate([(2, 3, 1), (1, 2, 0), (2, 1, 0)]):
        if world_size == 1:
            run = Run(dropout_task(), DROPOUT, tmp_path / "run", wants_stop=iter([False] * step + [True]).__next__)
            with pytest.raises(StoppedError):
                run.run()
            places = [run.progress.step]
        else:
            found = on_workers(
                world_size, stopped, world_size, dropout_task, DROPOUT, tmp_path / "run", step, asker
            )  # fmt: skip
            places = [place for place, _ in found]
        assert set(places) == {[4, 7, 9][leg]}
        assert not (tmp_path / "run" / "run.json").exists()
    resumed = on(1, dropout_task, DROPOUT, tmp_path / "run")
    learned = len(whole) - 13  # all but batch norm's running mean and variance of 6 each, and their count
    assert list(load_weights(tmp_path / "run" / "model.pt")) == list(load_weights(tmp_path / "whole" / "model.pt"))
    ours, theirs = (
        np.concatenate([value.flatten() for name, value in load_weights(tmp_path / run / "model.pt").items()
                        if "running" not in name and "tracked" not in name])
        for run in ("run", "whole")
    )  # fmt: skip
    assert len(ours) == learned and len(resumed) == len(whole)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert [line["step"] for line in read_lines(tmp_path / "run" / "steps.jsonl")] == list(range(1, 11))


def diverging_task(bad_step=6):
    """One example, in the second half of step 6's batch, has no finite target."""
    task = linear_task()
    x, y = (tensor.clone() for tensor in task.train.tensors)
    row = ShuffledStream(len(x), SPEC.seed).indices((bad_step - 1) * SPEC.batch, SPEC.batch)[-1]
    y[row] = float("nan")
    return replace(task, train=TensorSplit((x, y)))


def diverged(rank, world_size, folder):
    spec = replace(SPEC, evaluate_epochs=True)
    record = train(
        diverging_task(), spec, folder, workers=here(rank, world_size), checkpoint_seconds=0.0, keep_model=True
    )  # fmt: skip
    return record.status, record.steps


def test_a_loss_that_one_worker_alone_sees_diverge_ends_all_in_that_step(tmp_path):
    """The checkpoint of the step before stands, and no weights are left for final ones."""
    assert on_workers(2, diverged, 2, tmp_path) == [("diverged", 6)] * 2
    assert max(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == "step-000000005"
    assert not (tmp_path / "model.pt").exists()


class Broken(TensorSplit):
    def __init__(self, tensors, row, error):
        super().__init__(tensors)
        object.__setattr__(self, "row", row)
        object.__setattr__(self, "error", error)

    def fetch(self, indices):
        if self.row in indices.tolist():
            raise self.error
        return super().fetch(indices)


def failing(rank, world_size, folder, kind):
    task = linear_task()
    rows = ShuffledStream(len(task.train), SPEC.seed).indices(2 * SPEC.batch, SPEC.batch)
    broken = replace(task, train=Broken(task.train.tensors, rows[-1], kind("row 99 is gone.")))
    try:
        train(broken, SPEC, folder, workers=here(rank, world_size))
    except Exception as error:
        return type(error).__name__, str(error), is_already_said(error)
    return None


@pytest.mark.parametrize("kind", [DataError, KeyError])
def test_an_example_that_one_worker_cannot_read_ends_all_and_is_said_once(tmp_path, kind):
    first, last = on_workers(2, failing, 2, tmp_path, kind)
    assert last == (kind.__name__, str(kind("row 99 is gone.")), False)
    assert first[0] == "WorkerLostError" and "worker 1 cannot go on: " in first[1] and first[2]


def miscounting(rank, world_size, folder):
    task = replace(linear_task(), count=lambda batch: 2 * len(batch[0]))
    try:
        train(task, SPEC, folder, workers=here(rank, world_size))
    except ConfigError as error:
        return str(error), is_already_said(error)
    return None


def test_what_all_workers_refuse_is_said_by_the_first(tmp_path):
    first, last = on_workers(2, miscounting, 2, tmp_path)
    assert "counts 48 examples in a batch of 24 rows" in first[0] and not first[1]
    assert last == (first[0], True)


def test_a_batch_that_the_workers_do_not_divide_names_the_nearest_that_do(tmp_path):
    with pytest.raises(ConfigError, match=r"24 .* 5 workers. The nearest that can: 20 or 25"):
        Run(linear_task(), SPEC, tmp_path, workers=Workers(world_size=5))


def test_fsdp_on_one_worker_says_how_to_start_several(tmp_path):
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node=2"):
        train(linear_task(), SPEC, tmp_path, execution=Execution(parallel="fsdp"))
