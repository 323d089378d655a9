"""Is a job that is killed, again and again, the job that never was?

Workers are killed with SIGKILL at random moments of a run that saves after every step. What is left at the end is
compared to the run that nobody killed, and its examples to an independent shuffle.
"""

import random
from pathlib import Path

import pytest

from jobs import (
    OFTEN,
    STEPS,
    ForkedJob,
    assert_every_example_was_seen_in_its_place,
    assert_same_run,
    newest_checkpoint,
    num_steps,
    wait_for,
    write_ledger_task,
)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_ledger_task(tmp_path_factory.mktemp("task"))


def arguments(task: Path, out: Path) -> list[object]:
    return ["train", task, *OFTEN, "--out", out]


def train_without_kills(world_size: int, task: Path, out: Path) -> Path:
    codes = ForkedJob(world_size, arguments(task, out), out.with_suffix(".log")).wait()
    assert codes == [0] * world_size, out.with_suffix(".log").read_text()
    return out


def train_with_kills(world_sizes: list[int], task: Path, out: Path, seed: int) -> Path:
    """Start, kill and start again, once with each number of workers; the last is left alone."""
    draw = random.Random(seed)
    log = out.with_suffix(".log")
    targets = sorted(draw.sample(range(2, STEPS - 6), len(world_sizes) - 1))
    for world_size, target in zip(world_sizes, targets, strict=False):
        job = ForkedJob(world_size, arguments(task, out), log)
        try:
            wait_for(lambda job=job, target=target: num_steps(out) >= target or not job.is_running())
            seen = num_steps(out)
            job.kill(*([draw.randrange(world_size)] if draw.random() < 0.6 else []))
            job.wait()  # the others end by themselves
        finally:
            job.kill()
        assert not (out / "run.json").exists(), "killed after its end"
        # A step's save begins when the one before it stands: at most this step and the one before are lost.
        assert seen >= target and newest_checkpoint(out) >= seen - 2, log.read_text()
    codes = ForkedJob(world_sizes[-1], arguments(task, out), log).wait()
    assert codes == [0] * world_sizes[-1], log.read_text()
    return out


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """The run that nobody kills, for each number of workers, once."""
    runs: dict[int, Path] = {}

    def get(world_size: int) -> Path:
        if world_size not in runs:
            runs[world_size] = train_without_kills(world_size, task, tmp_path_factory.mktemp("whole") / "run")
        return runs[world_size]

    return get


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_sees_every_example_in_its_place(whole, world_size):
    assert_every_example_was_seen_in_its_place(whole(world_size))
    assert_same_run(whole(world_size), whole(1), tolerance=1e-6)


def test_three_kills_leave_the_run_that_never_was_killed(whole, task, tmp_path):
    run = train_with_kills([2] * 4, task, tmp_path / "run", seed=1)
    assert_every_example_was_seen_in_its_place(run)
    assert_same_run(run, whole(2))


def test_other_numbers_of_workers_go_on_with_the_same_order_and_batch(whole, task, tmp_path):
    run = train_with_kills([2, 1, 3, 2], task, tmp_path / "run", seed=0)
    assert_every_example_was_seen_in_its_place(run)
    assert_same_run(run, whole(1), tolerance=1e-6)


@pytest.mark.proofs
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("world_size", "tolerance"), [(1, 0.0), (2, 0.0), (3, 1e-6)])
def test_twenty_kills_leave_the_run_that_never_was_killed(whole, task, tmp_path, world_size, tolerance):
    """DDP regroups its buckets after its first step, so that from 3 workers on a restart adds in another order."""
    run = train_with_kills([world_size] * 21, task, tmp_path / "run", seed=10 + world_size)
    assert_every_example_was_seen_in_its_place(run)
    assert_same_run(run, whole(world_size), tolerance)
