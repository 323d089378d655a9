"""What does every benchmark print, and how does it end?

One file holds one claim. `python benchmarks/NAME.py` from the root prints what it likes and, as its last line, one JSON
object {"claim", "value", "goal", "holds", "peers", "how"}; the exit code is 0 where the claim holds and 1 where not.
`--quick` ends within 50 s and keeps goal and peers: only repeats shrink.

    def main() -> None:
        options = arguments(__doc__)
        value, peers = measure(repeats=5 if options.quick else 50)
        claim("...", value=value, goal="<= 1.01", holds=value <= 1.01, peers=peers, how="50 interleaved pairs, median")
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("claim", "value", "goal", "holds", "peers", "how")


def arguments(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line: `--quick` is all there is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, same goal and peers; ends within 50 s")
    return parser.parse_args(argv)


def claim(
    text: str, *, value: Any, goal: Any, holds: bool, peers: Mapping[str, Any], how: str | Mapping[str, Any]
) -> NoReturn:
    """Print the claim's JSON line and exit: 0 where it holds, 1 where not.

    Args:
        text: the claim, one sentence that can be true or false.
        value: what was measured (a number, or a dict of numbers).
        goal: what it is held against, such as "<= 1.01".
        holds: whether it is met; a value that is not finite never holds.
        peers: name and release of each other library -> its value on the same work in this run; {} where there is none.
        how: repeats, seeds and statistic; the command, commit and hardware are added.
    """
    method = {"method": how} if isinstance(how, str) else dict(how)
    holds = bool(holds) and all_finite(value)
    record = {
        "claim": text, "value": value, "goal": goal, "holds": holds, "peers": dict(peers), "how": method | context()
    }  # fmt: skip
    print(json.dumps(without_nan(record)), flush=True)
    sys.exit(0 if holds else 1)


def all_finite(value: Any) -> bool:
    """Are all numbers in a number, list or dict finite? (None is no measurement.)"""
    if isinstance(value, Mapping):
        return all(all_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(all_finite(item) for item in value)
    return value is not None and (not isinstance(value, float) or math.isfinite(value))


def without_nan(value: Any) -> Any:
    """Turn numbers that are not finite into None: JSON has no word for them."""
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def context() -> dict[str, Any]:
    """With what was this measured: command, commit, hardware, releases."""
    import torch

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "commit": commit or "unknown",
        "hardware": hardware(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def hardware() -> str:
    """Processor, cores this process may use, and accelerators, in words."""
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{cpu}, {cores} cores, {', '.join(gpus) if gpus else 'no GPU'}"


class Ratio(NamedTuple):
    """The median over pairs of time(subject) / time(reference), with the 95 % interval of that median."""

    median: float
    low: float
    high: float


def paired_ratio(
    subject: Callable[[], object], reference: Callable[[], object], *, pairs: int, warmup: int = 2
) -> Ratio:
    """Time two functions in interleaved pairs, the order alternating, so that a busy machine disturbs both alike.

    The interval comes from the ranks of the sorted ratios (sign test): it assumes nothing about their distribution.
    """
    for _ in range(warmup):
        reference()
        subject()
    ratios: list[float] = []
    for pair in range(pairs):
        first, second = (subject, reference) if pair % 2 == 0 else (reference, subject)
        start = time.perf_counter()
        first()
        middle = time.perf_counter()
        second()
        end = time.perf_counter()
        ratio = (middle - start) / (end - middle)
        ratios.append(ratio if pair % 2 == 0 else 1 / ratio)
    ratios.sort()
    skip = max(0, math.floor(pairs / 2 - 1.96 * math.sqrt(pairs) / 2) - 1)
    return Ratio(statistics.median(ratios), ratios[skip], ratios[-1 - skip])


def peers_python() -> Path:
    """The interpreter of the peers' environment; ends the benchmark with the command that makes it."""
    python = ROOT / ".venv-peers" / "bin" / "python"
    if not python.exists():
        sys.exit("this benchmark compares with other libraries, which are not installed. Run: make peers")
    return python
