"""Experiment: what are a gamma of 0 and gradual warmup worth in a deeper net: 3 blocks a stage (Tables 1, 2b)?

6 residual blocks where the other runs have 2, at 32 times the reference; the rate is theirs, it was not tuned again.
Recorded as far as it is trained.
"""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import REFERENCE_BATCH, train_all
from _goyal_compare import record, reference, row_of

DEPTH = 3

if __name__ == "__main__":
    started, name = time.perf_counter(), "goyal_depth"
    large = replace(reference(), depth=DEPTH, batch=32 * REFERENCE_BATCH)
    zero, one = train_all(name, [replace(large, gamma=gamma) for gamma in (0.0, 1.0)])
    rows = [row_of("gamma 0", zero, zero, ""), row_of("gamma 1", one, zero, "gamma 0")]
    record(name, rows, started, trained=2, planned=4)
    (no_one,) = train_all(name, [replace(large, gamma=1.0, warmup="none")])
    rows.append(row_of("gamma 1, no warmup", no_one, one, "gamma 1"))
    record(name, rows, started, trained=3, planned=4)
    (no_zero,) = train_all(name, [replace(large, warmup="none")])
    rows.append(row_of("gamma 0, no warmup", no_zero, zero, "gamma 0"))
    rows.append(row_of("gamma 1, no warmup", no_one, no_zero, "gamma 0, no warmup"))
    record(name, rows, started, trained=4, planned=4)
