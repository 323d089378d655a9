"""Experiment: gamma 0 or 1 in the last norm of every block, at small and large batches (Goyal 2017, Table 2b).

Ten seeds at the flat batch, where five did not resolve it; a deeper net is in goyal_depth.py.
"""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import train_more
from _goyal_compare import flat_batch, large_batches, record, reference, row_of

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_gamma", reference()
    rows = []
    for batch in (base.batch, *large_batches()):
        settings = [replace(base, batch=batch, gamma=gamma) for gamma in (0.0, 1.0)]
        zero, one = train_more(name, settings, 2 if batch == flat_batch() else 1)
        rows += [row_of("gamma 0", zero, zero, "gamma 0"), row_of("gamma 1", one, zero, "gamma 0")]
    record(name, rows, started)
