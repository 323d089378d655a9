"""How do p ranks add up a buffer in 2 log2 p steps? By recursive halving and doubling.

In step i of the reduce-scatter, ranks at distance 2^i swap halves of the part they still hold, each keeping the half it
will own; the all-gather takes the same way back. Every rank sends 2 (p - 1)/p b bytes of a buffer of b.

Other numbers of ranks are cut into binary blocks, the powers of two that add up to p, the largest first. After each
block's own reduce-scatter, sums go from the smallest block to the next larger one, and so on to the largest; before the
all-gather they come back: two extra steps.

In a world of a power of two the addends of every element are added in one tree, ((0+1)+(2+3))+..., wherever it lies in
the buffer and however long that is: cutting gradients into other buckets changes no bit. With another dtype on the
wire both addends are rounded to it, the one that was sent and the one that was kept, so that it holds then too.

A rank at place q of a block of 2^k holds s_i = ceil((n - q mod 2^i) / 2^i) of n elements after i steps. It sends n-s_k
in the reduce-scatter and s_k + ... + s_1 in the all-gather, n + s_1 + ... + s_(k-1) together (nothing where k = 0), s_k
more where there is a larger block, and s_k more where there is a smaller one.

Source: Goyal et al. 2017, section 4; Rabenseifner 2004; binary blocks as in gloo.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from largebatch.parallel.exchange import SEGMENT_BYTES, Part, Plan, Span, Step, run
from largebatch.parallel.transport import Transport


def halving_doubling(
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
    ...     halving_doubling(values, transport)
    ...     return values.tolist()
    >>> on_ranks(3, total)
    [[3, 6, 9], [3, 6, 9], [3, 6, 9]]

    Source: Goyal et al. 2017, section 4 (halving/doubling, binary blocks).
    """
    run(values, transport, plan(transport.rank, transport.world_size, len(values)), wire, segment_bytes)


@lru_cache(maxsize=256)
def plan(rank: int, world_size: int, length: int) -> Plan:
    """What one rank does.

    >>> plan(0, 2, 4).sums[0].takes
    (Part(peer=1, start=0, stop=2),)
    """
    blocks = binary_blocks(world_size)
    index = next(index for index, block in enumerate(blocks) if rank in block)
    block = blocks[index]
    place, size = rank - block.start, len(block)
    steps = halvings(place, size, length)
    own = owned(place, size, length)
    sums = [
        Step(f"reduce-scatter, distance {distance}", *_swap(block[place ^ distance], give, keep), is_even=True)
        for distance, give, keep in steps
    ]
    totals = [
        Step(f"all-gather, distance {distance}", *_swap(block[place ^ distance], keep, give))
        for distance, give, keep in reversed(steps)
    ]
    if index + 1 < len(blocks):
        # A span is decided by its place's low bits: it lies in that of the place with the same ones in a smaller block.
        smaller = blocks[index + 1]
        below = (Part(smaller[place % len(smaller)], *own),)
        sums.append(Step("sums from the smaller block", (), below))
        totals.insert(0, Step("totals to the smaller block", below, ()))
    if index > 0:
        larger = blocks[index - 1]
        above = tuple(
            Part(larger[other], *owned(other, len(larger), length)) for other in range(place, len(larger), size)
        )
        sums.append(Step("sums to the larger block", above, ()))
        totals.insert(0, Step("totals from the larger block", (), above))
        own = (0, 0)
    return Plan(tuple(sums), own, tuple(totals))


def num_steps(world_size: int) -> int:
    """Steps of the rank that has most: 2 log2 p, and 2 more than the largest block's where there are several.

    >>> num_steps(32), num_steps(44)
    (10, 12)
    """
    largest = world_size.bit_length() - 1
    return 2 * largest + 2 * (world_size != 1 << largest)


def num_bytes(rank: int, world_size: int, length: int, itemsize: int) -> int:
    """Bytes that a rank sends to sum `length` elements of `itemsize` bytes, by the formula of this module.

    >>> num_bytes(0, 32, 1024, 4) / (1024 * 4)  # Goyal et al. 2017: 2 * 31/32
    1.9375
    """
    blocks = binary_blocks(world_size)
    index = next(index for index, block in enumerate(blocks) if rank in block)
    place, levels = rank - blocks[index].start, len(blocks[index]).bit_length() - 1
    held = [-((place % (1 << level) - length) // (1 << level)) for level in range(levels + 1)]
    inside = sum(held[:levels])
    return itemsize * (inside + held[levels] * ((index > 0) + (index + 1 < len(blocks))))


def binary_blocks(world_size: int) -> list[range]:
    """The ranks cut into powers of two, the largest first.

    >>> binary_blocks(13)
    [range(0, 8), range(8, 12), range(12, 13)]
    """
    blocks: list[range] = []
    start = 0
    for bit in reversed(range(world_size.bit_length())):
        if world_size >> bit & 1:
            blocks.append(range(start, start + (1 << bit)))
            start += 1 << bit
    return blocks


def halvings(place: int, size: int, length: int) -> list[tuple[int, Span, Span]]:
    """Each step of a reduce-scatter: the distance, what this rank gives away and what it keeps.

    >>> halvings(0, 4, 8)
    [(1, (4, 8), (0, 4)), (2, (2, 4), (0, 2))]
    """
    steps: list[tuple[int, Span, Span]] = []
    start, stop, distance = 0, length, 1
    while distance < size:
        middle = (start + stop + 1) // 2
        keep, give = (start, middle), (middle, stop)
        if place & distance:
            keep, give = give, keep
        steps.append((distance, give, keep))
        (start, stop), distance = keep, 2 * distance
    return steps


def owned(place: int, size: int, length: int) -> Span:
    """The part that the rank at `place` in a block of `size` holds after the reduce-scatter."""
    steps = halvings(place, size, length)
    return steps[-1][2] if steps else (0, length)


def _swap(peer: int, give: Span, take: Span) -> tuple[tuple[Part], tuple[Part]]:
    return (Part(peer, *give),), (Part(peer, *take),)
