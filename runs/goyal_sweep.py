"""Experiment: which learning rate is best at the reference batch? The only place where anything is tuned."""

from __future__ import annotations

import time

from _goyal import Setting, record, row_of, train_all

LRS = (0.0125, 0.025, 0.05, 0.1, 0.2)

if __name__ == "__main__":
    started = time.perf_counter()
    trainings = train_all("goyal_sweep", [Setting(reference_lr=lr) for lr in LRS])
    best = min(trainings, key=lambda training: row_of("", training, training, "")["mean"])
    rows = [row_of("swept", training, best, "the best rate") for training in trainings]
    record("goyal_sweep", rows, started, chosen_lr=best["lr"])
