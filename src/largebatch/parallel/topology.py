"""Which ranks share a host?"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from largebatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """The host of each rank.

    >>> Topology((0, 0, 1, 1)).num_hosts
    2
    """

    hosts: tuple[int, ...]
    """The host of rank 0, 1, ..., numbered 0, 1, ... in the order in which they first occur."""

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ConfigError("a topology needs at least one rank; got none.")
        seen = -1
        for rank, host in enumerate(self.hosts):
            if host > seen + 1 or host < 0:
                raise ConfigError(
                    f"hosts are numbered 0, 1, ... as they first occur; rank {rank} is on host {host} after "
                    f"{seen + 1} hosts. Use Topology.of(names)."
                )
            seen = max(seen, host)

    @classmethod
    def of(cls, names: Sequence[object]) -> Topology:
        """The topology of ranks whose hosts have these names.

        >>> Topology.of(["b", "a", "b"]).hosts
        (0, 1, 0)
        """
        numbers: dict[object, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.hosts)

    @property
    def num_hosts(self) -> int:
        """Hosts."""
        return max(self.hosts) + 1

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """The ranks on a host, ascending."""
        return tuple(rank for rank, other in enumerate(self.hosts) if other == host)

    @property
    def ranks_per_host(self) -> int:
        """Ranks on the host that has the fewest."""
        return min(len(self.ranks_of(host)) for host in range(self.num_hosts))


def find_topology(group: dist.ProcessGroup | None = None) -> Topology:
    """Which ranks of a group share a host, by the hosts' names; every rank of it calls this.

    Args:
        group: the ranks, in their order; None for all of the job.
    """
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return Topology.of(names)
