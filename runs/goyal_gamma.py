"""Experiment: gamma 0 or 1 in the last norm of every block, at small and large batches (Goyal 2017, Table 2b)."""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import large_batches, record, reference, row_of, train_all

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_gamma", reference()
    rows = []
    for batch in (base.batch, *large_batches()):
        zero, one = train_all(name, [replace(base, batch=batch, gamma=gamma) for gamma in (0.0, 1.0)])
        rows += [row_of("gamma 0", zero, zero, "gamma 0"), row_of("gamma 1", one, zero, "gamma 0")]
    record(name, rows, started)
