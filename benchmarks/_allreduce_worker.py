"""What one rank of benchmarks/allreduce.py measures; every function is called by all ranks of a job."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from largebatch.parallel.calibrate import calibrate
from largebatch.parallel.choose import BACKEND
from largebatch.parallel.cost import allreduce_seconds
from largebatch.parallel.fit import fit_link
from largebatch.parallel.group_transport import GroupTransport
from largebatch.parallel.measure import allreduce_calls, time_in_turns, time_links
from largebatch.parallel.topology import Topology


def against_backend(
    rank: int, sizes: Sequence[int], calibration_s: float, seconds: float, sample_s: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice, made before, beside the backend's own at each size, in turns.

    Args:
        rank: unused; `Network.run` passes it.
        sizes: bytes.
        calibration_s: seconds of the calibration.
        seconds: of each size, about.
        sample_s: seconds of a sample, at least.

    Returns:
        tuple: the table's record, and a row for each size.
    """
    topology = Topology(tuple(range(dist.get_world_size())))
    choices = calibrate(topology=topology, seconds=calibration_s)
    group: Any = dist.group.WORLD
    transport = GroupTransport(_own_group(), timeout=60)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        name = choices(size)
        names = sorted({name, "halving_doubling", BACKEND})
        calls = allreduce_calls(names, size, transport, group, topology)
        taken = time_in_turns(calls, group, seconds=seconds, sample_seconds=sample_s)
        # The backend's own is the chosen one where the choice is the backend: the same function, the ratio is 1.
        ratios = [theirs / ours for theirs, ours in zip(taken[BACKEND], taken[name], strict=True)]
        own = [theirs / ours for theirs, ours in zip(taken[BACKEND], taken["halving_doubling"], strict=True)]
        rows.append(
            {
                "num_bytes": size, "chosen": name, "ratio": statistics.median(ratios),
                "halving_doubling_ratio": statistics.median(own),
                "ms": {each: 1e3 * statistics.median(taken[each]) for each in names}, "samples": len(ratios),
                "best_ms": {each: 1e3 * min(taken[each]) for each in names},
                "low": min(ratios), "high": max(ratios),
            }
        )  # fmt: skip
    return choices.as_record(), rows


def with_latencies(
    rank: int, latencies: Sequence[float], sizes: Sequence[int], seconds: float
) -> list[list[dict[str, Any]]]:
    """For each latency, a row for each size."""
    group = _own_group()
    return [
        [_with_latency(rank, GroupTransport(group, timeout=60, latency=latency), size, seconds) for size in sizes]
        for latency in latencies
    ]


def _with_latency(rank: int, transport: GroupTransport, size: int, seconds: float) -> dict[str, Any]:
    """Ring and halving/doubling over a transport with a delay line, beside the cost model.

    The model's wire is fitted to messages that all pairs of ranks swap at once over the same transport, so that what
    the machine adds to the delay is in it; no all-reduce is.
    """
    world_size = dist.get_world_size()
    topology = Topology(tuple(range(world_size)))
    group: Any = dist.group.WORLD
    peer = rank ^ 1 if rank ^ 1 < world_size else None
    names = ("ring", "halving_doubling")
    # The wire is fitted beside each size, as the machine is busy by fits and starts.
    link = fit_link(time_links(transport, group, peer, (1 << 8, 1 << 12, 1 << 15), seconds=seconds / 2))
    calls = allreduce_calls(names, size, transport, group, topology)
    taken = {name: statistics.median(each) for name, each in time_in_turns(calls, group, seconds=seconds).items()}
    model = {name: allreduce_seconds(name, size, world_size, link) for name in names}
    return {
        "num_bytes": size, "ms": {name: 1e3 * taken[name] for name in names},
        "ring_over_halving_doubling": taken["ring"] / taken["halving_doubling"],
        "measured_over_model": {name: taken[name] / model[name] for name in names}, "message_ms": 1e3 * link.latency,
    }  # fmt: skip


def _own_group() -> dist.ProcessGroup:
    made = dist.new_group(use_local_synchronization=False)
    assert isinstance(made, dist.ProcessGroup)
    return made
