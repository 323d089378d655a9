"""Every verb does its job, teaches in its --help, and keeps its flags."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from drawn_task import write_task
from largebatch.cli.app import app
from largebatch.records.files import read_lines
from oracles.drawn_front import draw_problem

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "largebatch.cli"]


def call(*arguments, **options):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)


def flags():
    """Verb -> its arguments and options, as typed."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        verb: sorted(flag for parameter in command.params for flag in parameter.opts if parameter.name != "help")
        for verb, command in commands.items()
    }


def test_the_flags_are_what_they_were():
    golden = json.loads((ROOT / "tests" / "golden" / "cli_flags.json").read_text())
    assert flags() == golden, "a flag changed: if that is meant, change tests/golden/cli_flags.json with it"


@pytest.mark.parametrize("verb", ["study", "train", "report", "simulate", "allreduce", "tasks"])
def test_help_teaches_by_example(verb):
    result = call(verb, "--help")
    assert result.returncode == 0
    if verb != "tasks":
        assert f"largebatch {verb} " in result.stdout and "Example" in result.stdout


def test_no_verb_is_a_page_of_help_and_not_a_crash():
    result = call()
    assert result.returncode in (0, 2) and "study" in result.stdout + result.stderr


def test_tasks_are_listed_with_what_they_are():
    lines = call("tasks").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "detection", "digits", "fashion-mnist", "imagenet", "imagenet-resnet101", "imagenet-resnet18", "mnist",
        "openclipart", "stamps",
    ]  # fmt: skip
    assert all(len(line.split()) > 5 for line in lines)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    inputs, targets, _ = draw_problem(5)
    return write_task(tmp_path_factory.mktemp("task"), inputs, targets, epochs=40)


def test_train_prints_every_number_with_its_rule_and_measures_the_noise(tmp_path):
    result = call("train", "digits", "--batch", 32, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stderr.split())
    for word in ("Goyal 2017", "warmup_steps", "held-out error", "B_simple"):
        assert word in text
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [row["epoch"] for row in record["epochs"]] == list(range(1, 11))
    assert record["epochs"][-1]["error"] < 0.05
    assert len(read_lines(tmp_path / "run" / "steps.jsonl")) == record["steps"]
    assert result.stdout.strip() == str(tmp_path / "run" / "run.json")


SHORT = ("--epochs", 10)  # 1,280 steps


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """The short training that nobody stops."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert call("train", task, *SHORT, "--out", out).returncode == 0
    return out


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_training_that_is_stopped_goes_on_where_it_was(tmp_path, task, whole, how):
    process = subprocess.Popen(
        [*COMMAND, *map(str, ("train", task, *SHORT, "--out", tmp_path / "out"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while len(read_lines(tmp_path / "out" / "steps.jsonl")) < 100 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, how)
    _, err = process.communicate()
    if how == signal.SIGKILL:
        assert process.returncode == -how
    else:
        assert process.returncode == 130 and "run the same command again" in " ".join(err.split())
    assert not (tmp_path / "out" / "run.json").exists()
    result = call("train", task, *SHORT, "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    for name in ("run.json", "steps.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (whole / name).read_bytes()
    assert "B_simple" in result.stderr


def test_train_says_when_it_diverges(tmp_path, task):
    result = call("train", task, "--lr", 1e6, "--out", tmp_path / "out")
    assert result.returncode == 2 and "diverged at step" in " ".join(result.stderr.split())


def test_the_example_of_an_own_task_is_studied(tmp_path):
    out = tmp_path / "out"
    result = call("study", ROOT / "examples" / "own_task.py", "--out", out, "--jobs", 2, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == json.loads((out / "result.json").read_text())
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    again = call("report", out)
    assert again.returncode == 0 and again.stdout.strip() == str(out / "report.html")
    assert (out / "report.html").read_bytes() == page, "the page is drawn from result.json alone"


def test_a_budget_ends_a_study_early_and_says_what_it_left_out(tmp_path, task):
    result = call("study", task, "--out", tmp_path / "out", "--jobs", 2, "--budget", 0.05)
    assert result.returncode == 0, result.stderr
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    assert any("budget" in warning for warning in document["warnings"])
    assert "note: The budget" in result.stderr
