"""Experiment: what are a gamma of 0 and gradual warmup worth in a deeper net: 3 blocks a stage (Tables 1, 2b)?

6 residual blocks where the other runs have 2; the reference rate is theirs, it was not tuned again.
"""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import REFERENCE_BATCH, train_all
from _goyal_compare import record, reference, row_of

DEPTH = 3

if __name__ == "__main__":
    started, name = time.perf_counter(), "goyal_depth"
    base = replace(reference(), depth=DEPTH)
    rows = []
    for k, warmups in ((32, ("gradual", "none")), (4, ("gradual",))):
        large = replace(base, batch=k * REFERENCE_BATCH)
        settings = [replace(large, warmup=warmup, gamma=gamma) for warmup in warmups for gamma in (0.0, 1.0)]
        trainings = train_all(name, settings)
        zero, one = trainings[:2]
        rows += [row_of("gamma 0", zero, zero, ""), row_of("gamma 1", one, zero, "gamma 0")]
        if trainings[2:]:
            no_zero, no_one = trainings[2:]
            rows += [
                row_of("gamma 0, no warmup", no_zero, zero, "gamma 0"),
                row_of("gamma 1, no warmup", no_one, one, "gamma 1"),
                row_of("gamma 1, no warmup", no_one, no_zero, "gamma 0, no warmup"),
            ]
    record(name, rows, started)
