"""How long does an all-reduce take? Arithmetic from latency, bandwidth and the speed of adding up.

A message of n bytes takes `latency + n * seconds_per_byte` where both sides are ready, and adding it up takes
`n * reduce_seconds_per_byte` more. Latency is a delay, no occupation: what is sent early arrives early. A rank sends at
full rate while it receives at full rate.

Binary blocks, for numbers of ranks that are no power of two: blocks of n_1 > n_2 > ... > n_m ranks. With a buffer of b
bytes, a = latency, t = seconds_per_byte, g = reduce_seconds_per_byte, scatter(n) = log2(n) a + (n-1)/n b (t + g) and
gather(n) = log2(n) a + (n-1)/n b t:

    up(m)   = scatter(n_m)
    up(i)   = max(scatter(n_i), up(i+1) + a) + b/n_(i+1) t + b/n_i g     sums come in from the next smaller block
    down(1) = up(1)
    down(i) = down(i-1) + a + b/n_i t                                    totals come back from the next larger one
    all     = max over i of down(i) + (b/n_(i+1) t, except i = m) + gather(n_i)

For a power of two that is scatter + gather. Where b is small it is 2 log2(n_1) a for any number of ranks: a smaller
block is done earlier, by at least the step that its sums then take. Where b is large it is an upper bound: it takes
every rank of a block to be as late as its last one. Beside every message simulated on its own it is 5 % above at 44
ranks and 27 % at most up to 130 ranks.

Source: Goyal et al. 2017, section 4 (steps and bytes of ring and halving/doubling; binary blocks); Rabenseifner 2004.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from largebatch.errors import ConfigError

ALGORITHMS = ("ring", "halving_doubling", "doubling", "tree")
"""What `allreduce_seconds` knows."""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What a wire costs.

    >>> LinkCost(20e-6, 1 / 6.25e9).seconds(6_250_000)
    0.00102
    """

    latency: float
    """Seconds that a message takes however short it is."""
    seconds_per_byte: float
    """1 / bandwidth, in one direction while the other is busy too."""
    reduce_seconds_per_byte: float = 0.0
    """Seconds that adding up a received byte takes beyond its transfer; 0 where that is hidden behind it."""

    def __post_init__(self) -> None:
        for name in ("latency", "seconds_per_byte", "reduce_seconds_per_byte"):
            value: float = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name} of a link is a number of seconds, 0 or more; got {value!r}.")

    def seconds(self, num_bytes: float) -> float:
        """One message, from ready to received."""
        return self.latency + num_bytes * self.seconds_per_byte

    def reduced(self, num_bytes: float) -> float:
        """One message, from ready to added up."""
        return self.seconds(num_bytes) + num_bytes * self.reduce_seconds_per_byte


