"""How do N ranks talk inside one process? Through queues, so that an algorithm can be tried at any size."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.parallel.transport import PeerLostError

_T = TypeVar("_T")


@dataclass
class Loopback:
    """One rank of `on_ranks`, and what it has sent."""

    rank: int
    """This rank, 0 to world_size - 1."""
    world_size: int
    """Ranks of this process."""
    timeout: float
    """Seconds that a receive waits."""
    mail: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = field(repr=False)
    """From, to -> messages on their way."""
    num_messages: int = 0
    """Messages sent."""
    num_bytes: int = 0
    """Bytes sent."""
    phases: list[str] = field(default_factory=list[str])
    """The phase of each message sent."""

    def send(self, values: Tensor, to: int, phase: str) -> _Arrived:
        """Put a copy into the other rank's queue."""
        self.num_messages += 1
        self.num_bytes += values.numel() * values.element_size()
        self.phases.append(phase)
        self.mail[self.rank, to].put(values.clone())
        return _Arrived()

    def receive(self, values: Tensor, source: int, phase: str) -> _Awaited:
        """Take the next message of `source` when it is waited for."""
        return _Awaited(self, values, source, phase)


class _Arrived:
    def wait(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Awaited:
    transport: Loopback
    values: Tensor
    source: int
    phase: str

    def wait(self) -> None:
        try:
            message = self.transport.mail[self.source, self.transport.rank].get(timeout=self.transport.timeout)
        except queue.Empty:
            raise PeerLostError(self.source, self.phase, f"no message in {self.transport.timeout:g} s") from None
        assert message.shape == self.values.shape and message.dtype == self.values.dtype, "the two sides differ"
        self.values.copy_(message)


def on_ranks(world_size: int, body: Callable[[Loopback], _T], *, timeout: float = 30.0) -> list[_T]:
    """Call `body(transport)` on each of `world_size` ranks, a thread each; what each returned, by rank.

    Args:
        world_size: ranks, at least 1.
        body: what a rank does; a tensor it changes must be its own.
        timeout: seconds a receive waits before it says that the peer is lost.

    Raises:
        ConfigError: there is no rank.
        Exception: what the first rank to fail raised.

    >>> on_ranks(2, lambda transport: transport.rank)
    [0, 1]
    """
    if world_size < 1:
        raise ConfigError(f"there must be at least one rank; got {world_size}.")
    mail: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
    for source in range(world_size):
        for to in range(world_size):
            mail[source, to] = queue.SimpleQueue()
    results: dict[int, _T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = body(Loopback(rank=rank, world_size=world_size, timeout=timeout, mail=mail))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
