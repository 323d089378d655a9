"""How does a step look over time? Events that chrome://tracing and ui.perfetto.dev draw."""

from __future__ import annotations

from typing import Any

from largebatch.parallel.simulate.cluster import Cluster, Workload
from largebatch.parallel.simulate.point import Point, timeline


def trace_events(workload: Workload, cluster: Cluster, points: list[Point]) -> dict[str, Any]:
    """The trace of one step at each point, a process each: the last worker's compute, and every phase on its host.

    Args:
        workload: what each worker computes.
        cluster: hosts and links.
        points: from `simulate_point` or `best_point` with these.

    Returns:
        A JSON object in Chrome's trace event format: microseconds, complete events ("X") and names of rows ("M").

    Source: Trace Event Format, Google; read by ui.perfetto.dev.
    """
    events: list[dict[str, Any]] = []
    for number, point in enumerate(points):
        title = f"{point.gpus} GPUs: one of {point.hosts} hosts that are alike, {point.plan.algorithm}"
        events.append({"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": title}})
        spans = timeline(workload, point.gpus, cluster, point.plan)
        used = max((span.lane + 1 for span in spans), default=0)
        rows = ["compute of the last worker"]
        rows += [f"all-reduce in flight, {lane + 1} of {point.plan.concurrency}" for lane in range(used)]
        for row, name in enumerate(rows):
            events.append({"ph": "M", "pid": number, "tid": row, "name": "thread_name", "args": {"name": name}})
        begin = point.latest_seconds + workload.other_seconds
        if point.latest_seconds:
            events.append(_event(number, 0, "later than the mean worker", 0.0, point.latest_seconds))
        events.append(_event(number, 0, "forward and the rest", point.latest_seconds, begin))
        now = begin
        for layer in workload.profile.layers:
            events.append(_event(number, 0, f"backward {layer.name}", now, now + layer.seconds, bytes=layer.num_bytes))
            now += layer.seconds
        for span in spans:
            name, bucket = f"{span.name}, bucket {span.bucket}", span.bucket
            start, stop = begin + span.start, begin + span.stop
            events.append(_event(number, 1 + span.lane, name, start, stop, bucket=bucket, link=span.link))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _event(process: int, row: int, name: str, start: float, stop: float, **more: Any) -> dict[str, Any]:
    return {
        "ph": "X", "pid": process, "tid": row, "name": name, "ts": start * 1e6, "dur": (stop - start) * 1e6,
        "args": more,
    }  # fmt: skip
