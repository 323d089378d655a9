"""Experiment: the linear rule, the square root, none, and rates half to 4 times as large (Goyal 2017, Table 2a)."""

from __future__ import annotations

import time
from dataclasses import replace

from _goyal import train_all
from _goyal_compare import large_batches, record, reference, row_of

if __name__ == "__main__":
    started, name, base = time.perf_counter(), "goyal_scaling", reference()
    large = replace(base, batch=large_batches()[0])
    lr = base.reference_lr
    factors = {"half the rate": 0.5, "twice the rate": 2, "4 times the rate": 4}
    baseline, *at_reference = train_all(name, [base, *(replace(base, reference_lr=f * lr) for f in factors.values())])
    linear, root, unscaled = train_all(name, [replace(large, rule=rule) for rule in ("linear", "sqrt", "none")])
    at_large = train_all(name, [replace(large, reference_lr=factor * lr) for factor in factors.values()])
    rows = [row_of("reference", baseline, baseline, "reference")]
    rows += [row_of(what, row, baseline, "reference") for what, row in zip(factors, at_reference, strict=True)]
    rows.append(row_of("linear", linear, baseline, "reference"))
    rows += [row_of("sqrt", root, linear, "linear"), row_of("none", unscaled, linear, "linear")]
    rows += [row_of(what, row, linear, "linear") for what, row in zip(factors, at_large, strict=True)]
    rows.append(row_of("none", unscaled, root, "sqrt"))
    record(name, rows, started)
