"""Experiment: what does the stand-in for ImageNet, openclipart, end at, trained by its own recipe?

    python runs/openclipart.py [BATCH]

With a batch only that training is done; without one the result is written.
"""

from __future__ import annotations

import sys
import time

import torch
from _record import ROOT
from _result import record_result

from largebatch.records.files import read_json
from largebatch.records.schema import RunSpec
from largebatch.tasks import openclipart
from largebatch.train.loop import train

BATCHES = (64,)
SEED = 0

if __name__ == "__main__":
    torch.set_num_threads(1)
    started, rows = time.perf_counter(), []
    task = openclipart.load()
    for batch in map(int, sys.argv[1:] or BATCHES):
        resolved = task.recipe.resolve(batch, len(task.train))
        spec = RunSpec(
            task=task.name, role="train", batch=batch, microbatch=openclipart.BATCHNORM_N, lr=resolved.lr,
            schedule="goyal", seed=SEED, max_steps=resolved.num_steps, monitor=True, evaluate_epochs=True,
        )  # fmt: skip
        folder = ROOT / "largebatch-out" / f"openclipart-b{batch}-seed{SEED}"
        record = train(task, spec, folder, keep_model=True, checkpoint_seconds=60.0)
        seconds = read_json(folder / "timing.json")["seconds"]
        row = {"batch": batch, "lr": resolved.lr, "steps": record.steps, "status": record.status, "seconds": seconds}
        rows.append(row | {"epochs": list(record.epochs)})
        print(batch, record.status, record.epochs[-1], flush=True)
    if len(sys.argv) == 1:
        sizes = {"train": len(task.train), "held_out": len(task.held_out)}
        seconds = sum(row["seconds"] for row in rows)
        record_result(
            "openclipart", {"data": task.name, "seed": SEED, **sizes, "seconds": seconds, "rows": rows}, started=started
        )
