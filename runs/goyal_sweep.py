"""Experiment: which learning rate is best at the reference batch? The only place where anything is tuned.

Factors of 2, from 0.05 outwards until the best has a neighbour on either side. Chosen is the smallest rate that the
same seeds do not tell apart from the best: where errors are flat over several rates, the upper end of them is close to
breaking before it is scaled, and sensitive (Goyal 2017, sec. 5.3).
"""

from __future__ import annotations

import time

from _goyal import Setting, train_all
from _goyal_compare import record, row_of

if __name__ == "__main__":
    started, lrs = time.perf_counter(), [0.025, 0.05, 0.1]
    while True:
        trainings = train_all("goyal_sweep", [Setting(reference_lr=lr) for lr in lrs])
        best = min(trainings, key=lambda training: row_of("", training, training, "")["mean"])
        if lrs[0] < best["lr"] < lrs[-1]:
            break
        lrs = [lrs[0] / 2, *lrs] if best["lr"] == lrs[0] else [*lrs, 2 * lrs[-1]]
    rows = [row_of("swept", training, best, "the best rate") for training in trainings]
    chosen = next(row["lr"] for row in rows if row["verdict"] in ("", "unresolved"))
    record("goyal_sweep", rows, started, best_lr=best["lr"], chosen_lr=chosen)
