"""Which all-reduce is the fastest for each size on the cluster that this job runs on? Measured once, in seconds.

    choices = calibrate(group)  # every rank of the group calls it
    handle = pipelined_allreduce(ddp_model, algorithm=choices)

Rank 0's table goes to all ranks and never changes, so that they never choose apart. Keep it with the run's record and
read it back by `Choices.from_record` when the run goes on: a table measured again may choose otherwise, and sums added
up in another order have other bits.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch.distributed as dist

from largebatch.errors import ConfigError
from largebatch.parallel.choose import Choices, Links, Timing, candidates, predict_seconds, tabulate
from largebatch.parallel.cost import LinkCost
from largebatch.parallel.fit import fit_link
from largebatch.parallel.group_transport import GroupTransport
from largebatch.parallel.measure import add_seconds_per_byte, allreduce_calls, time_in_turns, time_links
from largebatch.parallel.topology import Topology, find_topology

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)
"""Bytes at which every algorithm is timed, as far as the time goes."""
_MESSAGES = (1 << 10, 1 << 14, 1 << 16, 1 << 18)
_LINKS = 0.2
"""Part of the time that is spent on messages between two ranks."""


def calibrate(
    group: dist.ProcessGroup | None = None,
    topology: Topology | None = None,
    *,
    seconds: float = 4.0,
    max_bytes: int = SIZES[-1],
    timeout: float = 30.0,
) -> Choices:
    """Measure the all-reduces on this cluster and freeze the fastest of each size; every rank of the group calls it.

    First what a message between two ranks costs, inside hosts and between them, then each algorithm and the backend's
    own at sizes a factor of 4 to 16 apart. Sizes that would take too long are left out: the table goes on from the
    largest one measured, by the cost model.

    Args:
        group: the ranks; None for all of the job. Its backend must take tensors on the CPU.
        topology: the host of each rank; None finds out by the hosts' names.
        seconds: to spend, about; more where one call of each takes longer.
        max_bytes: the largest size to time.
        timeout: seconds that one transfer may take.

    Returns:
        Choices: the same on every rank.

    Raises:
        ConfigError: torch.distributed is not started, or an argument cannot be used.
        PeerLostError: a rank is gone or hangs.

    Source: Goyal et al. 2017, section 4: which is faster depends on the size of the buffer.
    """
    found: Any = dist.group.WORLD if group is None and dist.is_initialized() else group
    if not isinstance(found, dist.ProcessGroup):
        raise ConfigError(
            "torch.distributed is not started, so there is nothing to measure. Start the job by torchrun."
        )
    if not 0 < seconds < math.inf or max_bytes < SIZES[0]:
        raise ConfigError(
            f"calibration takes positive seconds, and sizes from {SIZES[0]} bytes; got {seconds} and {max_bytes}."
        )
    if "gloo" not in str(dist.get_backend_config(found)):
        raise ConfigError(
            f"calibration sums tensors on the CPU, and this group's backend is {dist.get_backend(found)}. Pass a group "
            "of gloo, or start the job with backend='cpu:gloo,cuda:nccl'."
        )
    if topology is None:
        topology = find_topology(found)
    if topology.world_size != found.size():
        raise ConfigError(f"the topology is of {topology.world_size} ranks, and the group has {found.size()}.")
    made = dist.new_group(dist.get_process_group_ranks(found), backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is among them"
    try:
        choices = _measure(made, topology, seconds, max_bytes, timeout)
        said: list[Any] = [choices.as_record() if found.rank() == 0 else None]
        dist.broadcast_object_list(said, group=made, group_src=0)
    finally:
        dist.destroy_process_group(made)
    return Choices.from_record(said[0])


def _measure(group: dist.ProcessGroup, topology: Topology, seconds: float, max_bytes: int, timeout: float) -> Choices:
    begun = time.perf_counter()
    transport = GroupTransport(group, timeout=timeout)
    links = _fit_links(transport, group, topology, _LINKS * seconds)
    names = candidates(topology)
    sizes = [size for size in SIZES if size <= max_bytes]
    if group.size() == 1:  # nothing travels, at any size
        sizes = sizes[:1]
    timings: list[Timing] = []
    for number, size in enumerate(sizes):
        left = seconds - (time.perf_counter() - begun)
        if timings:
            last = timings[-1]
            expected = 3 * sum(
                taken
                * predict_seconds(name, size, topology, links)
                / predict_seconds(name, last.num_bytes, topology, links)
                for name, taken in last.seconds.items()
            )  # called three times at least
            if not _agreed(expected < left, group):
                break
        calls = allreduce_calls(names, size, transport, group, topology)
        taken = time_in_turns(calls, group, seconds=max(0.0, left) / (len(sizes) - number), most=9)
        timings.append(Timing(num_bytes=size, seconds={name: statistics.median(each) for name, each in taken.items()}))
    return tabulate(timings, topology, links)


def _fit_links(transport: GroupTransport, group: dist.ProcessGroup, topology: Topology, seconds: float) -> Links:
    """Each wire by pairs of ranks; the speed of adding up while all ranks do."""
    adding = add_seconds_per_byte()
    pairs = {"inside": _pairs_inside(topology), "between": _pairs_between(topology)}
    used = {name: found for name, found in pairs.items() if found}
    fitted = {
        name: fit_link(
            time_links(transport, group, found.get(transport.rank), _MESSAGES, seconds=seconds / len(used)),
            reduce_seconds_per_byte=adding,
        )
        for name, found in used.items()
    }
    if not fitted:  # one rank alone
        return Links(inside=LinkCost(0.0, 0.0, adding), between=LinkCost(0.0, 0.0, adding))
    any_link = next(iter(fitted.values()))
    return Links(inside=fitted.get("inside", any_link), between=fitted.get("between", any_link))


def _pairs_inside(topology: Topology) -> dict[int, int]:
    """Rank -> the other of its pair, of the first two ranks of each host."""
    firsts = [topology.ranks_of(host)[:2] for host in range(topology.num_hosts)]
    return {rank: pair[1 - place] for pair in firsts if len(pair) == 2 for place, rank in enumerate(pair)}


def _pairs_between(topology: Topology) -> dict[int, int]:
    """Rank -> the other of its pair, of the first ranks of hosts 0 and 1, 2 and 3, ..."""
    firsts = [topology.ranks_of(host)[0] for host in range(topology.num_hosts)]
    return {rank: firsts[host ^ 1] for host, rank in enumerate(firsts) if host ^ 1 < len(firsts)}


def _agreed(opinion: bool, group: dist.ProcessGroup) -> bool:
    said: list[Any] = [opinion]
    dist.broadcast_object_list(said, group=group, group_src=0)
    return said[0]
