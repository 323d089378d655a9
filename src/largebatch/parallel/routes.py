"""By which way does one bucket travel? Over our transport, by the backend's own collective, or both at once.

A bucket on the CPU goes by an algorithm over the lane's gloo transport. One on an accelerator is copied to the host for
that, or, with groups for the inside of each host, adds up there first: torch's own reduce and broadcast (NCCL's, on
GPUs) within the host, and our halving/doubling over gloo between hosts, as in Goyal's three phases.

The way inside by NCCL has not been run: CI runs it with gloo at both levels.

Source: Goyal et al. 2017, section 4 (NCCL inside the server, gloo between servers).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.parallel.algorithms import find
from largebatch.parallel.choose import BACKEND
from largebatch.parallel.halving_doubling import halving_doubling
from largebatch.parallel.lost import Observed, RollCall, said_by
from largebatch.parallel.ring import parts_of
from largebatch.parallel.subset import Subset
from largebatch.parallel.topology import Topology


class UnreachedError(RuntimeError):
    """A collective failed, which does not say because of whom."""

    def __init__(self, suspects: tuple[int, ...], phase: str, said: str, *, is_gone: bool) -> None:
        super().__init__(f"{phase}: {said}")
        self.suspects, self.phase, self.said, self.is_gone = suspects, phase, said, is_gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """What one lane has to travel by."""

    lane: int
    transport: Observed
    """Between all ranks, for messages from host memory."""
    roll: RollCall
    whole: dist.ProcessGroup | None
    """All ranks, of the model's own backend; None where its own all-reduce is never chosen."""
    inside: dist.ProcessGroup | None
    """The ranks of this host, for torch's collectives; None where all goes over the transport."""
    topology: Topology
    wire: torch.dtype | None
    room: dict[torch.dtype, Tensor] = field(default_factory=dict[torch.dtype, Tensor])
    """Host memory for buckets that are on an accelerator."""

    def sum(self, values: Tensor, name: str) -> None:
        """Sum `values` in place over all ranks by the algorithm `name`, and wait for it.

        Raises:
            PeerLostError: a rank is gone or hangs, as far as this one can tell.
            UnreachedError: a collective failed.
        """
        if name == BACKEND:
            whole = self.whole
            assert whole is not None, "the backend's all-reduce was not among what may be chosen"
            self._collective(values, "the backend's own", whole, lambda: dist.all_reduce(values, group=whole))
        elif self.inside is not None and name.startswith("hierarchical"):
            self._hierarchical(values, self.inside, sharded=name == "hierarchical_sharded")
        else:
            algorithm = find(name, self.topology)
            self._on_host(values, lambda host: algorithm(host, self.transport, wire=self.wire))

    def _hierarchical(self, values: Tensor, inside: dist.ProcessGroup, *, sharded: bool) -> None:
        """Reduce inside the host, sum between hosts, broadcast inside; each carrier has its part of the buffer."""
        hosts = self.topology
        local = dist.get_process_group_ranks(inside)  # in the numbering of the job, which torch's src and dst take
        number = dist.get_rank(inside)
        num_carriers = hosts.ranks_per_host if sharded else 1
        parts = [values[slice(*parts_of(len(values), num_carriers, carrier))] for carrier in range(num_carriers)]
        for carrier, part in enumerate(parts):
            root = local[carrier]
            self._collective(part, "inside the host: reduce", inside, _reduce(part, root, inside))
        if number < num_carriers:
            carriers = [hosts.ranks_of(host)[number] for host in range(hosts.num_hosts)]
            between = Subset(self.transport, carriers, "between hosts")
            self._on_host(parts[number], lambda host: halving_doubling(host, between, wire=self.wire))
        for carrier, part in enumerate(parts):
            root = local[carrier]
            self._collective(part, "inside the host: broadcast", inside, _broadcast(part, root, inside))

    def _on_host(self, values: Tensor, algorithm: Callable[[Tensor], None]) -> None:
        if values.device.type == "cpu":
            algorithm(values)
            return
        room = self.room.get(values.dtype)
        if room is None or len(room) < len(values):
            room = torch.empty(len(values), dtype=values.dtype, pin_memory=True)
            self.room[values.dtype] = room
        host = room[: len(values)]
        host.copy_(values, non_blocking=True)
        torch.cuda.current_stream(values.device).synchronize()
        algorithm(host)
        values.copy_(host, non_blocking=True)

    def _collective(self, values: Tensor, phase: str, group: dist.ProcessGroup, start: Callable[[], object]) -> None:
        """Run one of torch's collectives, and wait on the host: a peer that is gone is to be noticed here."""
        own = dist.get_rank()
        suspects = tuple(rank for rank in dist.get_process_group_ranks(group) if rank != own)
        self.roll.waits(self.lane, suspects, phase)
        started = time.monotonic()
        try:
            start()
            self._settle(values)
        except RuntimeError as error:
            is_gone = time.monotonic() - started < 0.9 * self.roll.patience
            raise UnreachedError(suspects, phase, said_by(error), is_gone=is_gone) from error
        self.roll.goes_on(self.lane)

    def _settle(self, values: Tensor) -> None:
        if values.device.type == "cpu":
            return
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(values.device))
        deadline = time.monotonic() + self.roll.patience
        while not done.query():  # to wait for the event itself would be to wait for ever for a lost peer
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done after {self.roll.patience:g} s")
            time.sleep(5e-5)


def _reduce(part: Tensor, root: int, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: dist.reduce(part, dst=root, group=group)


def _broadcast(part: Tensor, root: int, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: dist.broadcast(part, src=root, group=group)
