"""How does an experiment leave its evidence? A study's result.json and one small file about how it was made.

Each file in runs/ is one experiment: `python runs/NAME.py` runs it and writes runs/NAME/result.json (the study's own,
byte for byte) and runs/NAME/how.json (command, commit, hardware, wall seconds). Both are committed; the tables in
docs/log.md are made from them by scripts/write_log_tables.py.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def cpu_name() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def record_study(name: str, arguments: list[str]) -> None:
    """Run `largebatch study` with `arguments` in a fresh folder and keep its result under runs/NAME."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    folder = ROOT / "runs" / name
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "largebatch.cli", "study", *arguments, "--out", out], check=True)
        seconds = time.perf_counter() - started
        shutil.copy(out / "result.json", folder / "result.json")
        picture = ROOT / "largebatch-out" / f"{name}-report"
        shutil.copytree(out / "figures", picture / "figures", dirs_exist_ok=True)
        shutil.copy(out / "report.html", picture / "report.html")
    cores = len(os.sched_getaffinity(0))
    how = {
        "command": f"python runs/{name}.py",
        "study": "largebatch study " + " ".join(arguments),
        "commit": commit.stdout.strip(),
        "hardware": f"{cores} core{'s' * (cores > 1)} of {cpu_name()}, no GPU",
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
    }
    (folder / "how.json").write_text(json.dumps(how, indent=1) + "\n")
