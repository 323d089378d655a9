"""Experiment: what does each mistake cost that the paper's remarks warn of? One a training (Goyal 2017, sec. 3)."""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import large_batches, record, reference, row_of, train_all

FLAWS = {
    "decay_norms": "weight decay on gamma and beta too (sec. 5.1)",
    "cancelled_k": "losses averaged over n and summed, rate not scaled: decay k times too weak (remarks 1, 3)",
    "local_n": "each worker averages over its own 4 or 28 examples (remark 3)",
    "overlap": "every worker shuffles by itself: parts overlap (remark 4)",
    "same_shuffle": "every worker takes the same part: k copies of n examples (remark 4)",
}

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_remarks", reference()
    large = replace(base, batch=large_batches()[0])
    constant = replace(large, warmup="constant")
    right, jump, uncorrected = train_all(name, [large, constant, replace(constant, flaw="uncorrected")])
    rows = [row_of("right", right, right, "right")]
    rows.append(row_of("velocity without correction, constant warmup (remark 2)", uncorrected, jump, "constant warmup"))
    for flaw, what in FLAWS.items():
        rows.append(row_of(what, train_all(name, [replace(large, flaw=flaw)])[0], right, "right"))
    record(name, rows, started)
