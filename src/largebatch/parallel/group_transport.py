"""How do the ranks of a process group pass messages? By torch.distributed's send and receive."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.parallel.transport import PeerLostError, Pending


class GroupTransport:
    """The ranks of a gloo group, by their numbers in it; nobody else may use the group meanwhile.

    Args:
        group: of gloo; None for all ranks of the job.
        timeout: seconds that a transfer may take.
        latency: seconds added to each message, for experiments on one machine: a message can be taken no earlier than
            that after it was sent, by a clock that all ranks must share. Costs a second message of 8 bytes.

    Raises:
        ConfigError: the group cannot send, or a number makes no sense.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 30.0, latency: float = 0.0) -> None:
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, dist.ProcessGroup):
            raise ConfigError("torch.distributed is not started. Start the job by torchrun.")
        if not timeout > 0 or not latency >= 0:
            raise ConfigError(f"timeout must be above 0 and latency at least 0 seconds; got {timeout} and {latency}.")
        try:
            backend: Any = found._get_backend(torch.device("cpu"))
        except RuntimeError as error:
            raise ConfigError(
                "the group has no gloo backend: messages are sent from host memory. Use dist.new_group(backend='gloo')."
            ) from error
        # The backend's own methods: torch.distributed's wrappers and dispatcher cost as much as a small message.
        self._send, self._receive = backend.send, backend.recv
        self._ranks = dist.get_process_group_ranks(found)
        self._timeout, self._latency = timedelta(seconds=timeout), latency
        self.rank, self.world_size = found.rank(), found.size()

    def send(self, values: Tensor, to: int, phase: str) -> Pending:
        """Start to send."""
        if not values.numel():
            return _NOTHING
        if not self._latency:
            return self._start(self._send, values, to, phase)
        stamp = torch.tensor([time.monotonic()], dtype=torch.float64)
        return _Both(self._start(self._send, stamp, to, phase), self._start(self._send, values, to, phase))

    def receive(self, values: Tensor, source: int, phase: str) -> Pending:
        """Start to receive."""
        if not values.numel():
            return _NOTHING
        if not self._latency:
            return self._start(self._receive, values, source, phase)
        sent = torch.empty(1, dtype=torch.float64)
        stamp = self._start(self._receive, sent, source, phase)
        return _Delayed(stamp, sent, self._start(self._receive, values, source, phase), self._latency)

    def _start(self, call: Callable[[list[Tensor], int, int], Any], values: Tensor, peer: int, phase: str) -> _Transfer:
        try:
            work = call([values], peer, 0)
        except RuntimeError as error:
            raise self._lost(peer, phase, error) from error
        return _Transfer(self, work, peer, phase, values)

    def wait_for(self, work: Any, peer: int, phase: str) -> None:
        """Block until a transfer is done. Raises PeerLostError."""
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(peer, phase, error) from error

    def _lost(self, peer: int, phase: str, error: RuntimeError) -> PeerLostError:
        return PeerLostError(self._ranks[peer], phase, " ".join(str(error).split())[:200])


class _Transfer:
    __slots__ = ("_peer", "_phase", "_transport", "_values", "_work")

    def __init__(self, transport: GroupTransport, work: Any, peer: int, phase: str, values: Tensor) -> None:
        self._transport, self._work, self._peer, self._phase = transport, work, peer, phase
        self._values = values  # the buffer lives as long as its transfer

    def wait(self) -> None:
        self._transport.wait_for(self._work, self._peer, self._phase)


class _Both:
    __slots__ = ("_first", "_second")

    def __init__(self, first: _Transfer, second: _Transfer) -> None:
        self._first, self._second = first, second

    def wait(self) -> None:
        self._first.wait()
        self._second.wait()


class _Delayed:
    __slots__ = ("_latency", "_message", "_sent", "_stamp")

    def __init__(self, stamp: _Transfer, sent: Tensor, message: _Transfer, latency: float) -> None:
        self._stamp, self._sent, self._message, self._latency = stamp, sent, message, latency

    def wait(self) -> None:
        self._stamp.wait()
        self._message.wait()
        time.sleep(max(0.0, float(self._sent) + self._latency - time.monotonic()))


class _Nothing:
    def wait(self) -> None:
        return


_NOTHING = _Nothing()
