"""Does a model in another form (translated, by pixel, in shares, accumulating) train to the same weights?

The oracle is the same run in the plain form, and for several workers SGD in float64 numpy (Goyal 2017, eq. 2).
"""

import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # once here instead of in every worker
from torch import nn

from helpers import linear_task
from jobs import (
    OFTEN,
    ForkedJob,
    assert_every_example_was_seen_in_its_place,
    assert_same_run,
    newest_checkpoint,
    num_steps,
    wait_for,
    write_ledger_task,
)
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sampler import ShuffledStream
from largebatch.records.files import read_lines
from largebatch.records.schema import RunSpec
from largebatch.tasks.task import Task, TensorSplit, count_wrong, cross_entropy_sum
from largebatch.train.checkpoint import load_weights
from largebatch.train.loop import StoppedError, train
from largebatch.train.spread import Execution
from largebatch.train.workers import Workers
from workers import on_workers

PICTURES = RunSpec(
    task="pictures", role="test", batch=16, microbatch=8, lr=0.02, seed=3, max_steps=12, monitor=True
)  # fmt: skip


def make_network():
    # More channels than one and filters of 3 x 3: by pixel and by channel they lie differently in memory.
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, stride=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(54, 3),
    )  # fmt: skip


def pictures_task():
    draw = torch.Generator().manual_seed(2)
    images = torch.randn(100, 3, 8, 8, generator=draw)
    labels = images.mean((2, 3)).argmax(1)
    return Task(
        name="pictures", train=TensorSplit((images[:64], labels[:64])),
        held_out=TensorSplit((images[64:], labels[64:])), model=make_network, loss=cross_entropy_sum,
        errors=count_wrong, recipe=Recipe(reference_batch=16, reference_lr=0.02, epochs=3, warmup_epochs=1.0),
        num_goal_examples=32,
    )  # fmt: skip


def trained(folder, spec=PICTURES, *, upto=None, **execution):
    """The final weights; stopped after step `upto` and gone on with, where that is given."""

    def run(**options):
        train(pictures_task(), spec, folder, execution=Execution(**execution), keep_model=True, **options)

    if upto is not None:
        seen = []
        with pytest.raises(StoppedError):
            run(on_step=lambda progress, *_: seen.append(progress.step), wants_stop=lambda: len(seen) >= upto - 1)
        assert seen[-1] == upto
    run()
    return load_weights(folder / "model.pt")


def test_pictures_by_pixel_train_to_the_same_weights(tmp_path):
    """Only the order of sums differs: float32 over 12 steps with Nesterov momentum."""
    plain = trained(tmp_path / "plain", replace(PICTURES, evaluate_epochs=True))
    by_pixel = trained(tmp_path / "by pixel", replace(PICTURES, evaluate_epochs=True), channels_last=True)
    for name, value in plain.items():
        torch.testing.assert_close(by_pixel[name], value, rtol=1e-4, atol=1e-6)
    ours, theirs = (read_lines(tmp_path / name / "steps.jsonl") for name in ("by pixel", "plain"))
    assert len(ours) == len(theirs) == 12
    for line, other in zip(ours, theirs, strict=True):
        # Moments are differences of larger numbers: what float32 leaves of them, relative to tr(Sigma).
        assert line == pytest.approx(other, rel=1e-3, abs=1e-3 * abs(other["trace_cov"]))


