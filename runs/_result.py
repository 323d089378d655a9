"""How does an experiment that is no study leave its evidence? In two files, as `_record.py` says."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

import torch
from _record import ROOT, cpu_name


def record_result(name: str, result: dict[str, Any], *, started: float) -> None:
    """Write runs/NAME/result.json and how it was made; `started` is of `time.perf_counter`."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    folder = ROOT / "runs" / name
    folder.mkdir(exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    how = {
        "command": f"python runs/{name}.py",
        "commit": commit.stdout.strip(),
        "hardware": f"{cores} core{'s' * (cores > 1)} of {cpu_name()}, no GPU",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "how.json").write_text(json.dumps(how, indent=1) + "\n")
