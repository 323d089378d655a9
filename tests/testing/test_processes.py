"""Is a worker that raises, dies or hangs one clear error in time, and is no process left behind?"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from largebatch.errors import ConfigError
from largebatch.testing import WorkerFailedError, check_parallel_equivalence
from largebatch.testing.processes import pick_start_method, run_workers
from testing.setups import check, examples, setup

TESTS = Path(__file__).resolve().parents[1]


def raises(rank: int, step: int) -> None:
    if dist.get_world_size() == 2 and rank == 1 and step == 1:
        raise ArithmeticError("no such luck")


def hangs(rank: int, step: int) -> None:
    if dist.get_world_size() == 2 and rank == 1 and step == 1:
        threading.Event().wait()


def is_killed(rank: int, step: int) -> None:
    if dist.get_world_size() == 2 and rank == 1 and step == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def no_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def test_a_step_that_raises_names_the_worker_and_the_step():
    with pytest.raises(
        WorkerFailedError, match="step 1 on worker 1 of 2 raised ArithmeticError: no such luck"
    ) as error:
        check(setup(begin=raises), examples(), (1, 2))
    assert "test_processes.py, line" in str(error.value)
    assert "Traceback" in error.value.__notes__[0]
    assert no_children()


def test_a_worker_that_was_killed_is_named_with_the_signal():
    with pytest.raises(WorkerFailedError, match="worker 1 of 2 was killed by signal 9 in step 1"):
        check(setup(begin=is_killed), examples(), (1, 2))
    assert no_children()


def hangs_at_once(rank: int, world_size: int, say: Any) -> None:
    say("step 7")
    if rank == 1:
        threading.Event().wait()
    dist.barrier()


def test_a_step_that_hangs_ends_in_time_and_says_which_worker_stands_where():
    # 8 s start two workers on a busy machine. The worker that waits in torch's barrier is not blamed.
    with pytest.raises(WorkerFailedError, match=r"worker 1 of 2 did not end step 7 within timeout=8 s") as error:
        run_workers(2, hangs_at_once, (), timeout=8.0, start_method="fork")
    assert "threading.py" in str(error.value)
    assert "worker 0 is in step 7" in str(error.value)
    assert no_children()


def test_a_hanging_step_of_the_users_is_named():
    with pytest.raises(WorkerFailedError, match="worker 1 of 2 did not end step 1 within timeout="):
        check(setup(begin=hangs), examples(), (1, 2), timeout=15.0)


HANGING = """
import os, sys, threading
sys.path.insert(0, {tests!r})
from largebatch.testing.processes import run_workers

def body(rank, world_size, say):
    if os.fork() == 0:  # as a data loader's worker
        threading.Event().wait()
    os.write({fd}, b"x")
    threading.Event().wait()

run_workers(2, body, (), timeout=600.0, start_method="fork")
"""


def test_no_worker_outlives_a_parent_that_was_killed():
    ours, theirs = os.pipe()
    script = HANGING.format(tests=str(TESTS), fd=theirs)
    parent = subprocess.Popen([sys.executable, "-c", script], pass_fds=[theirs], stdin=subprocess.DEVNULL)
    os.close(theirs)
    try:
        begun = b""
        while len(begun) < 2:  # both workers are there, each with a process of its own
            ready, _, _ = select.select([ours], [], [], 120.0)
            assert ready, "the workers did not start"
            begun += os.read(ours, 1)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        # The pipe ends when nobody holds it: neither a worker nor what a worker started.
        ready, _, _ = select.select([ours], [], [], 60.0)
        assert ready
        assert os.read(ours, 1) == b""
    finally:
        parent.kill()
        parent.wait()
        os.close(ours)


def test_a_spawned_worker_gives_the_same_answer_and_a_closure_cannot_be_spawned():
    with pytest.raises(
        ConfigError, match=r"start_method='spawn' asks for it, and what they are sent cannot be pickled"
    ):
        check_parallel_equivalence(setup(), examples(), (1, 2), start_method="spawn")


def test_a_process_with_threads_or_a_job_of_its_own_is_not_forked():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert pick_start_method(None, 1) == "spawn"
        with pytest.raises(ConfigError, match=r"because this process runs \d+ threads"):
            pick_start_method(None, lambda: None)
    finally:
        done.set()
        thread.join()
    with pytest.raises(ConfigError, match="start_method='thread' is not to be had here"):
        pick_start_method("thread", 1)  # pyright: ignore[reportArgumentType]


SPAWNED = """
import sys
sys.path.insert(0, {tests!r})
from largebatch.testing import check_parallel_equivalence
from testing.spawned import make
from testing.setups import examples

if __name__ == "__main__":
    report = check_parallel_equivalence(make, examples(), (1, 2), steps=1, start_method="spawn")
    raise SystemExit(0 if report.equal else str(report))
"""


def test_a_script_can_spawn_its_workers(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(SPAWNED.format(tests=str(TESTS)))
    result = subprocess.run([sys.executable, path], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
