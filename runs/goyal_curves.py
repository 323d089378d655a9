"""Experiment: when do curves of a large batch join the reference's, and does their early gap foretell the end?

Nothing is trained: the curves are those of goyal_figure1.py and goyal_long.py (Goyal 2017, sec. 5.2, Figure 3). In the
longer ones statistics are recomputed in the last epochs only.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import numpy as np
from _goyal import EPOCHS, REFERENCE_BATCH, SEEDS, Setting, finished, key
from _goyal_compare import record, reference, run_errors
from scipy.stats import spearmanr

CURVES = ("train_loss", "error", "recomputed_error")
NUM_RESAMPLES = 2_000


def joined(curve: str, large: dict[str, Any], baseline: dict[str, Any]) -> int | None:
    """The first epoch (from 1) from which on the means differ by at most 2 std of a seed; None: never."""
    first = None
    for epoch in range(len(baseline["epochs"]), 0, -1):
        pair = [training["epochs"][epoch - 1] for training in (large, baseline)]
        if curve not in pair[0] or curve not in pair[1]:
            break
        ours, theirs = (of_epoch[curve] for of_epoch in pair)
        spread = ((stdev(ours) ** 2 + stdev(theirs) ** 2) / 2) ** 0.5
        if not abs(fmean(ours) - fmean(theirs)) <= 2 * spread:
            break
        first = epoch
    return first


def gaps(large: list[dict[str, Any]], baseline: dict[str, Any], epoch: int) -> np.ndarray:
    """Training loss minus the reference's of the same seed, shape (batches, seeds)."""
    return np.array([np.subtract(t["epochs"][epoch - 1]["train_loss"], baseline["epochs"][epoch - 1]["train_loss"])
                     for t in large])  # fmt: skip


def rank_correlation(early: np.ndarray, late: np.ndarray, *, within: bool) -> dict[str, float]:
    """Spearman's over batches and seeds, or over seeds within batches; interval by resampling seeds."""

    def of(chosen: np.ndarray) -> float:
        pair = [values[:, chosen] for values in (early, late)]
        if within:
            pair = [values - values.mean(1, keepdims=True) for values in pair]
        return float(spearmanr(pair[0].ravel(), pair[1].ravel()).statistic)

    rng = np.random.default_rng(0)
    drawn = [of(rng.integers(0, len(SEEDS), len(SEEDS))) for _ in range(NUM_RESAMPLES)]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return {"value": of(np.arange(len(SEEDS))), "low": float(low), "high": float(high)}


def against_reference(epochs: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The plain trainings of so many epochs at batches above the reference's, in their order, and the reference."""
    done = finished()
    base = replace(reference(), epochs=epochs)
    large = [training for training in done.values()
             if Setting(**training["setting"]) == replace(base, batch=training["setting"]["batch"])
             and training["setting"]["batch"] > REFERENCE_BATCH]  # fmt: skip
    return sorted(large, key=lambda training: training["setting"]["batch"]), done[key(base)]


if __name__ == "__main__":
    started = time.perf_counter()
    large, baseline = against_reference(EPOCHS)
    rows = [
        {"epochs": epochs, "batch": t["setting"]["batch"], **{curve: joined(curve, t, base) for curve in CURVES}}
        for epochs, (trainings, base) in ((epochs, against_reference(epochs)) for epochs in (EPOCHS, 3 * EPOCHS))
        for t in trainings
    ]
    final_loss = gaps(large, baseline, EPOCHS)
    final_error = np.array([np.subtract(run_errors(t), run_errors(baseline)) for t in large])
    forecasts = [
        {"epoch": epoch, "of": of, "across": rank_correlation(gaps(large, baseline, epoch), late, within=False),
         "within": rank_correlation(gaps(large, baseline, epoch), late, within=True)}
        for epoch in (1, 2, 3, 4)
        for of, late in (("final training loss", final_loss), ("error", final_error))
    ]  # fmt: skip
    record("goyal_curves", rows, started, forecasts=forecasts)
