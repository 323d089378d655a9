"""Experiment: is 32 times the reference flat, and what is warmup worth, when there are 3 times as many epochs?

The paper's large batch takes 14,075 steps, that of the other runs here 187; here it takes 562 (Goyal 2017, Table 1).
"""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import EPOCHS, train_all
from _goyal_compare import record, reference, row_of

if __name__ == "__main__":
    started, name = time.perf_counter(), "goyal_long"
    base = replace(reference(), epochs=3 * EPOCHS)
    large = replace(base, batch=32 * base.batch)
    gradual, baseline, none, constant = train_all(
        name, [large, base, replace(large, warmup="none"), replace(large, warmup="constant")]
    )
    rows = [row_of("baseline", baseline, baseline, "baseline"), row_of("gradual", gradual, baseline, "baseline")]
    rows += [row_of(row["setting"]["warmup"], row, other, to) for row in (none, constant)
             for other, to in ((baseline, "baseline"), (gradual, "gradual"))]  # fmt: skip
    record(name, rows, started)
