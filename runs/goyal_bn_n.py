"""Experiment: error and training loss against BN's n, at the reference and the largest flat batch (Goyal 2017, 2.3).

Ten seeds for n = 2 and 16 at the largest flat batch, which five did not tell apart.
"""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import BN_N, train_more
from _goyal_compare import flat_batch, record, reference, row_of

SIZES = (2, 8, 32, 128)
NUM_SETS = {2: 2, BN_N: 2}
"""Five seeds each."""

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_bn_n", reference()
    rows = []
    for batch in (flat_batch(), base.batch):
        sizes = sorted({size for size in SIZES if size < batch} | {BN_N, batch})
        num_sets = {size: NUM_SETS.get(size, 1) if batch > base.batch else 1 for size in sizes}
        trainings = {
            size: train_more(name, [replace(base, batch=batch, bn_n=size)], num_sets[size])[0] for size in sizes
        }
        rows += [row_of(f"n = {size}", trainings[size], trainings[BN_N], f"n = {BN_N}") for size in sizes]
    record(name, rows, started)
