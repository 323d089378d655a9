"""Experiment: Figure 1 and Tables 1 and 2a once more, on colour pictures of another kind (Goyal 2017)."""

from __future__ import annotations

import time

from _goyal import Setting, train_all
from _goyal_compare import record, row_of

DATA = {"data": "emoji", "epochs": 30}
LRS = (0.025, 0.05, 0.1)

if __name__ == "__main__":
    started, name = time.perf_counter(), "goyal_emoji"
    swept = train_all(name, [Setting(reference_lr=lr, **DATA) for lr in LRS])
    best = min(swept, key=lambda training: row_of("", training, training, "")["mean"])
    against = [row_of("swept", training, best, "the best rate") for training in swept]
    lr = next(row["lr"] for row in against if row["verdict"] in ("", "unresolved"))
    chosen = next(training for training in swept if training["lr"] == lr)

    def large(batch: int, **other: str) -> Setting:
        return Setting(batch=batch, reference_lr=lr, **DATA, **other)

    gradual, none, constant, middle, root, unscaled = train_all(name, [
        large(512), large(512, warmup="none"), large(512, warmup="constant"), large(128), large(512, rule="sqrt"),
        large(512, rule="none"),
    ])  # fmt: skip
    rows = [row_of("swept", training, chosen, "the chosen rate") for training in swept]
    rows += [row_of("gradual", training, chosen, "reference") for training in (middle, gradual)]
    flawed = {"no warmup": none, "constant warmup": constant, "sqrt": root, "rate not scaled": unscaled}
    rows += [row_of(what, training, gradual, "gradual, linear") for what, training in flawed.items()]
    rows.append(row_of("constant warmup", constant, none, "no warmup"))
    record(name, rows, started, chosen_lr=lr)