def allreduce_seconds(algorithm: str, num_bytes: float, world_size: int, link: LinkCost) -> float:
    """Seconds of one all-reduce over ranks that all start at once.

    Args:
        algorithm: "ring": 2 (p-1) steps of b/p. "halving_doubling": 2 log2(p) steps, 2 (p-1)/p b bytes; binary blocks
            by the formula of this module. "doubling": log2(p) steps of b, and two more where p is no power of two,
            for the ranks beyond the largest. "tree": reduce, then broadcast along a binomial tree, 2 ceil(log2 p) steps
            of b.
        num_bytes: b, of the buffer.
        world_size: p, >= 1; one rank costs nothing.
        link: between any two ranks.

    Raises:
        ConfigError: there is no such algorithm, or a number is out of its range.

    >>> wire = LinkCost(20e-6, 1 / 6.25e9)  # 50 Gbit/s
    >>> round(allreduce_seconds("halving_doubling", 100e6, 32, wire), 6)  # 31 ms of transfer and 10 steps
    0.0312
    >>> round(allreduce_seconds("ring", 100e6, 32, wire), 6)  # the same transfer and 62 steps
    0.03224

    Source: Goyal et al. 2017, section 4.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"there is no cost of an algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}.")
    if world_size < 1 or not (num_bytes >= 0 and math.isfinite(num_bytes)):
        raise ConfigError(
            f"an all-reduce is of 0 bytes or more over 1 rank or more; got num_bytes={num_bytes!r}, "
            f"world_size={world_size!r}."
        )
    if world_size == 1:
        return 0.0
    if algorithm == "ring":
        part = num_bytes / world_size
        return (world_size - 1) * (link.reduced(part) + link.seconds(part))
    if algorithm == "doubling":
        levels = world_size.bit_length() - 1
        beyond = 0.0 if world_size == 1 << levels else link.reduced(num_bytes) + link.seconds(num_bytes)
        return levels * link.reduced(num_bytes) + beyond
    if algorithm == "tree":
        levels = (world_size - 1).bit_length()
        return levels * (link.reduced(num_bytes) + link.seconds(num_bytes))
    return _halving_doubling(num_bytes, world_size, link)


def hierarchical_seconds(
    num_bytes: float, num_hosts: int, ranks_per_host: int, inside: LinkCost, between: LinkCost, sharded: bool
) -> float:
    """Seconds of one all-reduce in three phases: the sum of `hierarchical_phases`.

    >>> wire = LinkCost(20e-6, 1 / 6.25e9)
    >>> hierarchical_seconds(100e6, 32, 1, wire, wire, False) == allreduce_seconds("halving_doubling", 100e6, 32, wire)
    True
    """
    return sum(hierarchical_phases(num_bytes, num_hosts, ranks_per_host, inside, between, sharded=sharded))


def hierarchical_phases(
    num_bytes: float, num_hosts: int, ranks_per_host: int, inside: LinkCost, between: LinkCost, *, sharded: bool,
    chain: bool = False, algorithm: str = "halving_doubling",
) -> tuple[float, float, float]:  # fmt: skip
    """Seconds of the phases inside, between and inside the hosts again.

    Args:
        num_bytes: b, of the buffer.
        num_hosts: hosts, of `ranks_per_host` ranks each.
        ranks_per_host: r >= 1; one has no phases inside.
        inside: between ranks of one host.
        between: between hosts, whose ranks share it: what r of them send at once takes r times as long.
        sharded: every rank carries b/r between hosts, and receives r-1 parts of b/r before it; otherwise the first
            rank receives r-1 buffers of b and carries all of it.
        chain: inside, buffers pass from rank to rank in small pieces, as NCCL's do: b bytes through each link, and
            r-1 latencies. Sharded, that is a ring's (r-1)/r b.
        algorithm: between hosts.

    Source: Goyal et al. 2017, section 4 (the three phases).
    """
    if ranks_per_host < 1 or num_hosts < 1:
        raise ConfigError(f"there are 1 host or more of 1 rank or more; got {num_hosts} of {ranks_per_host}.")
    others = ranks_per_host - 1
    carriers = ranks_per_host if sharded else 1
    shared = LinkCost(between.latency, between.seconds_per_byte * carriers, between.reduce_seconds_per_byte)
    middle = allreduce_seconds(algorithm, num_bytes / carriers, num_hosts, shared)
    if not others:
        return 0.0, middle, 0.0
    through = others * num_bytes / ranks_per_host if sharded else num_bytes if chain else others * num_bytes
    more = (others - 1) * inside.latency if chain else 0.0
    return inside.reduced(through) + more, middle, inside.seconds(through) + more


def _halving_doubling(num_bytes: float, world_size: int, link: LinkCost) -> float:
    sizes = [1 << bit for bit in reversed(range(world_size.bit_length())) if world_size >> bit & 1]
    owns = [num_bytes / size for size in sizes]
    sums = _scatter(sizes[-1], num_bytes, link)
    for size, own, below in zip(sizes[-2::-1], owns[-2::-1], owns[:0:-1], strict=True):
        begins = max(_scatter(size, num_bytes, link), sums + link.latency)
        sums = begins + below * link.seconds_per_byte + own * link.reduce_seconds_per_byte
    totals, ends = sums, 0.0
    for index, size in enumerate(sizes):
        totals += link.seconds(owns[index]) if index else 0.0
        passes_on = owns[index + 1] * link.seconds_per_byte if index + 1 < len(sizes) else 0.0
        ends = max(ends, totals + passes_on + _gather(size, num_bytes, link))
    return ends


def _gather(size: int, num_bytes: float, link: LinkCost) -> float:
    return (size.bit_length() - 1) * link.latency + num_bytes * (size - 1) / size * link.seconds_per_byte


def _scatter(size: int, num_bytes: float, link: LinkCost) -> float:
    return _gather(size, num_bytes, link) + num_bytes * (size - 1) / size * link.reduce_seconds_per_byte
