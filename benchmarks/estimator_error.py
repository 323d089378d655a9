"""Is the noise scale nearer the truth than each peer's at low signal, and does its 95 % interval hold it?

Linear regression with normal inputs: y = w*.x + sigma e, loss (w.x - y)^2 / 2, w - w* = delta, d = 8, so that
|G|^2 = |delta|^2 and tr(Sigma) = (d + 1)|delta|^2 + d sigma^2 exactly. Microbatches of 4, batch 16. All estimators see
the same draws. Low signal: |delta| = 0.1, sigma = 1, B_simple = 809; high signal: |delta| = 1, sigma = 0.1, 9.08.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from pathlib import Path
from typing import Any

from _harness import arguments, claim, peers_python

DIM = 8
PROBLEMS = {"low signal": (0.1, 1.0), "high signal": (1.0, 0.1)}
LENGTHS = {"low signal": [500, 2000], "high signal": [200]}
SEEDS = {"low signal": (2, 60), "high signal": (2, 60)}


def main() -> None:
    """Compare errors at each length, and count how often the interval holds the truth."""
    options = arguments(__doc__)
    value: dict[str, Any] = {}
    peers: dict[str, Any] = {}
    fine: list[bool] = []
    for name, (size, sigma) in PROBLEMS.items():
        truth = ((DIM + 1) * size**2 + DIM * sigma**2) / size**2
        runs = observe(size, sigma, LENGTHS[name], SEEDS[name][0 if options.quick else 1])
        for place, length in enumerate(LENGTHS[name]):
            where = f"{name}, {length} steps"
            said = [run[place] for run in runs]
            errors = {key: error([one[key] for one in said], truth) for key in said[0] if key not in OWN}
            mine = errors.pop("largebatch")
            held = [covers(one["interval"], truth) for one in said]
            value[where] = mine | {
                "coverage": round(statistics.fmean(held), 3),
                "resolved": round(statistics.fmean(one["resolved"] for one in said), 3),
            }
            peers |= {peer: peers.get(peer, {}) | {where: found} for peer, found in errors.items()}
            # A count of hits below a true 95 % by more than two of its own standard deviations is a miss.
            fine.append(statistics.fmean(held) >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / len(held)))
            if length == LENGTHS[name][-1]:
                fine += [
                    mine["rmse_log"] <= 1.05 * found["rmse_log"] or mine["no_number"] < found["no_number"]
                    for found in errors.values()
                ]
    claim(
        "after 2,000 steps at low signal no peer's noise scale is nearer the truth, and the 95 % interval holds it",
        value=value, holds=all(fine), peers=peers,
        goal="rmse_log at the longest length <= 1.05 of every peer's that says a number as often; coverage >= 0.95 "
        "less two standard deviations",
        how={
            "method": "root mean square of ln(B / B_true) over runs that say a positive number; no_number is the share "
            "of those that do not; the median of B; gns-pytorch on all parameters and examples of every eighth step, "
            "averaged",
            "seeds": {name: few if options.quick else many for name, (few, many) in SEEDS.items()},
        },
    )  # fmt: skip


OWN = ("interval", "resolved")


def observe(size: float, sigma: float, lengths: list[int], seeds: int) -> list[list[dict[str, Any]]]:
    """By seed, by length, what each estimator says: two processes share the seeds."""
    half = seeds // 2
    jobs = [
        subprocess.Popen(
            [str(peers_python()), str(Path(__file__).with_name("_estimator_worker.py")), "--size", str(size), "--sigma",
             str(sigma), "--lengths", *map(str, lengths), "--seeds", str(first), str(last)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for first, last in ((0, half), (half, seeds))
    ]  # fmt: skip
    return [run for job in jobs for run in json.loads(job.communicate()[0].strip().splitlines()[-1])]


def error(said: list[float], truth: float) -> dict[str, float]:
    """Root mean square of ln(B / truth), the share of runs without a positive number, and the median."""
    logs = [math.log(b / truth) for b in said if math.isfinite(b) and b > 0]
    return {
        "rmse_log": round(math.sqrt(statistics.fmean(x * x for x in logs)), 3) if logs else math.inf,
        "no_number": round(1 - len(logs) / len(said), 3),
        "median": round(statistics.median(b if math.isfinite(b) else math.inf for b in said), 1),
    }


def covers(interval: list[float | None], truth: float) -> bool:
    """Whether the interval holds the truth; None is unbounded."""
    low, high = interval
    return (low is None or low <= truth) and (high is None or truth <= high)


if __name__ == "__main__":
    main()
