"""How do hosts of several ranks add up a buffer when the wire between them is slow? In three phases.

Inside each host the buffers are added up, the sums are added up between hosts, and the totals are passed on inside.
With one carrier a host that is Goyal's all-reduce; sharded, each local rank carries its own part between hosts, so that
all of them talk at once. A host with more ranks than the smallest one has ranks that carry nothing.

Source: Goyal et al. 2017, section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.parallel.exchange import SEGMENT_BYTES, Exchange, Part
from largebatch.parallel.halving_doubling import halving_doubling
from largebatch.parallel.ring import parts_of
from largebatch.parallel.subset import Subset
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
    exchange = Exchange(values, transport, wire, segment_bytes)
    rank = transport.rank
    local = topology.ranks_of(topology.hosts[rank])
    num_carriers = topology.ranks_per_host if sharded else 1
    parts = [parts_of(len(values), num_carriers, number) for number in range(num_carriers)]
    others = [(carrier, part) for carrier, part in zip(local, parts, strict=False) if carrier != rank]
    elsewhere = [Part(carrier, *part) for carrier, part in others]
    place = local.index(rank)
    mine = parts[place] if place < num_carriers else None
    peers = [Part(peer, *mine) for peer in local if peer != rank] if mine else []

    exchange.add(elsewhere, peers, "inside the host: reduce")
    if mine:
        carriers = [topology.ranks_of(host)[place] for host in range(topology.num_hosts)]
        between = Subset(transport, carriers, "between hosts")
        halving_doubling(exchange.values[slice(*mine)], between, wire=wire, segment_bytes=segment_bytes)
    exchange.replace(peers, elsewhere, "inside the host: broadcast")
    exchange.finish()
