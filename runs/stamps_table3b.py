"""Experiment: a small Mask R-CNN at two batches by the linear rule, from one backbone (Goyal 2017, Table 3b)."""

from __future__ import annotations

import time

import torch
from _result import record_result
from _stamps import Setting, finetune

BATCHES = (4, 16)

if __name__ == "__main__":
    torch.set_num_threads(1)
    started, name = time.perf_counter(), "stamps_table3b"
    rows = [finetune(name, Setting(backbone_batch=32, batch=batch)) for batch in BATCHES]
    record_result(name, {"data": "stamps", "held_out_pictures": 300, "rows": rows}, started=started)
