"""Cells run in real processes, once each, with the same bits however many run at once, and die with their parent."""

import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest

from drawn_task import write_task
from largebatch.errors import LargebatchError
from largebatch.records.files import read_lines
from largebatch.records.schema import RunSpec
from largebatch.study.launch import Launcher
from oracles.drawn_front import draw_problem

SPEC = RunSpec(task="drawn", role="test", batch=16, lr=0.01, seed=0, max_steps=60, trace_loss=True)
SPECS = [replace(SPEC, seed=seed, batch=batch) for seed in (0, 1) for batch in (8, 32)]


@pytest.fixture
def task(tmp_path):
    inputs, targets, _ = draw_problem(0)
    return str(write_task(tmp_path / "task", inputs[:256], targets[:256]))


def test_one_process_or_three_give_the_same_bits(tmp_path, task):
    for jobs in (1, 3):
        Launcher(task=task, data=None, out=tmp_path / str(jobs), jobs=jobs).run(SPECS)
    for spec in SPECS:
        for name in ("run.json", "evaluations.jsonl"):
            one, three = (tmp_path / jobs / "cells" / spec.key / name for jobs in ("1", "3"))
            assert one.read_bytes() == three.read_bytes()


def test_records_come_back_in_the_order_asked_and_nothing_is_trained_twice(tmp_path, task):
    launcher = Launcher(task=task, data=None, out=tmp_path / "out", jobs=2)
    assert [record.spec for record in launcher.run([*SPECS, SPECS[0]])] == [*SPECS, SPECS[0]]
    again = Launcher(task="no such task", data=None, out=tmp_path / "out", jobs=2)
    assert [record.spec for record in again.run(SPECS)] == SPECS
    for spec in SPECS:
        events = [line["event"] for line in read_lines(launcher.folder(spec) / "attempts.jsonl")]
        assert events == ["started", "finished"]


def test_what_a_cell_raises_reaches_the_user_and_the_others_are_kept(tmp_path, task):
    launcher = Launcher(task=task, data=None, out=tmp_path / "out", jobs=2)
    with pytest.raises(LargebatchError, match="batch 9999 is larger than the training data"):
        launcher.run([SPECS[0], replace(SPEC, batch=9999, max_steps=1)])
    launcher.run([SPECS[0]])


def _run_for_long(out, task):
    os.setpgrp()
    long = [replace(SPEC, seed=seed, max_steps=10_000_000) for seed in range(2)]
    Launcher(task=task, data=None, out=out, jobs=2, checkpoint_seconds=0.05).run(long)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(not os.path.exists("/proc"), reason="needs /proc")
def test_cells_die_with_a_parent_that_is_killed(tmp_path, task):
    parent = multiprocessing.get_context("fork").Process(target=_run_for_long, args=(tmp_path / "out", task))
    parent.start()
    deadline = time.monotonic() + 60
    pids = []
    while len(pids) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
        pids = [line["pid"] for path in (tmp_path / "out").rglob("attempts.jsonl") for line in read_lines(path)]
    assert len(pids) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_alive, pids)), "an orphan would go on writing into a study that another process resumes"


def test_a_record_whose_lines_are_gone_is_not_believed(tmp_path, task):
    launcher = Launcher(task=task, data=None, out=tmp_path / "out")
    launcher.run([SPEC])
    path = launcher.folder(SPEC) / "evaluations.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    with pytest.raises(LargebatchError, match="has lost lines"):
        Launcher(task=task, data=None, out=tmp_path / "out").run([SPEC])
