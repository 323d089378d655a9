"""How do p ranks add up a short buffer in log2 p steps? By recursive doubling: in each they swap all they have.

In step i ranks at distance 2^i swap their whole sums, and both add. That is half the steps of halving/doubling, and
log2 p times the buffer from every rank instead of 2 (p - 1)/p times: for buffers whose transfer costs less than a step.

Of any other number of ranks, those beyond the largest power of two first give their buffer to one of the others, and
get the totals from it: two steps more. A rank sends n elements in each step, of a buffer of n.

In a world of a power of two the tree is that of halving/doubling, and so are the bits, on any wire: which of the two a
buffer of some length goes by changes none.

Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH", sec. 4.5.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from largebatch.parallel.exchange import SEGMENT_BYTES, Part, Plan, Step, run
from largebatch.parallel.transport import Transport


def doubling(
    values: Tensor, transport: Transport, *, wire: torch.dtype | None = None, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Sum `values` over all ranks, in place; every rank ends with the same bits.

    Args:
        values: contiguous, one-dimensional, on the CPU; of the same length and dtype on every rank.
        transport: between the ranks.
        wire: dtype of what is sent, such as torch.bfloat16; sums are then float32 or wider. None sends `values`' own.
        segment_bytes: bytes of a message; one is added up while the next travels.

    Raises:
        ConfigError: the tensor or the dtype cannot be used.
        PeerLostError: another rank is gone or hangs.

    >>> import torch
    >>> from largebatch.parallel.loopback import on_ranks
    >>> def total(transport):
    ...     values = torch.arange(3) + transport.rank
    ...     doubling(values, transport)
    ...     return values.tolist()
    >>> on_ranks(3, total)
    [[3, 6, 9], [3, 6, 9], [3, 6, 9]]

    Source: Thakur, Rabenseifner and Gropp 2005, section 4.5 (recursive doubling).
    """
    run(values, transport, plan(transport.rank, transport.world_size, len(values)), wire, segment_bytes)


@lru_cache(maxsize=256)
def plan(rank: int, world_size: int, length: int) -> Plan:
    """What one rank does.

    >>> [step.phase for step in plan(0, 4, 8).sums]
    ['doubling, distance 1', 'doubling, distance 2']
    """
    levels = world_size.bit_length() - 1
    size = 1 << levels
    if rank >= size:
        whole = (Part(rank - size, 0, length),)
        return Plan((Step("sums of the ranks beyond", whole, ()),), (0, 0), (Step("totals for them", (), whole),))
    sums = [
        Step(f"doubling, distance {1 << level}", (part := (Part(rank ^ 1 << level, 0, length),)), part, is_even=True)
        for level in range(levels)
    ]
    totals: list[Step] = []
    if rank + size < world_size:
        beyond = (Part(rank + size, 0, length),)
        sums.insert(0, Step("sums of the ranks beyond", (), beyond))
        totals.append(Step("totals for them", beyond, ()))
    return Plan(tuple(sums), (0, length), tuple(totals))


def num_steps(world_size: int) -> int:
    """Steps of the rank that has most: log2 p, and 2 more where p is no power of two.

    >>> num_steps(32), num_steps(44)
    (5, 7)
    """
    levels = world_size.bit_length() - 1
    return levels + 2 * (world_size != 1 << levels)


def num_bytes(rank: int, world_size: int, length: int, itemsize: int) -> int:
    """Bytes that a rank sends to sum `length` elements of `itemsize` bytes.

    >>> num_bytes(0, 32, 1024, 4) / (1024 * 4)
    5.0
    """
    levels = world_size.bit_length() - 1
    size = 1 << levels
    return itemsize * length * (1 if rank >= size else levels + (rank + size < world_size))
