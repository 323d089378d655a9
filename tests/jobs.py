"""Run `largebatch train` on several workers, kill some, and tell from the weights which examples were seen.

The task has a parameter for each example, whose gradient is 1 where the example is in the batch and 0 elsewhere: the
final weights are a ledger of what was seen at which learning rate. Beside it a small network with dropout learns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # imported by DDP, and what follows by checkpoints: once here instead of in every worker
import torch.distributed.checkpoint.state_dict

import largebatch.cli.app
import largebatch.train.checkpoint_files
import largebatch.train.loop
from largebatch.records.files import read_lines
from largebatch.train.checkpoint import load_weights
from oracles.recipe_shuffle import stream

NUM_EXAMPLES, BATCH, EPOCHS, MOMENTUM = 140, 24, 6, 0.9
STEPS = NUM_EXAMPLES * EPOCHS // BATCH
"""Of the whole run: 35, and all epochs but the last end inside a step."""

LEDGER_TASK = f"""
import os
import time

import torch
from torch import nn

import largebatch as lb

draw = torch.Generator().manual_seed(1)
inputs = torch.randn({NUM_EXAMPLES} + 40, 6, generator=draw)
labels = (inputs[:, 0] > 0).long()
examples = torch.arange({NUM_EXAMPLES} + 40)


class Ledger(nn.Module):
    def __init__(self):
        super().__init__()
        self.entries = nn.Parameter(torch.zeros({NUM_EXAMPLES}))
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, x, example):
        return self.net(x), self.entries[example % {NUM_EXAMPLES}]


# A job that has lost a node must not end before the node is back.
pause = float(os.environ.get("LEDGER_PAUSE_ALONE", 0)) if os.environ.get("WORLD_SIZE") == "1" else 0


def loss(model, batch):
    time.sleep(pause if model.training else 0)
    x, label, example = batch
    logits, entries = model(x, example)
    return nn.functional.cross_entropy(logits, label, reduction="sum") + entries.sum()


def errors(model, batch):
    return (model(batch[0], batch[2])[0].argmax(1) != batch[1]).sum()


def split(rows):
    return lb.TensorSplit((inputs[rows], labels[rows], examples[rows]))


task = lb.Task(
    name="ledger", train=split(slice(None, {NUM_EXAMPLES})), held_out=split(slice({NUM_EXAMPLES}, None)), model=Ledger,
    loss=loss, errors=errors,
    recipe=lb.Recipe(
        reference_batch={BATCH}, reference_lr=0.125, epochs={EPOCHS}, warmup_epochs=2.0, decay_epochs=(3, 5),
        momentum={MOMENTUM}, nesterov=False, weight_decay=0.0,
    ),
)
"""

OFTEN = ["--microbatch", "4", "--checkpoint-seconds", "0", "--monitor-every", "1"]
"""A checkpoint after every step, each written while the next is taken; every step measured, and so recorded."""


def write_ledger_task(folder: Path) -> Path:
    path = folder / "ledger.py"
    path.write_text(LEDGER_TASK)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ForkedJob:
    """`largebatch train` on forked workers, as torchrun starts them but without seconds of imports."""

    def __init__(self, world_size: int, arguments: list[object], log: Path) -> None:
        context = multiprocessing.get_context("fork")
        port = free_port()
        self.workers = [
            context.Process(target=_work, args=(rank, world_size, port, [str(word) for word in arguments], log))
            for rank in range(world_size)
        ]
        for worker in self.workers:
            worker.start()

    def wait(self, seconds: float = 120.0) -> list[int | None]:
        """Exit codes by rank; who has not ended after `seconds` is killed and fails the test."""
        deadline = time.monotonic() + seconds
        for worker in self.workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, worker in enumerate(self.workers) if worker.is_alive()]
        self.kill()
        assert not hung, f"workers {hung} did not end"
        return [worker.exitcode for worker in self.workers]

    def kill(self, *ranks: int) -> None:
        """Kill -9 these workers, or all."""
        for worker in [self.workers[rank] for rank in ranks] or self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        if not ranks:
            for worker in self.workers:
                worker.join()

    def is_running(self) -> bool:
        return all(worker.is_alive() for worker in self.workers)


def _work(rank: int, world_size: int, port: int, arguments: list[str], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    code = 1
    try:
        code = largebatch.cli.app.run(arguments)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def num_steps(folder: Path) -> int:
    """Steps whose record is written."""
    return len(read_lines(folder / "steps.jsonl"))


def newest_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    return max((int(path.name[5:14]) for path in (folder / "checkpoints").glob("step-*")), default=0)


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Poll until the condition holds; a test that waits in vain fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.002)


def ledger_of(folder: Path) -> np.ndarray:
    """What the ledger must hold after the recorded steps: plain SGD with momentum, in float64.

    Goyal 2017, eq. 10 (v <- m v + g; w <- w - lr v), with g = 1/kn for each example in the step and 0 elsewhere, the
    examples those of an independent shuffle: one permutation an epoch, every example once.
    """
    weights = np.zeros(NUM_EXAMPLES)
    velocity = np.zeros(NUM_EXAMPLES)
    for number, line in enumerate(read_lines(folder / "steps.jsonl")):
        assert line["step"] == number + 1
        gradient = np.zeros(NUM_EXAMPLES)
        np.add.at(gradient, stream(NUM_EXAMPLES, 0, number * BATCH, BATCH), 1 / BATCH)
        velocity = MOMENTUM * velocity + gradient
        weights -= line["lr"] * velocity
    return weights


def assert_every_example_was_seen_in_its_place(folder: Path) -> None:
    entries = load_weights(folder / "model.pt")["entries"].double().numpy()
    np.testing.assert_allclose(entries, ledger_of(folder), rtol=5e-6)
    # The tolerance is float32's over 35 steps; one example more, or at another step, shows:
    lines = read_lines(folder / "steps.jsonl")
    assert len(lines) == STEPS
    least = min(line["lr"] for line in lines) / BATCH
    assert np.abs(entries).max() * 5e-6 < least / 10


def assert_same_run(folder: Path, other: Path, tolerance: float = 0.0) -> None:
    """The same weights, bit for bit unless a tolerance is given, and then the same records too."""
    ours, theirs = load_weights(folder / "model.pt"), load_weights(other / "model.pt")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if tolerance:
            torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(value, theirs[name]), name
    if not tolerance:
        for name in ("steps.jsonl", "evaluations.jsonl", "run.json"):
            assert (folder / name).read_bytes() == (other / name).read_bytes(), name
