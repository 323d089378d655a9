"""Experiment: do backbones trained at large batches serve a Mask R-CNN as well as one at the reference (Table 3a)?

Backbones at 1x, at the largest batch whose error is still flat, and past the elbow go through the same fine-tune.
"""

from __future__ import annotations

import time

import torch
from _result import record_result
from _stamps import Setting, finetune

BACKBONES = (32, 128, 1024)
"""1x, 4x and 32x: at 1,024 an epoch of the class folders has 6 steps."""
BATCH = 4

if __name__ == "__main__":
    torch.set_num_threads(1)
    started, name = time.perf_counter(), "stamps_table3a"
    rows = [finetune(name, Setting(backbone_batch=batch, batch=BATCH)) for batch in BACKBONES]
    record_result(name, {"data": "stamps", "held_out_pictures": 300, "rows": rows}, started=started)
