"""Experiment: is gradual warmup worth more where it takes the paper's share of a run, or where k is larger (Table 1)?

The paper warms up for 5 of 90 epochs, half an epoch of 8; the other runs here for 2. At 1024 k is 64.
"""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import REFERENCE_BATCH, train_all
from _goyal_compare import record, reference, row_of

LENGTHS = {64: (2.0,), 32: (2.0, 0.5)}
"""Epochs of gradual warmup, for every k."""

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_warmup_short", reference()
    rows = []
    for k, lengths in LENGTHS.items():
        large = replace(base, batch=k * REFERENCE_BATCH)
        settings = [replace(large, warmup="none"), *(replace(large, warmup_epochs=length) for length in lengths)]
        none, *gradual = train_all(name, settings)
        rows.append(row_of("none", none, none, "none"))
        rows += [row_of(f"gradual, {length:g} epochs", row, none, "none")
                 for length, row in zip(lengths, gradual, strict=True)]  # fmt: skip
    record(name, rows, started)
