"""Experiment: do backbones trained at large batches serve a Mask R-CNN as well as one at the reference (Table 3a)?

    python runs/stamps_table3a.py [BACKBONE]

Backbones at 1x, at 4x and past the elbow go through the same fine-tune; so does a detector that starts from random
weights, with group norm. A third of the pictures that Table 3b takes is what the machine had time for. With a
backbone's batch (or `none`) only that fine-tune is done, so that several processes may share the work; without one the
result is written.
"""

from __future__ import annotations

import sys
import time

import torch
from _result import record_result
from _stamps import Setting, finetune

BACKBONES = (32, 128, 1024, None)
"""1x, 4x and 32x: at 1,024 an epoch of the class folders has 6 steps. None: random weights."""
BATCH, NUM_TRAIN = 4, 400

if __name__ == "__main__":
    torch.set_num_threads(1)
    started, name = time.perf_counter(), "stamps_table3a"
    asked = [None if word == "none" else int(word) for word in sys.argv[1:]]
    rows = [
        finetune(name, Setting(backbone_batch=batch, batch=BATCH, num_train=NUM_TRAIN)) for batch in asked or BACKBONES
    ]
    if not asked:
        result = {"data": "stamps", "held_out_pictures": 300, "seconds": sum(row["seconds"] for row in rows)}
        record_result(name, {**result, "rows": rows}, started=started)
