"""Experiment: what do decay on norms and a cancelled k cost where decay acts as long as in the paper (remarks 1, 3)?

Decay alone shrinks a weight by exp(sum of rate * decay / (1 - momentum)): e^17 in the paper (0.1, 1e-4, 90 epochs of
5,004 steps), e^0.8 with the 5e-4 of the other runs here. With 1e-2 it is e^16, and e^12 at 512 with its warmup.
"""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import resolved, train_all
from _goyal_compare import large_batches, record, reference, row_of

WEIGHT_DECAY = 1e-2

if __name__ == "__main__":
    started, name, mild = time.perf_counter(), "goyal_decay", reference()
    base = replace(mild, weight_decay=WEIGHT_DECAY)
    large = replace(base, batch=large_batches()[0])
    right, norms, cancelled = train_all(
        name, [large, replace(large, flaw="decay_norms"), replace(large, flaw="cancelled_k")]
    )
    usual, weak = train_all(
        name, [replace(large, weight_decay=mild.weight_decay, flaw=flaw) for flaw in ("", "cancelled_k")]
    )
    rows = [
        row_of("decay 5e-4", usual, usual, ""),
        row_of("decay 5e-4, k cancelled: 32 times too weak", weak, usual, "decay 5e-4"),
        row_of("decay 1e-2", right, usual, "decay 5e-4"),
        row_of("decay 1e-2, on norms too", norms, right, "decay 1e-2"),
        row_of("decay 1e-2, k cancelled: 32 times too weak", cancelled, right, "decay 1e-2"),
    ]
    foldings = {}
    for setting in (mild, base, large):
        recipe = resolved(setting)
        total = sum(recipe.schedule.lr_at(step) for step in range(recipe.num_steps))
        foldings[f"{setting.batch}, {setting.weight_decay:g}"] = total * setting.weight_decay / (1 - recipe.momentum)
    record(name, rows, started, foldings=foldings)
