"""How do p ranks add up a buffer in 2 log2 p steps? By recursive halving and doubling.

In step i of the reduce-scatter, ranks at distance 2^i swap halves of the part they still hold, each keeping the half it
will own; the all-gather takes the same way back. Every rank sends 2 (p - 1)/p b bytes of a buffer of b.

Other numbers of ranks are cut into binary blocks, the powers of two that add up to p, the largest first. After each
block's own reduce-scatter, sums go from the smallest block to the next larger one, and so on to the largest; before the
all-gather they come back: two extra steps.

In a world of a power of two the addends of every element are added in one tree, ((0+1)+(2+3))+..., wherever it lies in
the buffer and however long that is: cutting gradients into other buckets changes no bit.

Source: Goyal et al. 2017, section 4; Rabenseifner 2004; binary blocks as in gloo.
"""

from __future__ import annotations

import torch
from torch import Tensor

from largebatch.parallel.exchange import SEGMENT_BYTES, Exchange, Part
from largebatch.parallel.transport import Transport

Span = tuple[int, int]
"""Elements from, to."""


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
    exchange = Exchange(values, transport, wire, segment_bytes)
    rank, length = transport.rank, len(values)
    blocks = binary_blocks(transport.world_size)
    index = next(index for index, block in enumerate(blocks) if rank in block)
    block = blocks[index]
    place, size = rank - block.start, len(block)

    for distance, give, keep in halvings(place, size, length):
        peer = block.start + (place ^ distance)
        exchange.add([Part(peer, *give)], [Part(peer, *keep)], f"reduce-scatter, distance {distance}")
    own = owned(place, size, length)
    below = _meetings(own, blocks[index + 1], length) if index + 1 < len(blocks) else []
    above = _meetings(own, blocks[index - 1], length) if index > 0 else []
    if below:
        exchange.add([], below, "sums from the smaller block")
    if above:
        exchange.add(above, [], "sums to the larger block")
        exchange.replace([], above, "totals from the larger block")
    else:
        exchange.round(*own)
    if below:
        exchange.replace(below, [], "totals to the smaller block")
    for distance, give, keep in reversed(list(halvings(place, size, length))):
        peer = block.start + (place ^ distance)
        exchange.replace([Part(peer, *keep)], [Part(peer, *give)], f"all-gather, distance {distance}")
    exchange.finish()


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


def _meetings(own: Span, block: range, length: int) -> list[Part]:
    """Where this rank's part meets the parts of another block's ranks."""
    found = (
        (other, max(own[0], start), min(own[1], stop))
        for other in block
        for start, stop in [owned(other - block.start, len(block), length)]
    )
    return [Part(*part) for part in found if part[1] < part[2]]
