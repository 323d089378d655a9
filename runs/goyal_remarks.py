"""Experiment: what does each mistake cost that the paper's remarks warn of? One a training (Goyal 2017, sec. 3).

Ten seeds where five did not resolve it; and local averages once more where they are as uneven as 1 and 31 examples.
"""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import train_all, train_more
from _goyal_compare import large_batches, record, reference, row_of

FLAWS = {
    "decay_norms": "weight decay on gamma and beta too (sec. 5.1)",
    "cancelled_k": "losses averaged over n and summed, rate not scaled: decay k times too weak (remarks 1, 3)",
    "local_n": "each worker averages over its own 4 or 28 examples (remark 3)",
    "overlap": "every worker shuffles by itself: parts overlap (remark 4)",
}
CLEAR = {
    "local_1": "each worker averages over its own 1 or 31 examples (remark 3)",
    "same_shuffle": "every worker takes the same part: k copies of n examples (remark 4)",
}

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_remarks", reference()
    large = replace(base, batch=large_batches()[0])
    constant = replace(large, warmup="constant")
    jump, uncorrected = train_all(name, [constant, replace(constant, flaw="uncorrected")])
    right, *wrong = train_more(name, [large, *(replace(large, flaw=flaw) for flaw in FLAWS)], 2)
    wrong += train_all(name, [replace(large, flaw=flaw) for flaw in CLEAR])
    rows = [row_of("right", right, right, "right")]
    rows.append(row_of("velocity without correction, constant warmup (remark 2)", uncorrected, jump, "constant warmup"))
    rows += [row_of(what, row, right, "right") for what, row in zip((FLAWS | CLEAR).values(), wrong, strict=True)]
    record(name, rows, started)
