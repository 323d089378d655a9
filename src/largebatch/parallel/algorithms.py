"""Which all-reduce algorithms are there, by name?"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.parallel.doubling import doubling
from largebatch.parallel.halving_doubling import halving_doubling
from largebatch.parallel.hierarchical import hierarchical
from largebatch.parallel.ring import ring
from largebatch.parallel.topology import Topology
from largebatch.parallel.transport import Transport

NAMES = ("ring", "halving_doubling", "doubling", "hierarchical", "hierarchical_sharded")
"""What `find` knows."""


class Allreduce(Protocol):
    """Sums a buffer in place over all ranks."""

    def __call__(self, values: Tensor, transport: Transport, *, wire: torch.dtype | None = None) -> None:
        """Sum `values`, contiguous and one-dimensional, on the CPU; sent as `wire`."""
        ...


def find(name: str, topology: Topology | None = None) -> Allreduce:
    """The algorithm of a name.

    Args:
        name: one of `NAMES`.
        topology: the host of each rank; the hierarchical ones need it.

    Raises:
        ConfigError: there is none of that name, or it needs a topology.

    >>> find("ring").__name__
    'ring'
    """
    if name == "ring":
        return ring
    if name == "halving_doubling":
        return halving_doubling
    if name == "doubling":
        return doubling
    if name not in NAMES:
        raise ConfigError(f"there is no all-reduce called {name!r}; there are {', '.join(NAMES)}.")
    if topology is None:
        raise ConfigError(f"{name} needs to know which ranks share a host: pass topology=find_topology(group).")
    return partial(hierarchical, topology=topology, sharded=name == "hierarchical_sharded")