def test_pictures_by_pixel_go_on_from_a_checkpoint_bit_for_bit(tmp_path):
    """The velocity must come back as it lies in memory: torch's fused step on the CPU looks at no strides."""
    whole = trained(tmp_path / "whole", channels_last=True)
    resumed = trained(tmp_path / "resumed", channels_last=True, upto=7)
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.proofs
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler: apt-get install g++"
)
def test_a_translated_model_trains_to_the_same_weights_and_goes_on(tmp_path, monkeypatch):
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "compile_threads", 1)  # no pool of processes that outlives the test
    spec = replace(PICTURES, evaluate_epochs=True)
    plain = trained(tmp_path / "plain", spec)
    before = len(compiled_frames())
    translated = trained(tmp_path / "translated", spec, upto=5, compile=True)
    assert len(compiled_frames()) > before, "nothing was translated"
    for name, value in plain.items():
        torch.testing.assert_close(translated[name], value, rtol=1e-4, atol=1e-6)
    lines = read_lines(tmp_path / "translated" / "steps.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 13)), "the monitor measures it as any model"


def compiled_frames():
    """What torch.compile has translated so far in this process."""
    from torch._dynamo.utils import counters

    return list(range(counters["stats"]["unique_graphs"]))


ACCUMULATING = RunSpec(
    task="linear", role="test", batch=24, microbatch=4, lr=0.05, seed=3, max_steps=40, monitor=True
)  # fmt: skip


def oracle_sgd(task, spec):
    """Plain SGD on the mean loss, in float64 numpy (Goyal 2017, eq. 2)."""
    x, y = (tensor.double().numpy() for tensor in task.train.tensors)
    torch.manual_seed(spec.seed)
    weights = task.model()[-1].weight.detach().double().numpy()[0]
    shuffle = ShuffledStream(len(x), spec.seed)
    for step in range(spec.max_steps):
        rows = shuffle.indices(step * spec.batch, spec.batch)
        weights = weights - spec.lr * ((x[rows] @ weights - y[rows])[:, None] * x[rows]).mean(0)
    return weights


def accumulating(rank, folder, every):
    workers = Workers(rank=rank, world_size=2, group=dist.group.WORLD)
    task = linear_task()
    if rank:  # in whose eyes measuring costs next to nothing: alone it would measure at another cadence
        loss = task.loss

        def slow(model, batch):
            time.sleep(0.01)
            return loss(model, batch)

        task = replace(task, loss=slow)
    sums = count_sums_of_gradients()
    train(task, ACCUMULATING, folder, workers=workers, monitor_every=every, keep_model=True)
    return sums


def count_sums_of_gradients():
    """Count from here on the forwards after which DDP sends gradients, and those after which it keeps them."""
    from torch.nn.parallel import DistributedDataParallel

    found = {"sent": 0, "kept": 0}
    forward = DistributedDataParallel.forward

    def counting(self, *inputs):
        found["sent" if self.require_backward_grad_sync else "kept"] += 1
        return forward(self, *inputs)

    DistributedDataParallel.forward = counting  # in a forked worker, which ends with the test
    return found


def test_workers_that_accumulate_send_gradients_once_a_step_at_a_cadence_they_agree_on(tmp_path):
    """Three microbatches each. A worker that measured alone, or sent alone, would wait until the test's time is up."""
    auto, always = ((tmp_path / name) for name in ("auto", "always"))
    assert on_workers(2, accumulating, auto, "auto") == [{"sent": 40, "kept": 80}] * 2
    on_workers(2, accumulating, always, 1)
    weights = load_weights(auto / "model.pt")
    flat = torch.cat([value.flatten() for value in weights.values()]).double().numpy()
    np.testing.assert_allclose(flat, oracle_sgd(linear_task(), ACCUMULATING), rtol=2e-5)  # float32 over 40 steps
    lines = {line["step"]: line for line in read_lines(always / "steps.jsonl")}
    measured = read_lines(auto / "steps.jsonl")
    assert len(lines) == 40 and 11 <= len(measured) < 40, "10 steps decide the cadence, and then some are left out"
    for line in measured:
        assert line == pytest.approx(lines[line["step"]], rel=1e-6)


def test_a_sharded_run_that_is_killed_goes_on_as_if_it_never_was(tmp_path):
    """By the command line; the task's weights are a ledger of the examples seen."""
    task = write_ledger_task(tmp_path)

    def job(name):
        return ForkedJob(
            2, ["train", task, *OFTEN, "--parallel", "fsdp", "--out", tmp_path / name], tmp_path / f"{name}.log"
        )

    assert job("whole").wait() == [0, 0], (tmp_path / "whole.log").read_text()
    killed = job("killed")
    try:
        wait_for(lambda: num_steps(tmp_path / "killed") >= 14 or not killed.is_running())
        seen = num_steps(tmp_path / "killed")
        killed.kill(1)
        killed.wait()  # the other ends by itself
    finally:
        killed.kill()
    assert not (tmp_path / "killed" / "run.json").exists(), "killed after its end"
    assert newest_checkpoint(tmp_path / "killed") >= seen - 2 >= 12, (tmp_path / "killed.log").read_text()
    assert job("killed").wait() == [0, 0], (tmp_path / "killed.log").read_text()
    assert_every_example_was_seen_in_its_place(tmp_path / "killed")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
