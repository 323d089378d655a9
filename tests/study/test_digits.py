"""`largebatch study digits`, the real command: what it must answer, and that kill -9 changes no byte of it."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from largebatch.records.files import read_lines

pytestmark = [pytest.mark.xdist_group("study"), pytest.mark.timeout(1800)]
COMMAND = [sys.executable, "-m", "largebatch.cli", "study", "digits", "--jobs", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits") / "out"
    result = subprocess.run([*COMMAND, "--out", out], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(out / "report.html")
    return out


def test_three_goals_are_resolved_from_five_batch_sizes_each(finished):
    result = json.loads((finished / "result.json").read_text())
    assert len(result["fronts"]) >= 3
    for front in result["fronts"]:
        assert front["resolved"], front["reason"]
        assert front["b_crit"]["high"] / front["b_crit"]["low"] <= 3
        assert sum(len(point["steps"]) >= 3 and not point["bounds"] for point in front["points"]) >= 5
        ratio = front["b_simple_over_b_crit"]
        assert 0 < ratio["low"] < ratio["value"] < ratio["high"]
        seeds = [len(point["steps"]) + len(point["bounds"]) for point in front["points"]]
        assert min(seeds) >= 3


def test_large_batches_were_trained_beside_the_baseline(finished):
    result = json.loads((finished / "result.json").read_text())
    runs = {(run["batch"], run["rule"]): run for run in result["large"]}
    reference = result["reference"]["batch"]
    assert all(len(run["errors"]) == 5 for run in runs.values())
    assert (8 * reference, "linear") in runs
    assert any(run["role"] == "past the elbow" for run in runs.values())
    assert all(number["source"] for run in runs.values() for number in run["recipe"])


def test_the_search_and_the_confirmation_share_no_seed(finished):
    specs = [json.loads(path.read_text())["spec"] for path in (finished / "cells").rglob("run.json")]
    seeds = {role: {spec["seed"] for spec in specs if spec["role"] == role} for role in ("search", "seed", "measure")}
    assert not seeds["search"] & seeds["seed"] and not seeds["measure"] & (seeds["search"] | seeds["seed"])


def kill_and_resume(out, kills, rng):
    """Start the study `kills` times, kill -9 it each time at a random moment, then let it end."""
    for _ in range(kills):
        process = subprocess.Popen(
            [*COMMAND, "--out", out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(rng.uniform(2, 25))
        if rng.random() < 0.5:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
    subprocess.run([*COMMAND, "--out", out], check=True, capture_output=True)


def check_same(finished, out):
    assert (out / "result.json").read_bytes() == (finished / "result.json").read_bytes()
    cells = sorted(path.parent for path in (out / "cells").rglob("run.json"))
    assert [cell.name for cell in cells] == sorted(path.parent.name for path in (finished / "cells").rglob("run.json"))
    for cell in cells:
        events = [line["event"] for line in read_lines(cell / "attempts.jsonl")]
        assert events.count("finished") <= 1, f"{cell.name} was trained twice"
        if "finished" in events:
            assert events[-1] == "finished", f"{cell.name} was started again after it had finished"


def test_three_kills_change_no_byte_and_repeat_no_cell(finished, tmp_path):
    kill_and_resume(tmp_path / "out", 3, random.Random(1))
    check_same(finished, tmp_path / "out")


@pytest.mark.proofs
def test_twenty_kills_change_no_byte_and_repeat_no_cell(finished, tmp_path):
    kill_and_resume(tmp_path / "out", 20, random.Random(2))
    check_same(finished, tmp_path / "out")
