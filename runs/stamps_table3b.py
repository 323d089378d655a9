"""Experiment: a small Mask R-CNN at two batches by the linear rule (Goyal 2017, Table 3b), here from random weights.

    python runs/stamps_table3b.py [BATCH]

With a batch only that fine-tune is done, so that several processes may share the work; without one the result is
written.
"""

from __future__ import annotations

import sys
import time

import torch
from _result import record_result
from _stamps import Setting, finetune

BATCHES = (2, 8)

if __name__ == "__main__":
    torch.set_num_threads(1)
    started, name = time.perf_counter(), "stamps_table3b"
    rows = [finetune(name, Setting(batch=batch)) for batch in map(int, sys.argv[1:] or BATCHES)]
    if not sys.argv[1:]:
        result = {"data": "stamps", "held_out_pictures": 300, "seconds": sum(row["seconds"] for row in rows)}
        record_result(name, {**result, "rows": rows}, started=started)
