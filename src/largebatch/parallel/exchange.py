"""How does an all-reduce run that is written down as a plan? In segments, adding one up while the next travels.

Receives are started ahead, over the ends of steps: gloo lets data go only when the other side has said that it is ready
for it, and that is then said long before. What arrives waits in scratch that stays in the cache.

The all-gather writes into the buffer while earlier sends from it may not have been waited for. No message can come too
early for that: the total of an element exists only once what this rank sent of it has arrived.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.parallel.transport import Pending, Transport

SEGMENT_BYTES = 1 << 18
"""Bytes of a message: small enough to be added up from the cache while the next one travels."""

_AHEAD, _AHEAD_BYTES = 32, 1 << 20
"""Messages, and bytes, that a rank is ready for before it needs them."""

_HALF = (torch.float16, torch.bfloat16)
_local = threading.local()

Span = tuple[int, int]
"""Elements from, to."""


class Part(NamedTuple):
    """Elements `start` to `stop` of the buffer, and the rank they go to or come from."""

    peer: int
    start: int
    stop: int


class Step(NamedTuple):
    """What a rank sends and receives at the same time."""

    phase: str
    """What an error calls it."""
    gives: tuple[Part, ...] = ()
    """What it sends."""
    takes: tuple[Part, ...] = ()
    """What it receives."""
    is_even: bool = False
    """Whether both sides of an addition are rounded to what travels, so that it matters not which one is sent."""

    def moved(self, ranks: tuple[int, ...], offset: int, name: str) -> Step:
        """The same step among other ranks, on a buffer that begins at `offset`, as a phase of `name`."""
        gives, takes = (
            tuple(Part(ranks[peer], start + offset, stop + offset) for peer, start, stop in parts)
            for parts in (self.gives, self.takes)
        )
        return Step(f"{name}: {self.phase}", gives, takes, self.is_even)


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one rank does in an all-reduce of a buffer of a given length."""

    sums: tuple[Step, ...]
    """What arrives is added."""
    own: Span
    """What this rank holds the totals of after that."""
    totals: tuple[Step, ...]
    """What arrives takes the place of what is there."""

    @property
    def num_elements(self) -> int:
        """Elements that the rank sends."""
        return sum(part.stop - part.start for step in self.sums + self.totals for part in step.gives)

    @property
    def num_steps(self) -> int:
        """Steps in which the rank sends or receives anything."""
        return sum(any(part.start < part.stop for part in step.gives + step.takes) for step in self.sums + self.totals)


def run(values: Tensor, transport: Transport, plan: Plan, wire: torch.dtype | None, segment_bytes: int) -> None:
    """Carry out a plan on `values`, in place.

    Args:
        values: contiguous, one-dimensional, on the CPU.
        transport: between the ranks that take part.
        plan: for this rank, and this length.
        wire: dtype of what is sent; sums are taken in float32 where `values` are of 16 bits. None sends `values` as
            they are, and sums in their own dtype.
        segment_bytes: of one message.

    Raises:
        ConfigError: the tensor or the dtype cannot be used.
        PeerLostError: another rank is gone or hangs.
    """
    _check(values, wire, segment_bytes)
    if not plan.sums and not plan.totals:
        return
    if wire is None or (wire == values.dtype and wire not in _HALF):
        _Run(values, values, transport, plan, segment_bytes).run()
        return
    sums = values
    if values.dtype in _HALF:
        sums = _scratch("sums", len(values), torch.float32)
        sums.copy_(values)
    shadow = _scratch("shadow", len(values), wire)
    _Run(sums, shadow, transport, plan, segment_bytes).run()
    values.copy_(shadow)  # all of it totals, received or this rank's own: the same bits on every rank


