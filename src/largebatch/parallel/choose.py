"""Which all-reduce is the fastest for a buffer of this size? A table that was measured once, and then never changes.

Between the sizes that were measured, a time is the cost model's, times what the measured ones were beside it. The
table is plain data: two ranks, or two runs, that hold the same one choose alike, and so add up in the same order.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from largebatch.errors import ConfigError
from largebatch.parallel.cost import LinkCost, allreduce_seconds, hierarchical_seconds
from largebatch.parallel.topology import Topology

BACKEND = "backend"
"""The process group's own all-reduce."""
MARGIN = 0.03
"""How much faster than the backend's own another has to be, as a part of that one's time."""
_FIRST, _LAST, _A_DOUBLING = 8, 32, 4
"""The table is from 2^8 to 2^32 bytes, in quarter powers of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What was measured at one size."""

    num_bytes: int
    """Of the buffer."""
    seconds: Mapping[str, float]
    """Algorithm's name -> seconds, of the slowest rank."""

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or not self.seconds or not all(0 < each < math.inf for each in self.seconds.values()):
            raise ConfigError(f"a timing is of 1 byte or more and of positive seconds; got {self}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """What the wires of a cluster cost."""

    inside: LinkCost
    """Between ranks of one host; where no host has two, the same as `between`."""
    between: LinkCost
    """Between hosts; where there is one, the same as `inside`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The fastest algorithm for each size on one cluster: `choices(num_bytes)`.

    >>> link = LinkCost(20e-6, 1e-9)
    >>> times = {"ring": 2e-4, "halving_doubling": 1e-4, "backend": 3e-4}
    >>> rows = [Timing(num_bytes=1024, seconds=times), Timing(num_bytes=1 << 20, seconds=times | {"backend": 9e-5})]
    >>> choices = tabulate(rows, Topology((0, 1, 2, 3)), Links(inside=link, between=link))
    >>> choices(1000), choices(1 << 20), Choices.from_record(choices.as_record()) == choices
    ('halving_doubling', 'backend', True)
    """

    hosts: tuple[int, ...]
    """The host of each rank."""
    links: Links
    """As fitted."""
    timings: tuple[Timing, ...]
    """As measured, ascending."""
    steps: tuple[tuple[int, str], ...]
    """From so many bytes on, this algorithm; ascending, the first from 0."""

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.steps]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise ConfigError(f"a table of choices starts at 0 bytes and ascends; got {starts}.")

    def __call__(self, num_bytes: int) -> str:
        """The algorithm for a buffer of so many bytes."""
        return self.steps[bisect_right(self.steps, num_bytes, key=lambda step: step[0]) - 1][1]

    def as_record(self) -> dict[str, Any]:
        """Plain data that JSON takes, for the run's record."""
        return {
            "hosts": list(self.hosts), "steps": [list(step) for step in self.steps], "links": asdict(self.links),
            "timings": [{"num_bytes": row.num_bytes, "seconds": dict(row.seconds)} for row in self.timings],
        }  # fmt: skip

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Choices:
        """The table that `as_record` wrote.

        Raises:
            ConfigError: it is no such table.
        """
        try:
            return cls(
                hosts=Topology(tuple(record["hosts"])).hosts,
                links=Links(
                    inside=LinkCost(**record["links"]["inside"]), between=LinkCost(**record["links"]["between"])
                ),
                timings=tuple(
                    Timing(num_bytes=row["num_bytes"], seconds=dict(row["seconds"])) for row in record["timings"]
                ),
                steps=tuple((int(start), str(name)) for start, name in record["steps"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"this is no table of all-reduces ({error!r}). Calibrate again.") from None


def candidates(topology: Topology) -> tuple[str, ...]:
    """What can be the fastest: two levels only where there are hosts of several ranks.

    >>> candidates(Topology((0, 1, 2)))
    ('ring', 'halving_doubling', 'doubling', 'backend')
    """
    levels = ("hierarchical", "hierarchical_sharded")
    return ("ring", "halving_doubling", "doubling", *(levels if _has_levels(topology) else ()), BACKEND)


def choose(num_bytes: int, topology: Topology, links: Links) -> str:
    """The fastest of our algorithms by the cost model alone, for a cluster on which nothing was measured.

    >>> slow = LinkCost(50e-6, 1e-9)
    >>> choose(1024, Topology(tuple(range(32))), Links(inside=slow, between=slow))
    'doubling'
    >>> choose(1 << 20, Topology(tuple(range(32))), Links(inside=slow, between=slow))
    'halving_doubling'

    Source: Goyal et al. 2017, section 4 (steps and bytes of ring and halving/doubling).
    """
    ours = [name for name in candidates(topology) if name != BACKEND]
    return min(ours[::-1], key=lambda name: predict_seconds(name, num_bytes, topology, links))


def predict_seconds(name: str, num_bytes: float, topology: Topology, links: Links) -> float:
    """Seconds of an all-reduce by the cost model; "backend" as a ring, which gloo's own is."""
    wire = links.between if topology.num_hosts > 1 else links.inside
    if name.startswith("hierarchical"):
        return hierarchical_seconds(
            num_bytes, topology.num_hosts, topology.ranks_per_host, links.inside, links.between,
            sharded=name == "hierarchical_sharded",
        )  # fmt: skip
    return allreduce_seconds("ring" if name == BACKEND else name, num_bytes, topology.world_size, wire)


def tabulate(timings: Iterable[Timing], topology: Topology, links: Links, *, margin: float = MARGIN) -> Choices:
    """Freeze the fastest algorithm of each size.

    Args:
        timings: of one or more sizes, each of the same algorithms, the backend's own among them.
        topology: the host of each rank.
        links: of the cost model, which gives the shape between sizes; measured times give the height.
        margin: the backend's own is kept where nothing is faster than it by this part of its time.

    Raises:
        ConfigError: no timings, or they are not of the same algorithms.
    """
    rows = tuple(sorted(timings, key=lambda row: row.num_bytes))
    names = sorted(rows[0].seconds) if rows else []
    if BACKEND not in names or any(sorted(row.seconds) != names for row in rows):
        raise ConfigError(
            f"a table needs times of the same algorithms, {BACKEND!r} among them, at each size; got {rows}."
        )
    if len({row.num_bytes for row in rows}) != len(rows):
        raise ConfigError(f"a table needs one row a size; got {[row.num_bytes for row in rows]}.")
    steps: list[tuple[int, str]] = []
    for step in range(_FIRST * _A_DOUBLING, _LAST * _A_DOUBLING + 1):
        size = round(2 ** (step / _A_DOUBLING))
        seconds = {name: _between(name, size, rows, topology, links) for name in names}
        steps.append((size, _fastest(seconds, margin)))
    frozen = [next(run) for _, run in groupby(steps, key=lambda step: step[1])]
    frozen[0] = (0, frozen[0][1])
    return Choices(hosts=topology.hosts, links=links, timings=rows, steps=tuple(frozen))


def _fastest(seconds: Mapping[str, float], margin: float) -> str:
    best = min(sorted(seconds), key=lambda name: seconds[name])
    return best if seconds[best] <= (1 - margin) * seconds[BACKEND] else BACKEND


def _between(name: str, size: int, rows: Sequence[Timing], topology: Topology, links: Links) -> float:
    """The model's time at a size, times measured over predicted, which goes straight in the logarithm of the size."""

    def factor(row: Timing) -> float:
        predicted = predict_seconds(name, row.num_bytes, topology, links)
        return row.seconds[name] / predicted if predicted > 0 else math.inf

    above = bisect_right(rows, size, key=lambda row: row.num_bytes)
    low, high = rows[max(0, above - 1)], rows[min(above, len(rows) - 1)]
    if low.num_bytes == size or low is high:
        part = 0.0
    else:
        part = math.log(size / low.num_bytes) / math.log(high.num_bytes / low.num_bytes)
    predicted = predict_seconds(name, size, topology, links)
    if math.isinf(factor(low)) or math.isinf(factor(high)) or not predicted:  # a model of no cost: no shape
        return low.seconds[name] ** (1 - part) * high.seconds[name] ** part
    return predicted * factor(low) ** (1 - part) * factor(high) ** part


def _has_levels(topology: Topology) -> bool:
    return topology.num_hosts > 1 and any(len(topology.ranks_of(host)) > 1 for host in range(topology.num_hosts))
