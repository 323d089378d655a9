"""How do p ranks add up a buffer when each talks to its neighbours alone? Around a ring, in 2 (p - 1) steps.

The buffer is cut into p parts. In each step of the reduce-scatter a rank sends one part to the next and adds the one
that comes from the one before; in the all-gather the finished parts go around once more. Every rank sends
2 (p - 1)/p b bytes of a buffer of b.

Source: Goyal et al. 2017, section 4 (the ring, or bucket, algorithm).
"""

from __future__ import annotations

import torch
from torch import Tensor

from largebatch.parallel.exchange import SEGMENT_BYTES, Exchange, Part
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
    exchange = Exchange(values, transport, wire, segment_bytes)
    rank, size = transport.rank, transport.world_size
    after, before = (rank + 1) % size, (rank - 1) % size

    def part(peer: int, number: int) -> Part:
        return Part(peer, *parts_of(len(values), size, number % size))

    for step in range(size - 1):
        exchange.add([part(after, rank - step)], [part(before, rank - step - 1)], f"reduce-scatter, step {step + 1}")
    exchange.round(*parts_of(len(values), size, after))
    for step in range(size - 1):
        exchange.replace([part(after, rank + 1 - step)], [part(before, rank - step)], f"all-gather, step {step + 1}")
    exchange.finish()


def parts_of(length: int, size: int, number: int) -> tuple[int, int]:
    """First element and end of part `number` of `size`, whose lengths differ by one at most.

    >>> [parts_of(8, 3, number) for number in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    whole, rest = divmod(length, size)
    start = number * whole + min(number, rest)
    return start, start + whole + (number < rest)
