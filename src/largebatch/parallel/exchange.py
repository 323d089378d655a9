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
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.parallel.transport import Pending, Transport

SEGMENT_BYTES = 1 << 22
"""Bytes of a message: small enough to be added up from the cache while the next one travels."""

_AHEAD, _AHEAD_BYTES = 16, 1 << 23
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


@dataclass(frozen=True, slots=True, eq=False)
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
        _carry_out(values, values, transport, plan, segment_bytes)
        return
    sums = values
    if values.dtype in _HALF:
        sums = _scratch("sums", len(values), torch.float32)
        sums.copy_(values)
    shadow = _scratch("shadow", len(values), wire)
    _carry_out(sums, shadow, transport, plan, segment_bytes)
    values.copy_(shadow)  # all of it totals, received or this rank's own: the same bits on every rank


class _Message(NamedTuple):
    peer: int
    start: int
    stop: int
    phase: str
    room: int
    """Where in the inbox it arrives; -1 for its own place in the buffer."""


class _Cut(NamedTuple):
    """A plan in messages."""

    sums: list[tuple[list[_Message], list[_Message], bool]]
    totals: list[tuple[list[_Message], list[_Message], bool]]
    receives: list[_Message]
    """All that arrive, in their order."""
    ahead: int
    """Messages that may be under way to this rank."""
    inbox: int
    """Elements that these can fill."""


@lru_cache(maxsize=256)
def _cut(plan: Plan, segment_bytes: int, itemsize: int) -> _Cut:
    segment = max(1, segment_bytes // itemsize)
    longest = max((part.stop - part.start for step in plan.sums for part in step.takes), default=0)
    slot = max(1, min(longest, segment))
    ahead = max(2, min(_AHEAD, _AHEAD_BYTES // (slot * itemsize)))
    rooms = itertools.cycle(range(0, ahead * slot, slot))

    def messages(parts: tuple[Part, ...], phase: str, rooms: Iterator[int]) -> list[_Message]:
        return [
            _Message(peer, start, min(start + segment, last), phase, next(rooms))
            for peer, first, last in parts
            for start in range(first, last, segment)
        ]

    in_place = itertools.repeat(-1)
    sums, totals = (
        [
            (messages(step.gives, step.phase, in_place), messages(step.takes, step.phase, where), step.is_even)
            for step in steps
        ]
        for steps, where in ((plan.sums, rooms), (plan.totals, in_place))
    )
    receives = [message for _, takes, _ in sums + totals for message in takes]
    return _Cut(sums, totals, receives, ahead, ahead * slot)


def _carry_out(values: Tensor, shadow: Tensor, transport: Transport, plan: Plan, segment_bytes: int) -> None:
    """Sum in `values`, and send from and receive into `shadow`, which may be the same tensor."""
    converts = shadow is not values
    cut = _cut(plan, segment_bytes, shadow.element_size())
    inbox = _scratch("inbox", cut.inbox, shadow.dtype)
    send, receive = transport.send, transport.receive
    coming = iter(cut.receives)
    started: deque[tuple[Tensor, Pending]] = deque()
    sent: list[Pending] = []

    def start() -> None:
        """Be ready for one message more."""
        for peer, first, last, phase, room in itertools.islice(coming, 1):
            place = shadow[first:last] if room < 0 else inbox[room : room + last - first]
            started.append((place, receive(place, peer, phase)))

    for _ in range(cut.ahead):
        start()
    for gives, takes, is_even in cut.sums:
        # Where the same segments go and come, each has to be gone before what comes is added to it.
        swaps = bool(gives and takes) and gives[0].start == takes[0].start
        going = deque[Pending]() if swaps else sent
        for peer, first, last, phase, _ in gives:
            message = shadow[first:last]
            if converts:
                message.copy_(values[first:last])
            going.append(send(message, peer, phase))
        for _, first, last, _, _ in takes:
            place = values[first:last]
            message, pending = started.popleft()
            pending.wait()
            if isinstance(going, deque):
                going.popleft().wait()
            if is_even and converts:
                place.copy_(shadow[first:last].copy_(place))
            place.add_(message)
            start()
    if converts:
        own = slice(*plan.own)
        shadow[own].copy_(values[own])
    for gives, takes, _ in cut.totals:
        sent.extend(send(shadow[first:last], peer, phase) for peer, first, last, phase, _ in gives)
        for _ in takes:
            started.popleft()[1].wait()
            start()
    for pending in sent:
        pending.wait()


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
