"""How are trainings of the same seeds compared, and what is kept of it? Rows of a result with paired intervals.

The error of a run is the median of its last epochs' (Goyal 2017, sec. 5.1); a difference is that of the same seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Any

from _goyal import LAST_EPOCHS, PROTOCOL, REFERENCE_BATCH, SEEDS, Setting
from _record import ROOT
from _result import record_result
from scipy import stats


def run_errors(row: dict[str, Any], which: str = "error") -> list[float]:
    """A run's error, for each seed: the median of the last epochs'."""
    last = row["epochs"][-LAST_EPOCHS:]
    return [median(of_seed) for of_seed in zip(*(epoch[which] for epoch in last), strict=True)]


def final_losses(row: dict[str, Any]) -> list[float]:
    """Training loss of the last epoch, for each seed."""
    return row["epochs"][-1]["train_loss"]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Mean of the differences of the seeds that both have, with its 95 % interval by Student's t."""
    differences = [one - other for one, other in zip(ours, theirs, strict=False)]
    half = float(stats.t.ppf(0.975, len(differences) - 1)) * stdev(differences) / len(differences) ** 0.5
    return {"value": fmean(differences), "low": fmean(differences) - half, "high": fmean(differences) + half}


def verdict(difference: dict[str, float]) -> str:
    """Which side of 0 the interval lies on, or that it does not say."""
    if difference["low"] > 0:
        return "worse"
    return "better" if difference["high"] < 0 else "unresolved"


def row_of(what: str, training: dict[str, Any], against: dict[str, Any], to: str) -> dict[str, Any]:
    """One row of a result: errors, losses, and the paired difference to another training."""
    difference = paired(run_errors(training), run_errors(against))
    errors, losses = run_errors(training), final_losses(training)
    same = training is against or training["setting"] == against["setting"]
    train_errors = training["epochs"][-1]["train_error"]
    return {
        "what": what, **training["setting"], "lr": training["lr"], "steps": training["steps"],
        "errors": errors, "mean": fmean(errors), "std": stdev(errors),
        "recomputed_mean": fmean(run_errors(training, "recomputed_error")),
        "recomputed_std": stdev(run_errors(training, "recomputed_error")),
        "train_error": fmean(train_errors), "train_loss": fmean(losses), "train_loss_std": stdev(losses),
        "against": to, "difference": None if same else difference, "verdict": "" if same else verdict(difference),
        "train_loss_difference": None if same else paired(losses, final_losses(against)),
        "seconds_a_seed": training["seconds"] / len(errors), "diverged": sum(training["diverged"]),
    }  # fmt: skip


def record(name: str, rows: list[dict[str, Any]], started: float, **more: Any) -> None:
    """Write runs/NAME/result.json and how.json."""
    last_seed = max((len(row["errors"]) for row in rows if "errors" in row), default=len(SEEDS)) - 1
    result = {"schema_version": 1, "seed": f"0 to {last_seed}", "protocol": PROTOCOL, "rows": rows, **more}
    record_result(name, _without_nan(result), started=started)
    path = ROOT / "runs" / name / "how.json"
    how = json.loads(path.read_text())
    kept = path.parent / "trainings.jsonl"
    own = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    how |= {"seconds": round(sum(row["seconds"] for row in own), 1), "trained_at": sorted({r["commit"] for r in own})}
    path.write_text(json.dumps(how, indent=1) + "\n")


def _without_nan(value: Any) -> Any:
    """What has no number is null: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tuned_lr() -> float:
    """The rate that goyal_sweep.py chose at the reference batch."""
    return json.loads((ROOT / "runs" / "goyal_sweep" / "result.json").read_text())["chosen_lr"]


def reference() -> Setting:
    return Setting(reference_lr=tuned_lr())


def flat_batch() -> int:
    """The largest batch up to which errors were within 0.3 points of the reference's in goyal_figure1.py."""
    rows = json.loads((ROOT / "runs" / "goyal_figure1" / "result.json").read_text())["rows"]
    flat = REFERENCE_BATCH
    for row in rows[1:]:
        if row["difference"]["value"] > 0.3:
            break
        flat = row["batch"]
    return flat


def large_batches() -> list[int]:
    """32 times the reference, and the largest flat batch, which may be the same."""
    return sorted({flat_batch(), 32 * REFERENCE_BATCH}, reverse=True)
