"""Does `largebatch allreduce` print one table for all workers, and say what is wrong in one sentence?"""

import json
import os
import signal
import subprocess
import sys

import pytest

from largebatch.cli.allreduce import _check_place
from largebatch.cli.app import run
from largebatch.parallel.choose import Choices

CLEAN = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def call(*arguments, launcher=(), **environment):
    return subprocess.run(
        [sys.executable, *launcher, "-m", "largebatch", "allreduce", *map(str, arguments)],
        capture_output=True, text=True, timeout=200, env=CLEAN | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def test_under_torchrun_one_worker_prints_and_writes_the_table(tmp_path):
    out = tmp_path / "new" / "table.json"
    result = call(
        "--calibrate", "--seconds", 0.3, "--json", "--out", out,
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 1, "the other worker printed too"
    choices = Choices.from_record(json.loads(lines[0]))
    assert choices.hosts == (0, 0)
    assert Choices.from_record(json.loads(out.read_text())) == choices


def test_without_torchrun_it_starts_workers_here_and_prints_a_table_for_people():
    result = call("--calibrate", "--workers", 3, "--seconds", 0.3)
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stderr.split())
    assert "over 3 ranks on 1 host" in said and "choice:" in said and "us a message" in said
    assert "halving_doubling" in said and "hierarchical" not in said
    assert result.stdout == ""


def test_the_look_at_the_place_of_the_table_leaves_no_empty_one(tmp_path):
    (tmp_path / "old.json").write_text("old")
    for name in ("new.json", "old.json"):
        _check_place(tmp_path / name)
    assert not (tmp_path / "new.json").exists() and (tmp_path / "old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ((), {}, "--calibrate measures"),
        (("--calibrate",), {}, "--workers 4"),
        (("--calibrate", "--workers", 2), {"RANK": "0", "WORLD_SIZE": "2"}, "Leave it out"),
        (("--calibrate",), {"RANK": "0"}, "MASTER_ADDR"),
        (("--calibrate", "--workers", 2, "--out", "/dev/null/table.json"), {}, "another --out"),
        (("--calibrate", "--workers", 1), {}, "greater than or equal to 2"),
        (("--calibrate", "--workers", 2, "--seconds", 0), {}, "greater than or equal to 0.1"),
        (("--calibrate", "--workers", 2, "--seconds", "inf"), {}, "--seconds is 3600 at most"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(arguments, environment, says, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert run(["allreduce", *map(str, arguments)]) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capsys.readouterr()
    assert says in " ".join(said.err.split()) and said.out == ""
