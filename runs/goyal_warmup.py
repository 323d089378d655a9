"""Experiment: no warmup, constant or gradual, at 32 times the reference and the largest flat (Goyal 2017, Table 1)."""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import train_all
from _goyal_compare import large_batches, record, reference, row_of

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_warmup", reference()
    settings = [
        replace(base, batch=batch, warmup=warmup)
        for batch in large_batches()
        for warmup in ("gradual", "none", "constant")
    ]
    baseline, *trainings = train_all(name, [base, *settings])
    rows = [row_of("baseline", baseline, baseline, "baseline")]
    for start in range(0, len(trainings), 3):
        gradual = trainings[start]
        rows.append(row_of("gradual", gradual, baseline, "baseline"))
        for warm in trainings[start + 1 : start + 3]:
            rows += [row_of(warm["setting"]["warmup"], warm, other, to)
                     for other, to in ((baseline, "baseline"), (gradual, "gradual"))]  # fmt: skip
        rows.append(row_of("constant", trainings[start + 2], trainings[start + 1], "none"))
    record(name, rows, started)
