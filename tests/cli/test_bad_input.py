"""Bad input ends in one sentence with the values and what to do, exit code 2, and nothing lost or half-written."""

import dataclasses
import gzip
import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from drawn_task import write_task
from helpers import linear_task
from largebatch.cli.app import run
from largebatch.errors import ConfigError
from largebatch.tasks.task import TensorSplit
from oracles.drawn_front import draw_problem

INPUTS, TARGETS, _ = draw_problem(3)


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        code = run(list(map(str, arguments)))
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return call


def refused(result, *words):
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err.count("error:") == 1, err
    sentence = err[err.index("error:") :]
    for word in words:
        assert word in sentence, sentence
    assert "Traceback" not in err


def test_an_unknown_task_names_the_nearest(cli):
    refused(cli("study", "fashion-mnits"), "fashion-mnits", "Did you mean 'fashion-mnist'?")


def test_a_missing_data_file_names_the_paths_and_the_commands(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(cli("study", "fashion-mnist", "--data", "empty"), "empty", "fetch_data.sh fashion-mnist")
    assert not (tmp_path / "largebatch-out").exists(), "nothing is written before the input is known to be good"


def test_a_truncated_data_file_names_file_and_sizes(cli, tmp_path, fashion_mnist_dir):
    shutil.copytree(fashion_mnist_dir, tmp_path / "cut")
    file = next((tmp_path / "cut").glob("train-images*"))
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    file.write_bytes(gzip.compress(data[:-1000], compresslevel=1) if file.suffix == ".gz" else data[:-1000])
    refused(cli("study", "fashion-mnist", "--data", tmp_path / "cut"), file.name, "47,040,016", "47,039,016")


def test_a_batch_larger_than_the_data(cli):
    refused(cli("train", "digits", "--batch", 5000), "5000", "at most 1437")


def test_a_microbatch_equal_to_the_batch(cli):
    refused(cli("train", "digits", "--batch", 8, "--microbatch", 8), "microbatch=8 and batch=8", "--microbatch 4")


def test_a_goal_that_is_never_reached_keeps_the_data_and_recommends(cli, tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], goals=(1.0, 0.9, 1e-6), epochs=2)
    refused(cli("study", task, "--out", "out"), "1e-06", "lowest loss", "easier last goal", "out")
    assert list((tmp_path / "out" / "cells").rglob("run.json")), "finished runs are kept"
    assert not (tmp_path / "out" / "result.json").exists()


def test_a_learning_rate_that_diverges_everywhere(cli, tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], lr=1e9, epochs=2)
    refused(cli("study", task, "--out", "out"), "diverged", "1e+09", "Lower reference_lr")


def test_a_task_that_does_not_learn(cli, tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], lr=1e-12, epochs=2)
    refused(cli("study", task, "--out", "out"), "does not learn", "reference_lr")


def test_an_out_that_holds_another_study_is_left_alone(cli, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "study.json").write_text(json.dumps({"task": "mnist", "kind": "study"}))
    before = (tmp_path / "out" / "study.json").read_bytes()
    refused(cli("study", "digits", "--out", "out"), "another study", "Choose another --out")
    assert (tmp_path / "out" / "study.json").read_bytes() == before


def test_an_out_that_holds_other_files_is_left_alone(cli, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    refused(cli("study", "digits", "--out", "out"), "thesis.tex", "Choose another --out")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != "lock"] == ["thesis.tex"]


def test_an_out_that_is_a_file(cli, tmp_path):
    (tmp_path / "out").write_text("a file")
    refused(cli("study", "digits", "--out", "out"), "cannot write", "another --out")


def test_a_study_that_is_running_is_not_run_twice(cli, tmp_path):
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(cli("study", "digits", "--out", "out"), "another process", "Wait for it")


@pytest.mark.parametrize("arguments", [("--jobs", "0"), ("--seed", "-1"), ("--jobs", "two"), ("--no-such-flag",)])
def test_flags_out_of_range(cli, arguments):
    code, out, err = cli("study", "digits", *arguments)
    assert code == 2 and out == "" and arguments[0] in err


def test_a_budget_of_nothing(cli):
    refused(cli("study", "digits", "--budget", 0), "budget", "above 0")


def test_a_report_of_nothing(cli, tmp_path):
    refused(cli("report", "nowhere"), "nowhere")


LIMITED = """
import resource, signal, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from largebatch.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


def test_a_disk_that_takes_no_more_is_said_and_the_study_goes_on_later(tmp_path):
    """Files may grow to 20 kB: some cells fit, the measured run's step records do not."""
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=6)
    command = ["study", str(task), "--out", str(tmp_path / "out"), "--jobs", "1"]
    result = subprocess.run([sys.executable, "-c", LIMITED, *command], capture_output=True, text=True, timeout=300)
    assert result.returncode == 2, result.stderr
    assert "cannot write" in result.stderr and "run the same command again" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    finished = sorted((tmp_path / "out" / "cells").rglob("run.json"))
    assert finished
    for path in finished:
        json.loads(path.read_bytes())
    assert not list((tmp_path / "out").rglob("*.tmp")), "nothing half-written"
    before = [path.stat().st_mtime_ns for path in finished]
    code = run(command)
    assert code == 0
    assert [path.stat().st_mtime_ns for path in finished] == before, "finished cells are not trained again"


