"""How long do messages and all-reduces take on this cluster, as it runs?

Calls follow each other without a pause, many of the short ones to a sample, so that neither the clock nor the uneven
end of a barrier is measured. What is to be compared takes turns. Rank 0 says how often, so all ranks do the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.parallel.algorithms import find
from largebatch.parallel.choose import BACKEND
from largebatch.parallel.topology import Topology
from largebatch.parallel.transport import Transport

SAMPLE_SECONDS = 0.02
"""At least so long is one sample."""


def allreduce_calls(
    names: Sequence[str], num_bytes: int, transport: Transport, group: dist.ProcessGroup, topology: Topology
) -> dict[str, Callable[[], None]]:
    """A function for each algorithm that sums one buffer of float32 zeros; every rank calls them in the same order."""
    values = torch.empty(max(1, num_bytes // 4)).fill_(0)

    def call(name: str) -> Callable[[], None]:
        if name == BACKEND:
            return lambda: _wait(dist.all_reduce(values, group=group))
        algorithm = find(name, topology)
        return lambda: algorithm(values, transport)

    return {name: call(name) for name in names}


def exchange_call(num_bytes: int, transport: Transport, peer: int | None) -> Callable[[], None]:
    """A function that swaps a message with a peer; without one it does nothing."""
    out, back = torch.zeros(max(1, num_bytes // 4)), torch.empty(max(1, num_bytes // 4))

    def swap() -> None:
        if peer is not None:
            coming = transport.receive(back, peer, "calibration")
            going = transport.send(out, peer, "calibration")
            coming.wait()
            going.wait()

    return swap


def add_seconds_per_byte(num_bytes: int = 1 << 18, repeats: int = 20) -> float:
    """Seconds that adding up a byte of float32 takes here, in pieces that stay in the cache."""
    total, more = torch.zeros(num_bytes // 4), torch.ones(num_bytes // 4)
    samples: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        total.add_(more)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) / num_bytes


def time_in_turns(
    calls: Mapping[str, Callable[[], None]],
    group: dist.ProcessGroup,
    *,
    seconds: float,
    most: int = 50,
    sample_seconds: float = SAMPLE_SECONDS,
) -> dict[str, list[float]]:
    """Time functions that all ranks call together, in turns, for about so many seconds.

    Args:
        calls: name -> function; the same names in the same order on every rank.
        group: of all ranks, with a backend for the CPU; used for nothing else meanwhile.
        seconds: for all of it; every function is timed once at least.
        most: samples of each.
        sample_seconds: that a sample takes at least.

    Returns:
        dict[str, list[float]]: name -> seconds of a call, by the slowest rank, in the order of the samples; the same
            on every rank.
    """
    begun = time.perf_counter()
    plan: dict[str, int] = {}
    first: dict[str, float] = {}
    for name, call in calls.items():
        call()  # makes the connections
        once = _mean_seconds(call, 1, group)
        several = _said_by_first(min(5, int(sample_seconds / once)), group)
        if several > 1:
            once = _mean_seconds(call, several, group)
        plan[name] = _said_by_first(max(1, round(sample_seconds / once)), group)
        first[name] = once
    a_round = sum(plan[name] * first[name] for name in calls)
    left = seconds - (time.perf_counter() - begun)
    rounds = _said_by_first(max(1, min(most, int(left / a_round))), group)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            samples[name].append(_mean_seconds(calls[name], plan[name], group))
    slowest = torch.tensor([samples[name] for name in names], dtype=torch.float64)
    _wait(dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group))
    return dict(zip(names, slowest.tolist(), strict=True))


def time_links(
    transport: Transport, group: dist.ProcessGroup, peer: int | None, sizes: Sequence[int], *, seconds: float
) -> dict[int, float]:
    """Bytes -> seconds in which pairs of ranks swap a message of that size, all pairs at once; the slowest pair's."""
    calls = {str(size): exchange_call(size, transport, peer) for size in sizes}
    return {int(size): statistics.median(taken) for size, taken in time_in_turns(calls, group, seconds=seconds).items()}


def _mean_seconds(call: Callable[[], None], repeats: int, group: dist.ProcessGroup) -> float:
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _said_by_first(number: int, group: dist.ProcessGroup) -> int:
    said: Tensor = torch.tensor([number])
    _wait(dist.broadcast(said, group=group, group_src=0))
    return int(said)


def _wait(_work: Any) -> None:
    """Collectives that are not asynchronous return None; whatever they return is done."""
