"""When does each phase of each bucket end, when several share a link?

Discrete events. A bucket starts when its gradients are ready and the bucket `concurrency` places before it is done: the
cyclic order of Goyal 2017, in which n unblocks n + c. Its phases follow each other, each on one link. A phase waits
(latency, during which the link is free for others) and keeps the link busy; both are spread evenly over it. Where the
phases on a link would keep it busy for more than all of the time, their transfers are stretched by one common factor,
so that it is busy all the time: with w waiting and b busy seconds each, sum of b / (w + b stretch) = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from largebatch.errors import ConfigError


class Phase(NamedTuple):
    """A part of an all-reduce on one link."""

    name: str
    link: str
    waiting: float
    """Seconds of latency."""
    busy: float
    """Seconds of transfer and adding up, with the link for itself."""


class Bucket(NamedTuple):
    """What is all-reduced at once."""

    ready: float
    """Seconds after the backward began."""
    phases: tuple[Phase, ...]


class Span(NamedTuple):
    """A phase that took place."""

    bucket: int
    lane: int
    """Which of the `concurrency` all-reduces in flight."""
    name: str
    link: str
    start: float
    stop: float


def run_buckets(buckets: Sequence[Bucket], concurrency: int = 1) -> list[Span]:
    """Every phase with its start and end, in the order in which they end.

    Args:
        buckets: in the order in which they are reduced.
        concurrency: c >= 1, all-reduces in flight.

    Raises:
        ConfigError: a number is out of its range.

    >>> whole = [Bucket(0.0, (Phase("sum", "wire", 0.0, 2.0),)), Bucket(1.0, (Phase("sum", "wire", 0.0, 2.0),))]
    >>> [(span.start, span.stop) for span in run_buckets(whole)]
    [(0.0, 2.0), (2.0, 4.0)]
    >>> [(span.start, span.stop) for span in run_buckets(whole, concurrency=2)]
    [(0.0, 3.0), (1.0, 4.0)]
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency is 1 or more all-reduces in flight; got {concurrency!r}.")
    now, spans = 0.0, list[Span]()
    used = min(concurrency, len(buckets))  # a lane without a bucket only costs time
    lanes = [list(range(lane, len(buckets), concurrency)) for lane in range(used)]
    for lane in lanes:
        lane.reverse()
    running: dict[int, _Running] = {}
    while running or any(lanes):
        for number, lane in enumerate(lanes):
            while number not in running and lane and buckets[lane[-1]].ready <= now:
                bucket = lane.pop()
                if buckets[bucket].phases:
                    running[number] = _Running(bucket, now)
        ends = _ends(running, buckets, now)
        arrivals = (buckets[lane[-1]].ready for number, lane in enumerate(lanes) if lane and number not in running)
        then = min([*ends.values(), *arrivals], default=now)  # nothing comes where the last bucket has no phase
        for number, state in list(running.items()):
            end = ends[number]
            if end > then:
                state.left *= 1 - (then - now) / (end - now)
                continue
            phases = buckets[state.bucket].phases
            phase = phases[state.phase]
            spans.append(Span(state.bucket, number, phase.name, phase.link, state.start, then))
            state.phase, state.left, state.start = state.phase + 1, 1.0, then
            if state.phase == len(phases):
                del running[number]
        now = then
    return spans


class _Running:
    __slots__ = ("bucket", "left", "phase", "start")

    def __init__(self, bucket: int, start: float) -> None:
        self.bucket, self.start, self.phase, self.left = bucket, start, 0, 1.0


def _ends(running: dict[int, _Running], buckets: Sequence[Bucket], now: float) -> dict[int, float]:
    """When each running phase would end if nothing else began."""
    phases = {lane: buckets[state.bucket].phases[state.phase] for lane, state in running.items()}
    stretches: dict[str, float] = {}
    for link in {phase.link for phase in phases.values()}:
        stretches[link] = _stretch([(phase.waiting, phase.busy) for phase in phases.values() if phase.link == link])
    return {
        lane: now + running[lane].left * (phase.waiting + phase.busy * stretches[phase.link])
        for lane, phase in phases.items()
    }


def _stretch(sharing: Sequence[tuple[float, float]]) -> float:
    """How much longer transfers take on a link that they share; Newton's method, from below as the sum is convex."""
    sharing = [(waiting, busy) for waiting, busy in sharing if busy > 0]
    stretch = 1.0
    if len(sharing) < 2:
        return stretch
    for _ in range(60):
        excess = sum(busy / (waiting + busy * stretch) for waiting, busy in sharing) - 1
        if excess <= 1e-13:
            break
        stretch += excess / sum((busy / (waiting + busy * stretch)) ** 2 for waiting, busy in sharing)
    return stretch
