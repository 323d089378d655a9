"""Experiment: the linear rule, the square root, none, and a rate half and twice as large (Goyal 2017, Table 2a)."""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import large_batches, record, reference, row_of, train_all

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_scaling", reference()
    large = replace(base, batch=large_batches()[0])
    lr = base.reference_lr
    at_reference = train_all(name, [base, replace(base, reference_lr=lr / 2), replace(base, reference_lr=2 * lr)])
    by_rule = train_all(name, [large, replace(large, rule="sqrt"), replace(large, rule="none")])
    by_rate = train_all(name, [replace(large, reference_lr=lr / 2), replace(large, reference_lr=2 * lr)])
    baseline, linear = at_reference[0], by_rule[0]
    names = ("reference", "half the rate", "twice the rate")
    rows = [row_of(what, row, baseline, "reference") for what, row in zip(names, at_reference, strict=True)]
    rows.append(row_of("linear", linear, baseline, "reference"))
    names = ("sqrt", "none", "half the rate", "twice the rate")
    others = by_rule[1:] + by_rate
    rows += [row_of(what, row, linear, "linear") for what, row in zip(names, others, strict=True)]
    rows.append(row_of("none", by_rule[2], by_rule[1], "sqrt"))
    record(name, rows, started)
