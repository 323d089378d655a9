"""Does each example in another library's loop run, in two processes too, and count each optimizer step once?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        (["lightning_callback.py", "--devices", "2"], 87),  # 1,797 rows, 2 x 2 x 16 a step, 3 epochs
        (["transformers_trainer.py"], 60),
        (["accelerate_loop.py"], 87),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_an_example_runs_and_counts_each_step_once(command, steps):
    launcher = [] if "transformers" in command[0] else TWO
    command = [sys.executable, *launcher, str(ROOT / "examples" / command[0]), *command[1:]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-4000:]
    assert f"{steps} optimizer steps, {steps} counted" in result.stdout
    assert len(re.findall(r"^B_simple", result.stdout, flags=re.MULTILINE)) == 1
