"""How does one step of an all-reduce move parts of a buffer? In segments, adding one up while the next travels."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.parallel.transport import Pending, Transport

SEGMENT_BYTES = 1 << 20
"""Bytes of a message: small enough to be added up from the cache while the next one travels."""

_HALF = (torch.float16, torch.bfloat16)
_local = threading.local()


class Part(NamedTuple):
    """Elements `start` to `stop` of the buffer, and the rank they go to or come from."""

    peer: int
    start: int
    stop: int


class Exchange:
    """A buffer, and the messages that an all-reduce over it consists of.

    Args:
        values: contiguous, one-dimensional, on the CPU; summed in place by `finish` at the latest.
        transport: between the ranks that take part.
        wire: dtype of what is sent; sums are taken in float32 where `values` are of 16 bits. None sends `values` as
            they are, and sums in their own dtype.
        segment_bytes: of one message.

    Raises:
        ConfigError: the tensor or the dtype cannot be used.
    """

    def __init__(self, values: Tensor, transport: Transport, wire: torch.dtype | None, segment_bytes: int) -> None:
        if values.dim() != 1 or not values.is_contiguous() or values.device.type != "cpu":
            raise ConfigError(
                f"an all-reduce takes a contiguous tensor of one dimension on the CPU; got shape {tuple(values.shape)} "
                f"on {values.device}. Pass tensor.view(-1)."
            )
        if wire is not None and not (wire.is_floating_point and values.is_floating_point()):
            raise ConfigError(f"{values.dtype} cannot travel as {wire}: both must be floating point. Leave wire out.")
        if segment_bytes < 1:
            raise ConfigError(f"segment_bytes must be at least 1; got {segment_bytes}.")
        self._given, self._transport = values, transport
        self._wire = values.dtype if wire is None else wire
        self.values = values.float() if wire is not None and values.dtype in _HALF else values
        """The sums so far."""
        self._converts = self._wire != self.values.dtype
        self._segment = max(1, segment_bytes // self._wire.itemsize)

    def add(self, gives: Sequence[Part], takes: Sequence[Part], phase: str) -> None:
        """Send some parts, and add what arrives to others."""
        sent, received = self._start(gives, takes, phase, into_values=False)
        if _overlap(gives, takes):
            _wait(sent)
        for start, stop, inbox, pending in received:
            pending.wait()
            self.values[start:stop].add_(inbox)
        _wait(sent)

    def replace(self, gives: Sequence[Part], takes: Sequence[Part], phase: str) -> None:
        """Send some parts, and put what arrives in the place of others."""
        sent, received = self._start(gives, takes, phase, into_values=not self._converts)
        for start, stop, inbox, pending in received:
            pending.wait()
            if self._converts:
                self.values[start:stop].copy_(inbox)
        _wait(sent)

    def round(self, start: int, stop: int) -> None:
        """Round this rank's finished part to what the others will receive, so that all ranks end in the same bits."""
        if self._converts:
            part = self.values[start:stop]
            part.copy_(part.to(self._wire))

    def finish(self) -> None:
        """Put the sums where the addends were."""
        if self.values is not self._given:
            self._given.copy_(self.values)

    def _start(
        self, gives: Iterable[Part], takes: Sequence[Part], phase: str, *, into_values: bool
    ) -> tuple[list[Pending], list[tuple[int, int, Tensor, Pending]]]:
        """Start every transfer; receives come first, so that no message waits for its place."""
        inbox = self.values if into_values else _scratch(sum(part.stop - part.start for part in takes), self._wire)
        received: list[tuple[int, int, Tensor, Pending]] = []
        used = 0
        for peer, first, last in takes:
            for start in range(first, last, self._segment):
                stop = min(start + self._segment, last)
                place = inbox[start:stop] if into_values else inbox[used : used + stop - start]
                used += stop - start
                received.append((start, stop, place, self._transport.receive(place, peer, phase)))
        sent: list[Pending] = []
        for peer, first, last in gives:
            for start in range(first, last, self._segment):
                part = self.values[start : min(start + self._segment, last)]
                sent.append(self._transport.send(part.to(self._wire) if self._converts else part, peer, phase))
        return sent, received


def _wait(pending: list[Pending]) -> None:
    for transfer in pending:
        transfer.wait()


def _overlap(gives: Sequence[Part], takes: Sequence[Part]) -> bool:
    return any(give.start < take.stop and take.start < give.stop for give in gives for take in takes)


def _scratch(length: int, dtype: torch.dtype) -> Tensor:
    """Room for what arrives, kept by each thread: fresh pages cost more than the addition."""
    needed = length * dtype.itemsize
    room: Tensor | None = getattr(_local, "room", None)
    if room is None or room.numel() < needed:
        room = _local.room = torch.empty(max(needed, 1 << 16), dtype=torch.uint8)
    return room[:needed].view(dtype)
