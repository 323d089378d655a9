"""Experiment: error against the batch, from the reference on, until it is 2 points worse (Goyal 2017, Figure 1)."""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import NUM_TRAIN, REFERENCE_BATCH, train_all
from _goyal_compare import record, reference, row_of

FIRST = [REFERENCE_BATCH * k for k in (1, 4, 16, 64, 32, 8, 2)]
BROKEN = 2.0
"""Points of error by which the last batch is worse."""

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_figure1", reference()
    done = {training["setting"]["batch"]: training for training in
            train_all(name, [replace(base, batch=batch) for batch in FIRST])}  # fmt: skip
    while True:
        baseline = done[REFERENCE_BATCH]
        rows = [row_of("gradual", done[batch], baseline, "reference") for batch in sorted(done)]
        last = max(done)
        if rows[-1]["difference"]["value"] > BROKEN or 4 * last > NUM_TRAIN:
            break
        done[2 * last] = train_all(name, [replace(base, batch=2 * last)])[0]
    record(name, rows, started)
