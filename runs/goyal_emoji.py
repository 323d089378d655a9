"""Experiment: Figure 1 and Tables 1 and 2a once more, on colour pictures of another kind (Goyal 2017).

Recorded after every training: a run that was stopped has fewer rows, and says how many.
"""

from __future__ import annotations

import time

from _goyal import Setting, train_all
from _goyal_compare import record, row_of

DATA = {"data": "emoji", "epochs": 30}
LRS = (0.025, 0.05, 0.1)
LARGE = {
    "gradual": {}, "no warmup": {"warmup": "none"}, "sqrt": {"rule": "sqrt"}, "rate not scaled": {"rule": "none"},
    "constant warmup": {"warmup": "constant"},
}  # fmt: skip
"""Trainings at 512; the first is what the others are held against."""

if __name__ == "__main__":
    started, name = time.perf_counter(), "goyal_emoji"
    swept = train_all(name, [Setting(reference_lr=lr, **DATA) for lr in LRS])
    best = min(swept, key=lambda training: row_of("", training, training, "")["mean"])
    against = [row_of("swept", training, best, "the best rate") for training in swept]
    lr = next(row["lr"] for row in against if row["verdict"] in ("", "unresolved"))
    chosen = next(training for training in swept if training["lr"] == lr)
    rows = [row_of("swept", training, chosen, "the chosen rate") for training in swept]
    planned = [(what, Setting(batch=512, reference_lr=lr, **DATA, **other)) for what, other in LARGE.items()]
    planned.append(("gradual", Setting(batch=128, reference_lr=lr, **DATA)))
    gradual = None
    for number, (what, setting) in enumerate(planned, start=1):
        (training,) = train_all(name, [setting])
        if what == "gradual":
            rows.append(row_of(what, training, chosen, "reference"))
            gradual = gradual or training
        else:
            rows.append(row_of(what, training, gradual, "gradual, linear"))
        progress = {"trained": len(swept) + number, "planned": len(swept) + len(planned)}
        record(name, rows, started, chosen_lr=lr, **progress)
