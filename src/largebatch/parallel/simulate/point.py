"""How long does a step take on so many GPUs, and how is it best sent?

Hosts are alike, so one of them is simulated, for any number of them. What is not alike enters by its maximum: an
all-reduce ends for all when it does for the worker that began last, since every rank needs every other's part, and a
host with a slow link takes all its own steps over it. Where the late worker and the slow link are on one host that is
exact but for latency (a late worker's neighbours have sent before it asks); otherwise it is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from largebatch.errors import ConfigError
from largebatch.parallel.cost import LinkCost, hierarchical_phases
from largebatch.parallel.model_profile import ModelProfile
from largebatch.parallel.simulate.cluster import BETWEEN_HOSTS, Cluster, Plan, Workload
from largebatch.parallel.simulate.engine import Bucket, Phase, Span, run_buckets
from largebatch.parallel.simulate.jitter import expected_latest

MEBIBYTE = 2**20
BUCKET_BYTES = tuple(float(size * MEBIBYTE) for size in (0, 1, 2, 4, 8, 16, 25, 32, 64, 128))
"""Sizes that are tried."""
SAME = 1e-3
"""Relative difference of steps that nobody would notice."""

_PREFERS = ("halving_doubling", "ring", "tree")

_NAMES = ("inside: reduce", "between hosts", "inside: broadcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A step on so many GPUs."""

    gpus: int
    """Workers."""
    hosts: int
    """That they are on."""
    iteration_seconds: float
    """Expected, of a whole step."""
    compute_seconds: float
    """Of a worker alone."""
    latest_seconds: float
    """Expected wait for the last worker."""
    exposed_seconds: float
    """Of communication after the backward."""
    busy_seconds: float
    """That a host's link to the others is busy."""
    plan: Plan
    """How gradients were sent."""
    units_per_second: float
    """Of all workers."""


def cut_into_buckets(profile: ModelProfile, bucket_bytes: float) -> list[tuple[float, float]]:
    """When each bucket is ready, and its bytes: layers in backward order until `bucket_bytes` are reached.

    >>> from largebatch.parallel.model_profile import LayerProfile
    >>> layers = tuple(LayerProfile(name=name, num_bytes=size, seconds=1.0) for name, size in zip("cba", (4, 4, 9)))
    >>> cut_into_buckets(ModelProfile(name="abc", layers=layers, measured=False), 8)
    [(2.0, 8), (3.0, 9)]
    """
    buckets: list[tuple[float, float]] = []
    now, held = 0.0, 0
    for position, layer in enumerate(profile.layers, 1):
        now += layer.seconds
        held += layer.num_bytes
        if held and (held >= bucket_bytes or position == len(profile.layers)):
            buckets.append((now, held))
            held = 0
    return buckets + ([(now, held)] if held else [])


def timeline(workload: Workload, gpus: int, cluster: Cluster, plan: Plan) -> list[Span]:
    """Every phase of every bucket on one host; 0 is the begin of the backward of the last worker."""
    return run_buckets(_buckets(workload, gpus, cluster, plan), plan.concurrency)


def simulate_point(workload: Workload, gpus: int, cluster: Cluster, plan: Plan) -> Point:
    """A step on so many GPUs, sent as planned.

    Args:
        workload: what each worker computes.
        gpus: workers, >= 1; one sends nothing.
        cluster: hosts and links.
        plan: algorithm, bucket size and concurrency.

    Returns:
        The expected step. Jitter shifts a worker's whole backward, so all buckets begin later by the expected latest
        of all workers, and what is exposed is the same in each step.

    Raises:
        ConfigError: a number is out of its range.

    Source: Goyal et al. 2017, section 4.
    """
    hosts = cluster.hosts(gpus)
    buckets = _buckets(workload, gpus, cluster, plan)
    spans = run_buckets(buckets, plan.concurrency)
    backward = workload.profile.backward_seconds
    exposed = max([0.0, *(span.stop - backward for span in spans)])
    spread = cluster.jitter * workload.compute_seconds
    late = cluster.straggler_seconds
    latest = spread * expected_latest(gpus, late / spread) if spread > late * 1e-9 else late
    iteration = workload.compute_seconds + latest + exposed
    busy = sum(phase.busy for bucket in buckets for phase in bucket.phases if phase.link == "between")
    return Point(
        gpus=gpus, hosts=hosts, iteration_seconds=iteration, compute_seconds=workload.compute_seconds,
        latest_seconds=latest, exposed_seconds=exposed, busy_seconds=busy, plan=plan,
        units_per_second=gpus * workload.per_gpu / iteration,
    )  # fmt: skip


def best_point(
    workload: Workload, gpus: int, cluster: Cluster, *, algorithms: Sequence[str] = BETWEEN_HOSTS,
    bucket_bytes: Sequence[float] = BUCKET_BYTES, concurrency: int = 2,
) -> Point:  # fmt: skip
    """The shortest step over algorithms and bucket sizes.

    Of steps that are longer than it by `SAME` at most, the one in the largest buckets is taken: fewer messages are less
    work for the hosts, which nobody has put into the model.

    Raises:
        ConfigError: there is nothing to choose from, or a number is out of its range.
    """
    if not algorithms or not bucket_bytes:
        raise ConfigError("the best of no algorithm, or of no bucket size, cannot be found; give one of each.")
    plan = Plan(concurrency=concurrency)
    points = [
        simulate_point(workload, gpus, cluster, replace(plan, algorithm=algorithm, bucket_bytes=size))
        for algorithm in algorithms
        for size in bucket_bytes
    ]

    shortest = min(point.iteration_seconds for point in points)
    same = [point for point in points if point.iteration_seconds <= shortest * (1 + SAME)]
    largest = max(point.plan.bucket_bytes for point in same)
    return min(
        (point for point in same if point.plan.bucket_bytes == largest),
        key=lambda point: (round(point.iteration_seconds, 9), _PREFERS.index(point.plan.algorithm)),
    )


def _buckets(workload: Workload, gpus: int, cluster: Cluster, plan: Plan) -> list[Bucket]:
    return [
        Bucket(ready, _phases(num_bytes, gpus, cluster, plan))
        for ready, num_bytes in cut_into_buckets(workload.profile, plan.bucket_bytes)
    ]


def _phases(num_bytes: float, gpus: int, cluster: Cluster, plan: Plan) -> tuple[Phase, ...]:
    """The three phases of one bucket; those that take no time are left out."""
    hosts, ranks = cluster.hosts(gpus), min(gpus, cluster.gpus_per_host)
    slow = cluster.slow_link if hosts > 1 else 1.0
    between = replace(cluster.network, seconds_per_byte=cluster.network.seconds_per_byte * slow)

    def seconds(inside: LinkCost, outside: LinkCost) -> tuple[float, float, float]:
        return hierarchical_phases(
            num_bytes, hosts, ranks, inside, outside, sharded=plan.sharded, chain=True, algorithm=plan.algorithm
        )

    whole = seconds(cluster.intra, between)
    waiting = seconds(LinkCost(cluster.intra.latency, 0), LinkCost(between.latency, 0))
    links = ("inside", "between", "inside")
    rows = zip(_NAMES, links, waiting, whole, strict=True)
    return tuple(Phase(name, link, wait, max(0.0, both - wait)) for name, link, wait, both in rows if both)
