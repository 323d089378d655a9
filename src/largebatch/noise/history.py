"""How did the noise scale change along a training, and what does it support now? From a moments log alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from largebatch.noise.advise import OptimizerKind, advise
from largebatch.noise.estimate import NoiseScale, noise_scale, windows
from largebatch.noise.ledger import typical_batch
from largebatch.records.moments_history import MomentsCurve, MomentsHistory, NoiseHistory
from largebatch.records.moments_log import MomentsTable
from largebatch.records.schema import Interval, NoiseWindow

MOST_WINDOWS = 32
"""Windows of the finest division that is tried."""
SHORTEST = 12
"""Measured steps in a window at least: enough for an interval."""
MOST_BINS = 200
"""Points of a drawn curve; each is the mean of all its steps, so that none is left out."""

Floats = NDArray[np.float64]


def history(table: MomentsTable) -> MomentsHistory:
    """Derive from raw moments what a page shows.

    A log is divided into at most 32 windows of equal length; where fewer than half of them are resolved, into half as
    many, and so on. The advice rests on the last window where that is resolved, else on the whole log, and on the
    typical batch: the median of the last 31 steps'.

    Args:
        table: as `read_moments` gives it; at least one step.

    Raises:
        ConfigError: a moment that is not finite.
    """
    unit, step = table.header.unit, np.asarray(table.step)
    trace, grad = np.asarray(table.trace_cov), np.asarray(table.grad_sq_norm)
    size = _window_size(trace, grad)
    cut = windows(trace, grad, size=size, unit=unit)
    last, whole = cut[-1], noise_scale(trace, grad, unit=unit)
    recent = last.noise_scale.resolved and (last.noise_scale.b_simple or 0) > 0
    batch = typical_batch(table.batch)
    assert batch is not None
    parts = next(
        parts
        for size, parts in zip(reversed(table.batch), reversed(table.num_microbatches), strict=True)
        if size == batch
    )
    # As many microbatches as units: every example's own norm was read, and how many went together is not known.
    advice = advise(
        last.noise_scale if recent else whole, batch=batch,
        microbatch=math.ceil(batch / parts) if parts < batch else None,
        world_size=table.header.world_size, optimizer=cast(OptimizerKind | None, table.header.optimizer),
    )  # fmt: skip
    total_trace = float(trace.mean())
    return MomentsHistory(
        header=table.header,
        num_steps=len(step),
        first_step=int(step[0]),
        last_step=int(step[-1]),
        typical_batch=batch,
        total=_noise_history(trace, grad, step, size, unit),
        groups={
            name: _noise_history(columns.trace_cov, columns.grad_sq_norm, step, size, unit, total_trace)
            for name, columns in table.groups.items()
        },
        preconditioned=None
        if table.preconditioned is None
        else _noise_history(table.preconditioned.trace_cov, table.preconditioned.grad_sq_norm, step, size, unit),
        curve=_curve(step, np.asarray(table.batch), trace, grad),
        advice=advice.text,
        advice_from=(int(step[last.first if recent else 0]), int(step[-1])),
        caveats=advice.caveats,
    )


def _window_size(trace: Floats, grad: Floats) -> int:
    """The shortest windows, at most 32 and each of 12 steps or more, half of which are resolved; else an eighth."""
    count = MOST_WINDOWS
    while count > 1:
        size = len(trace) // count
        if size >= SHORTEST:
            resolved = [window.noise_scale.resolved for window in windows(trace, grad, size=size)]
            if 2 * sum(resolved) >= len(resolved):
                return size
        count //= 2
    return max(SHORTEST, len(trace) // 8) if not noise_scale(trace, grad).resolved else max(SHORTEST, len(trace))


def _noise_history(
    trace_cov: ArrayLike,
    grad_sq_norm: ArrayLike,
    step: NDArray[np.int64],
    size: int,
    unit: str,
    total: float | None = None,
) -> NoiseHistory:
    """Windows and the whole; steps that were not measured (NaN) are left out."""
    trace, grad = np.asarray(trace_cov, dtype=np.float64), np.asarray(grad_sq_norm, dtype=np.float64)
    there = np.isfinite(trace) & np.isfinite(grad)
    trace, grad, step = trace[there], grad[there], step[there]
    whole = noise_scale(trace, grad, unit=unit)
    return NoiseHistory(
        windows=tuple(
            NoiseWindow(
                first_step=int(step[window.first]), last_step=int(step[window.last]), loss=math.nan,
                trace_cov=window.noise_scale.trace_cov or 0.0, grad_sq_norm=window.noise_scale.grad_sq_norm or 0.0,
                b_simple=_interval(window.noise_scale), resolved=window.noise_scale.resolved,
            )
            for window in windows(trace, grad, size=size, unit=unit)
        ),
        b_simple=_interval(whole),
        resolved=whole.resolved,
        reason=whole.reason,
        trace_share=None if not total or whole.trace_cov is None else whole.trace_cov / total,
    )  # fmt: skip


def _interval(estimate: NoiseScale) -> Interval:
    return Interval(value=estimate.b_simple, low=estimate.interval[0], high=estimate.interval[1])


def _curve(step: NDArray[np.int64], batch: NDArray[np.int64], trace: Floats, grad: Floats) -> MomentsCurve:
    edges = np.unique(np.linspace(0, len(step), min(MOST_BINS, len(step)) + 1).astype(int))
    lengths = np.diff(edges)

    def means(values: NDArray[np.int64] | Floats) -> tuple[float, ...]:
        sums: Sequence[float] = (np.add.reduceat(values.astype(np.float64), edges[:-1]) / lengths).tolist()
        return tuple(sums)

    return MomentsCurve(step=means(step), batch=means(batch), trace_cov=means(trace), grad_sq_norm=means(grad))