class _Run:
    """One all-reduce under way: sums in `values`, and what travels in `shadow`, which may be the same tensor."""

    def __init__(self, values: Tensor, shadow: Tensor, transport: Transport, plan: Plan, segment_bytes: int) -> None:
        self.values, self.shadow, self.transport, self.plan = values, shadow, transport, plan
        self.converts = shadow is not values
        self.segment = max(1, segment_bytes // shadow.element_size())
        longest = max((part.stop - part.start for step in plan.sums for part in step.takes), default=0)
        slot = max(1, min(longest, self.segment))
        self.ahead = max(2, min(_AHEAD, _AHEAD_BYTES // (slot * shadow.element_size())))
        self.inbox = _scratch("inbox", self.ahead * slot, shadow.dtype)
        self.slots = itertools.cycle(range(0, self.ahead * slot, slot))
        self.coming = self.receives()
        self.started: deque[tuple[Tensor, Pending]] = deque()
        self.sent: list[Pending] = []

    def run(self) -> None:
        self.start_ahead()
        for step in self.plan.sums:
            self.send(step, converts=self.converts)
            for _, start, stop in self.segments_of(step.takes):
                place = self.values[start:stop]
                if step.is_even and self.converts:
                    place.copy_(self.shadow[start:stop].copy_(place))
                place.add_(self.arrived())
                self.start_ahead()
        if self.converts:
            own = slice(*self.plan.own)
            self.shadow[own].copy_(self.values[own])
        for step in self.plan.totals:
            self.send(step, converts=False)
            for _ in self.segments_of(step.takes):
                self.arrived()
                self.start_ahead()
        for pending in self.sent:
            pending.wait()

    def send(self, step: Step, *, converts: bool) -> None:
        """Start to send all of a step."""
        for peer, start, stop in self.segments_of(step.gives):
            message = self.shadow[start:stop]
            if converts:
                message.copy_(self.values[start:stop])
            self.sent.append(self.transport.send(message, peer, step.phase))

    def receives(self) -> Iterator[tuple[Tensor, Pending]]:
        """Start one receive after another, in the order in which they are waited for."""
        for step in self.plan.sums:
            for peer, start, stop in self.segments_of(step.takes):
                slot = next(self.slots)
                place = self.inbox[slot : slot + stop - start]
                yield place, self.transport.receive(place, peer, step.phase)
        for step in self.plan.totals:
            for peer, start, stop in self.segments_of(step.takes):
                place = self.shadow[start:stop]
                yield place, self.transport.receive(place, peer, step.phase)

    def start_ahead(self) -> None:
        """Have as many receives under way as the inbox has room for."""
        self.started.extend(itertools.islice(self.coming, self.ahead - len(self.started)))

    def arrived(self) -> Tensor:
        """The next message."""
        place, pending = self.started.popleft()
        pending.wait()
        return place

    def segments_of(self, parts: tuple[Part, ...]) -> Iterator[Part]:
        """What is sent as one message each."""
        for peer, first, last in parts:
            if last - first <= self.segment:
                if first < last:
                    yield Part(peer, first, last)
                continue
            for start in range(first, last, self.segment):
                yield Part(peer, start, min(start + self.segment, last))


def _check(values: Tensor, wire: torch.dtype | None, segment_bytes: int) -> None:
    if values.dim() != 1 or not values.is_contiguous() or values.device.type != "cpu":
        raise ConfigError(
            f"an all-reduce takes a contiguous tensor of one dimension on the CPU; got shape {tuple(values.shape)} "
            f"on {values.device}. Pass tensor.view(-1)."
        )
    if wire is not None and not (wire.is_floating_point and values.is_floating_point()):
        raise ConfigError(f"{values.dtype} cannot travel as {wire}: both must be floating point. Leave wire out.")
    if segment_bytes < 1:
        raise ConfigError(f"segment_bytes must be at least 1; got {segment_bytes}.")


def _scratch(use: str, length: int, dtype: torch.dtype) -> Tensor:
    """Room that each thread keeps: fresh pages cost more than the addition."""
    rooms: dict[str, Tensor] = _local.__dict__
    needed = length * dtype.itemsize
    room = rooms.get(use)
    if room is None or room.numel() < needed:
        room = rooms[use] = torch.empty(max(needed, 1 << 16), dtype=torch.uint8)
    return room[:needed].view(dtype)
