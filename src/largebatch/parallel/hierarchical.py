"""How do hosts of several ranks add up a buffer when the wire between them is slow? In three phases.

Inside each host the buffers are added up, the sums are added up between hosts, and the totals are passed on inside.
With one carrier a host that is Goyal's all-reduce; sharded, each local rank carries its own part between hosts, so that
all of them talk at once. A host with more ranks than the smallest one has ranks that carry nothing.

Of c carriers a host, one that carries m of n elements on a host of r ranks sends n - m inside, what halving/doubling of
m elements sends between hosts, and (r - 1) m inside again; a rank that carries nothing sends n.

Source: Goyal et al. 2017, section 4.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.parallel import halving_doubling
from largebatch.parallel.exchange import SEGMENT_BYTES, Part, Plan, Span, Step, run
from largebatch.parallel.ring import parts_of
from largebatch.parallel.topology import Topology
from largebatch.parallel.transport import Transport


def hierarchical(
    values: Tensor, transport: Transport, *, topology: Topology, sharded: bool = False,
    wire: torch.dtype | None = None, segment_bytes: int = SEGMENT_BYTES,
) -> None:  # fmt: skip
    """Sum `values` over all ranks, in place; every rank ends with the same bits.

    Args:
        values: contiguous, one-dimensional, on the CPU; of the same length and dtype on every rank.
        transport: between the ranks.
        topology: the host of each rank.
        sharded: let every local rank carry a part between hosts, instead of the first one all of it.
        wire: dtype of what is sent, such as torch.bfloat16; sums are then float32 or wider. None sends `values`' own.
        segment_bytes: bytes of a message; one is added up while the next travels.

    Raises:
        ConfigError: the tensor or the dtype cannot be used, or the topology is of another number of ranks.
        PeerLostError: another rank is gone or hangs.

    >>> import torch
    >>> from largebatch.parallel.loopback import on_ranks
    >>> def total(transport):
    ...     values = torch.arange(3) + transport.rank
    ...     hierarchical(values, transport, topology=Topology((0, 0, 1)))
    ...     return values.tolist()
    >>> on_ranks(3, total)
    [[3, 6, 9], [3, 6, 9], [3, 6, 9]]

    Source: Goyal et al. 2017, section 4 (three phases; halving/doubling between servers).
    """
    if topology.world_size != transport.world_size:
        raise ConfigError(f"the topology is of {topology.world_size} ranks, and there are {transport.world_size}.")
    steps = plan(transport.rank, topology, len(values), sharded=sharded)
    run(values, transport, steps, wire, segment_bytes)


@lru_cache(maxsize=256)
def plan(rank: int, topology: Topology, length: int, *, sharded: bool) -> Plan:
    """What one rank does."""
    hosts = [topology.ranks_of(host) for host in range(topology.num_hosts)]
    local = hosts[topology.hosts[rank]]
    parts = _parts(topology, length, sharded=sharded)
    elsewhere = tuple(Part(carrier, *part) for carrier, part in zip(local, parts, strict=False) if carrier != rank)
    place = local.index(rank)
    if place >= len(parts):
        inside = Step("inside the host: reduce", elsewhere), Step("inside the host: broadcast", (), elsewhere)
        return Plan(inside[:1], (0, 0), inside[1:])
    mine = parts[place]
    peers = tuple(Part(peer, *mine) for peer in local if peer != rank)
    first = (Step("inside the host: reduce", elsewhere, peers),) if len(local) > 1 else ()
    last = (Step("inside the host: broadcast", peers, elsewhere),) if len(local) > 1 else ()
    between = halving_doubling.plan(topology.hosts[rank], len(hosts), mine[1] - mine[0])
    carriers = tuple(host[place] for host in hosts)
    sums, totals = (
        tuple(step.moved(carriers, mine[0], "between hosts") for step in steps)
        for steps in (between.sums, between.totals)
    )
    own = between.own[0] + mine[0], between.own[1] + mine[0]
    return Plan(first + sums, own, totals + last)


def num_steps(topology: Topology) -> int:
    """Steps of the rank that has most: one before and one after those between hosts, where any host has two ranks.

    >>> num_steps(Topology((0, 0, 1, 1, 2, 2, 3, 3)))
    6
    """
    return halving_doubling.num_steps(topology.num_hosts) + 2 * (topology.num_hosts < topology.world_size)


def num_bytes(rank: int, topology: Topology, length: int, itemsize: int, *, sharded: bool) -> int:
    """Bytes that a rank sends to sum `length` elements of `itemsize` bytes, by the formula of this module.

    >>> num_bytes(0, Topology((0, 0, 1, 1)), 8, 4, sharded=True)  # (1/2 + 1/2 + 1/2) of 32 bytes
    48
    """
    local = topology.ranks_of(topology.hosts[rank])
    place = local.index(rank)
    sizes = [stop - start for start, stop in _parts(topology, length, sharded=sharded)]
    if place >= len(sizes):
        return itemsize * length
    own = sizes[place]
    between = halving_doubling.num_bytes(topology.hosts[rank], topology.num_hosts, own, itemsize)
    return itemsize * (length - own if len(local) > 1 else 0) + between + itemsize * own * (len(local) - 1)


def _parts(topology: Topology, length: int, *, sharded: bool) -> list[Span]:
    num_carriers = topology.ranks_per_host if sharded else 1
    return [parts_of(length, num_carriers, number) for number in range(num_carriers)]
