"""What would it take to reach an efficiency? One change at a time, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from largebatch.errors import ConfigError
from largebatch.parallel.simulate.cluster import Cluster, Workload
from largebatch.parallel.simulate.point import Point, best_point, simulate_point

_HALVINGS = 24
_BATCHES = (2, 3, 4, 6, 8, 16, 32)
_CONCURRENCIES = (1, 2, 3, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One thing changed, all else kept."""

    name: str
    """Such as "bandwidth"."""
    factor: float | None
    """What it is multiplied by; None where no value reaches the goal."""
    value: float | None
    """What it then is: all-reduces in flight, units a GPU, seconds, bytes a second; of jitter, a part of compute."""
    efficiency: float
    """With it; where no value reaches the goal, of the best one."""

    @property
    def reaches(self) -> bool:
        """Whether the goal is reached."""
        return self.factor is not None


def efficiency(workload: Workload, gpus: int, base_gpus: int, cluster: Cluster, concurrency: int) -> float:
    """Work a second of each GPU, beside that of each of `base_gpus`; both sent in the best way there is."""
    return _ratio(*(best_point(workload, count, cluster, concurrency=concurrency) for count in (base_gpus, gpus)))


def reach(
    goal: float, workload: Workload, gpus: int, base_gpus: int, cluster: Cluster, concurrency: int = 2
) -> list[Change]:
    """Every single change that was searched: those that reach the goal first, the cheapest before.

    What costs nothing comes before what costs money: all-reduces in flight, then the batch of each GPU (which is a
    change of the training, and needs a recipe), then latency, bandwidth and jitter by how far they must move.

    Args:
        goal: efficiency, above 0 and below 1.
        workload: what each worker computes; its time is taken to grow with the batch.
        gpus: where the goal is to hold.
        base_gpus: what efficiency is measured against; the change is made there too.
        cluster: hosts and links as they are.
        concurrency: all-reduces in flight as it is.

    Returns:
        The changes; an empty list says that the goal is reached as it is.

    Raises:
        ConfigError: the goal is no efficiency, or `gpus` is not more than `base_gpus`.
    """
    if not 0 < goal < 1:
        raise ConfigError(f"the goal is an efficiency above 0 and below 1, such as 0.97; got {goal!r}.")
    if gpus <= base_gpus:
        raise ConfigError(
            f"the goal is sought on more than {base_gpus} GPUs, which it is measured against; got {gpus}."
        )
    if efficiency(workload, gpus, base_gpus, cluster, concurrency) >= goal:
        return []
    search = _Search(goal, workload, gpus, base_gpus, cluster, concurrency)
    network = cluster.network
    changes = [
        search.concurrency(),
        search.batch(),
        search.shrink(
            "latency", network.latency,
            lambda factor: replace(cluster, network=replace(network, latency=network.latency * factor)),
        ),
        search.shrink(
            "bandwidth", network.seconds_per_byte,
            lambda factor: replace(
                cluster, network=replace(network, seconds_per_byte=network.seconds_per_byte * factor)
            ),
        ),
        search.shrink("jitter", cluster.jitter, lambda factor: replace(cluster, jitter=cluster.jitter * factor)),
    ]  # fmt: skip
    free = ("concurrency", "batch of a GPU")
    return sorted(
        changes,
        key=lambda change: (
            not change.reaches,
            free.index(change.name) if change.name in free else len(free),
            abs(math.log(change.factor)) if change.factor else math.inf,
        ),
    )


def _ratio(base: Point, point: Point) -> float:
    return base.iteration_seconds / point.iteration_seconds


@dataclass(frozen=True, slots=True)
class _Search:
    goal: float
    workload: Workload
    gpus: int
    base: int
    cluster: Cluster
    flights: int

    def _of(self, workload: Workload, cluster: Cluster, flights: int) -> float:
        return efficiency(workload, self.gpus, self.base, cluster, flights)

    def concurrency(self) -> Change:
        found = [(self._of(self.workload, self.cluster, flights), flights) for flights in _CONCURRENCIES]
        enough = [flights for reached, flights in found if reached >= self.goal]
        if not enough:
            return Change(name="concurrency", factor=None, value=None, efficiency=max(found)[0])
        flights = min(enough, key=lambda flights: abs(math.log(flights / self.flights)))
        reached = next(reached for reached, other in found if other == flights)
        return Change(name="concurrency", factor=flights / self.flights, value=flights, efficiency=reached)

    def batch(self) -> Change:
        best = 0.0
        for factor in _BATCHES:
            larger = replace(
                self.workload, per_gpu=self.workload.per_gpu * factor,
                other_seconds=self.workload.other_seconds * factor,
                profile=self.workload.profile.scaled(self.workload.profile.backward_seconds * factor),
            )  # fmt: skip
            best = max(best, self._of(larger, self.cluster, self.flights))
            if best >= self.goal:
                return Change(name="batch of a GPU", factor=factor, value=larger.per_gpu, efficiency=best)
        return Change(name="batch of a GPU", factor=None, value=None, efficiency=best)

    def shrink(self, name: str, now: float, changed: Callable[[float], Cluster]) -> Change:
        """The largest factor at most 1 that is enough."""
        best = self._of(self.workload, changed(0.0), self.flights)
        if best < self.goal or now == 0:
            return Change(name=name, factor=None, value=None, efficiency=best)
        plans = {
            count: best_point(self.workload, count, changed(0.5), concurrency=self.flights).plan
            for count in (self.base, self.gpus)
        }
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):  # with one way of sending, then its result beside all ways
            middle = (low + high) / 2
            points = (simulate_point(self.workload, count, changed(middle), plan) for count, plan in plans.items())
            low, high = (middle, high) if _ratio(*points) >= self.goal else (low, middle)
        for factor in (low, low * 0.9, low * 0.75, low * 0.5):
            reached = self._of(self.workload, changed(factor), self.flights)
            if reached >= self.goal:
                return self._change(name, now, factor, reached)
        return self._change(name, now, 0.0, best)

    def _change(self, name: str, now: float, factor: float, reached: float) -> Change:
        if name == "bandwidth":
            inverse = math.inf if factor == 0 else 1 / factor
            return Change(name=name, factor=inverse, value=inverse / now, efficiency=reached)
        return Change(name=name, factor=factor, value=factor * now, efficiency=reached)
