"""How long is a step whose gradients are all-reduced while the backward goes on? From a measured table alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from largebatch.errors import ConfigError
from largebatch.parallel.simulate.engine import Bucket, Phase, run_buckets


def step_time(
    ready_s: Sequence[float], comm_s: Sequence[float], concurrency: int = 1, waiting_s: Sequence[float] | None = None
) -> float:
    """Seconds from the begin of the backward until the last bucket is reduced.

    Args:
        ready_s: when each bucket's gradients are ready, counted from the begin of the backward, in the order in which
            the buckets are reduced. The last of them is the end of the backward.
        comm_s: seconds of each bucket's all-reduce with nothing else on the wire, as measured.
        concurrency: all-reduces in flight; bucket n + concurrency starts when n is done.
        waiting_s: the part of each `comm_s` that is latency, during which another all-reduce may use the wire. None
            takes none of it, so that all-reduces in flight share the wire and gain nothing; `comm_s` itself says that
            they never hinder each other.

    Raises:
        ConfigError: the lengths differ, or a number is out of its range.

    >>> step_time([1.0, 2.0, 3.0], [0.5, 2.0, 1.0])
    5.0
    >>> step_time([0.0, 0.0], [1.0, 1.0], concurrency=2, waiting_s=[0.5, 0.5])
    1.0

    Source: Goyal et al. 2017, section 4 (aggregation in parallel with the backward; at most c all-reduces at once).
    """
    waiting = [0.0] * len(comm_s) if waiting_s is None else waiting_s
    _check(ready_s, comm_s, waiting)
    buckets = [
        Bucket(ready, (Phase("all-reduce", "wire", wait, whole - wait),))
        for ready, whole, wait in zip(ready_s, comm_s, waiting, strict=True)
    ]
    return max([0.0, *ready_s, *(span.stop for span in run_buckets(buckets, concurrency))])


def step_bound(ready_s: Sequence[float], comm_s: Sequence[float]) -> float:
    """What no step is shorter than whose buckets travel in this order: max over i of ready_i + sum of comm_j, j >= i.

    One at a time, or several at once if all of `comm_s` is transfer: latencies of several would overlap.

    >>> step_bound([1.0, 2.0, 3.0], [0.5, 2.0, 1.0])
    5.0
    """
    _check(ready_s, comm_s, comm_s)
    bound, after = 0.0, 0.0
    for ready, whole in zip(reversed(ready_s), reversed(comm_s), strict=True):
        after += whole
        bound = max(bound, ready + after)
    return bound


def _check(ready_s: Sequence[float], comm_s: Sequence[float], waiting_s: Sequence[float]) -> None:
    if not len(ready_s) == len(comm_s) == len(waiting_s):
        raise ConfigError(
            f"each bucket has one time of each kind; got {len(ready_s)} of ready_s, {len(comm_s)} of comm_s and "
            f"{len(waiting_s)} of waiting_s."
        )
    for name, values in (("ready_s", ready_s), ("comm_s", comm_s)):
        for value in values:
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name} holds seconds, 0 or more; got {value!r}.")
    for wait, whole in zip(waiting_s, comm_s, strict=True):
        if not 0 <= wait <= whole:
            raise ConfigError(f"waiting_s is a part of comm_s; got {wait!r} of {whole!r}.")
