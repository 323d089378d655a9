"""Does `largebatch study digits` answer within 150 s on two idle cores, every goal within a factor 3?

Nobody else ships this job, so there is no peer to run beside it: the goal is the newcomer's patience.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _harness import arguments, claim


def main() -> None:
    """Run the study once with --quick, else three times; the slowest counts."""
    options = arguments(__doc__)
    seconds: list[float] = []
    ratios: list[float] = []
    for _ in range(1 if options.quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            started = time.perf_counter()
            command = [sys.executable, "-m", "largebatch.cli", "study", "digits", "--jobs", "2", "--out", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
            fronts = json.loads((out / "result.json").read_text())["fronts"]
        ratios += [
            front["b_crit"]["high"] / front["b_crit"]["low"] if front["resolved"] else float("inf") for front in fronts
        ]
    value = {"seconds": round(max(seconds), 1), "widest_high_over_low": round(max(ratios), 2), "goals": len(fronts)}
    claim(
        "`largebatch study digits` takes at most 150 s on 2 idle cores, B_crit of 3 goals within high/low 3 each",
        value=value, goal="seconds <= 150, widest_high_over_low <= 3, goals >= 3",
        holds=value["seconds"] <= 150 and value["widest_high_over_low"] <= 3 and value["goals"] >= 3,
        peers={}, how=f"{len(seconds)} runs into fresh folders, seed 0, the slowest; no peer does this job",
    )  # fmt: skip


if __name__ == "__main__":
    main()
