"""Experiment: error and training loss against BN's n, at the reference and the largest flat batch (Goyal 2017, 2.3).

Ten seeds at the largest flat batch, where five did not tell n = 2 apart.
"""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import BN_N, train_more
from _goyal_compare import flat_batch, record, reference, row_of

SIZES = (2, 8, 32, 128)

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_bn_n", reference()
    rows = []
    for batch, num_sets in ((flat_batch(), 2), (base.batch, 1)):
        sizes = sorted({size for size in SIZES if size < batch} | {BN_N, batch})
        settings = [replace(base, batch=batch, bn_n=size) for size in sizes]
        trainings = dict(zip(sizes, train_more(name, settings, num_sets), strict=True))
        rows += [row_of(f"n = {size}", trainings[size], trainings[BN_N], f"n = {BN_N}") for size in sizes]
    record(name, rows, started)
