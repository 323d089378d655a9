"""How do p ranks add up a buffer when each talks to its neighbours alone? Around a ring, in 2 (p - 1) steps.

The buffer is cut into p parts. In each step of the reduce-scatter a rank sends one part to the next and adds the one
that comes from the one before; in the all-gather the finished parts go around once more. Every rank sends
2 (p - 1)/p b bytes of a buffer of b, where p divides its n elements. In general part k is of floor(n/p) + (k < n mod p)
elements, and rank r sends each part twice, but parts r + 1 and r + 2 (mod p) once less.

Source: Goyal et al. 2017, section 4 (the ring, or bucket, algorithm).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from largebatch.parallel.exchange import SEGMENT_BYTES, Part, Plan, Step, run
from largebatch.parallel.transport import Transport


def ring(
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
    ...     ring(values, transport)
    ...     return values.tolist()
    >>> on_ranks(2, total)
    [[1, 3, 5], [1, 3, 5]]

    Source: Goyal et al. 2017, section 4.
    """
    run(values, transport, plan(transport.rank, transport.world_size, len(values)), wire, segment_bytes)


@lru_cache(maxsize=256)
def plan(rank: int, world_size: int, length: int) -> Plan:
    """What one rank does.

    >>> plan(0, 2, 4).sums[0].gives
    (Part(peer=1, start=0, stop=2),)
    """
    after, before = (rank + 1) % world_size, (rank - 1) % world_size

    def step(phase: str, number: int, given: int) -> Step:
        give, take = (parts_of(length, world_size, part % world_size) for part in (given, given - 1))
        return Step(f"{phase}, step {number + 1}", (Part(after, *give),), (Part(before, *take),))

    steps = range(world_size - 1)
    return Plan(
        sums=tuple(step("reduce-scatter", number, rank - number) for number in steps),
        own=parts_of(length, world_size, after),
        totals=tuple(step("all-gather", number, rank + 1 - number) for number in steps),
    )


def num_steps(world_size: int) -> int:
    """Steps of the ring, 2 (p - 1).

    >>> num_steps(32)
    62
    """
    return 2 * (world_size - 1)


def num_bytes(rank: int, world_size: int, length: int, itemsize: int) -> int:
    """Bytes that a rank sends to sum `length` elements of `itemsize` bytes, by the formula of this module.

    >>> num_bytes(0, 4, 8, 4), num_bytes(0, 4, 9, 4)
    (48, 56)
    """
    skipped = (parts_of(length, world_size, (rank + more) % world_size) for more in (1, 2))
    return itemsize * (2 * length - sum(stop - start for start, stop in skipped))


def parts_of(length: int, size: int, number: int) -> tuple[int, int]:
    """First element and end of part `number` of `size`, whose lengths differ by one at most.

    >>> [parts_of(8, 3, number) for number in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    whole, rest = divmod(length, size)
    start = number * whole + min(number, rest)
    return start, start + whole + (number < rest)