def test_a_real_full_disk(tmp_path, small_disk):
    command = [sys.executable, "-m", "largebatch.cli", "train", "digits", "--out", small_disk / "run"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "No space left on device" in result.stderr and "Traceback" not in result.stderr


def edited(task, old, new):
    text = task.read_text()
    assert old in text
    task.write_text(text.replace(old, new))
    return task


def test_a_task_that_counts_something_else_than_rows(cli, tmp_path):
    """A batch of 16 rows of 20 tokens is not a batch of 16: refused, never a number in mixed units."""
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256])
    edited(task, "errors=loss,", "errors=loss, unit='tokens', count=lambda batch: 20 * len(batch[0]),")
    refused(cli("study", task, "--out", "out"), "320 tokens in a batch of 16 rows", "one unit a row")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_bug_in_the_users_own_code_names_its_line(cli, tmp_path, jobs):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], goals=(1.0, 0.9, 0.8))
    edited(task, "    x, y = batch\n", "    x, y = batch\n    raise ValueError('my own bug')\n")
    refused(cli("study", task, "--out", "out", "--jobs", jobs), "ValueError: my own bug", "drawn.py, line")


def test_a_goal_that_fresh_weights_meet(cli, tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], goals=(1e6, 1e5, 1e4))
    refused(cli("study", task, "--out", "out"), "met before the first step")


def test_other_data_under_the_same_name_is_another_study(cli, tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=2)
    assert cli("train", task, "--out", "out")[0] == 0
    write_task(tmp_path / "task", 2 * INPUTS[:256], TARGETS[:256], epochs=2)
    refused(cli("train", task, "--out", "out"), "another training run", "data_sha256", "Choose another --out")


def test_an_edited_task_is_not_answered_from_an_old_run(cli, tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=2)
    assert cli("train", task, "--out", "out")[0] == 0
    edited(task, "momentum=0.0", "momentum=0.5")
    refused(cli("train", task, "--out", "out"), "another training run", "Choose another --out")


@pytest.mark.parametrize("line", ["raise SystemExit('bye')", "assert False, 'mine'", "return 3.0", "return model(x)"])
@pytest.mark.parametrize("verb", ["study", "train"])
def test_whatever_the_users_code_does_ends_in_one_sentence(cli, tmp_path, verb, line):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], goals=[1e-2, 1e-3, 1e-4])
    edited(task, "    x, y = batch\n", f"    x, y = batch\n    {line}\n")
    refused(cli(verb, task, "--out", "out", "--jobs" if verb == "study" else "--seed", 1), "drawn.py failed")


@pytest.mark.parametrize("goals", [(4.0, 4.0, 2.0), (8.0, float("inf"), 2.0), ("a", "b", "c"), (2.0, 3.0, 4.0), (1.0,)])
def test_goals_that_are_no_falling_losses_are_refused_at_once(goals):
    task = linear_task()
    with pytest.raises(ConfigError, match="goals"):
        dataclasses.replace(task, goals=goals)


def test_a_task_that_cannot_be_trained_is_refused_when_it_is_made():
    for change in ({"num_goal_examples": 0}, {"max_microbatch": 0}, {"microbatch": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            dataclasses.replace(linear_task(), **change)
    with pytest.raises(ConfigError, match="one length"):
        TensorSplit((torch.zeros(3), torch.zeros(4)))
    with pytest.raises(ConfigError, match="torch tensors; got ndarray"):
        TensorSplit((INPUTS,))


def test_a_changed_module_beside_the_task_is_another_run(cli, tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=2)
    assert cli("train", task, "--out", "out")[0] == 0
    numbers = np.load(tmp_path / "task" / "data.npz")
    np.savez(tmp_path / "task" / "data.npz", inputs=numbers["inputs"], targets=numbers["targets"], extra=1)
    assert cli("train", task, "--out", "out")[0] == 0, "the same numbers in another file are the same run"
    edited(task, "nn.init.zeros_(model.weight)", "nn.init.ones_(model.weight)")
    refused(cli("train", task, "--out", "out"), "another training run")


def test_names_with_brackets_are_printed_as_they_are(cli, tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=2)
    edited(task, 'name="drawn"', 'name="mine [/v2]"')
    code, _, err = cli("train", task, "--out", "out")
    assert code == 0 and "mine [/v2]" in err


def test_a_kill_in_the_first_write_does_not_lock_the_folder_out(cli, tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".train.json.123.tmp").write_text("{")
    assert cli("train", task, "--out", "out")[0] == 0
    assert not list((tmp_path / "out").glob(".*.tmp"))


def test_a_damaged_identity_and_a_damaged_record_say_what_can_be_done(cli, tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=2)
    assert cli("train", task, "--out", "out")[0] == 0
    (tmp_path / "out" / "run.json").write_text("{}")
    refused(cli("train", task, "--out", "out"), "no run's record", "Delete")
    (tmp_path / "out" / "train.json").write_text("")
    refused(cli("train", task, "--out", "out"), "damaged", "Choose another --out")


def test_a_budget_without_end(cli):
    refused(cli("study", "digits", "--budget", "inf"), "budget")
