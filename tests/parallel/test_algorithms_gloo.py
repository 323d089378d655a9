"""The all-reduces over real gloo processes: the same sums, the same bits, and errors that name a rank."""

from __future__ import annotations

import hashlib
import socket
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from largebatch.errors import ConfigError
from largebatch.parallel.algorithms import NAMES, find
from largebatch.parallel.group_transport import GroupTransport
from largebatch.parallel.halving_doubling import halving_doubling
from largebatch.parallel.loopback import on_ranks
from largebatch.parallel.topology import Topology, find_topology
from largebatch.parallel.transport import PeerLostError
from workers import on_workers

DTYPES = (torch.int64, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIRES = (None, torch.bfloat16)
LENGTHS = (0, 1, 7, 5_000)


def _topology(world_size: int) -> Topology:
    """Uneven hosts, their ranks scattered."""
    return Topology.of([rank % 3 if rank < 4 else 0 for rank in range(world_size)])


def _addend(dtype: torch.dtype, rank: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(length, generator=generator, dtype=torch.float64)).to(dtype)


def _digests(rank: int, transport: object) -> dict[str, str]:
    """A digest of each result; one transport carries all of them, one after the other."""
    digests: dict[str, str] = {}
    for name in NAMES:
        algorithm = find(name, _topology(transport.world_size))  # type: ignore[attr-defined]
        for dtype in DTYPES:
            for wire in WIRES if dtype.is_floating_point else (None,):
                for length in LENGTHS:
                    values = _addend(dtype, rank, length)
                    algorithm(values, transport, wire=wire)  # type: ignore[arg-type]
                    bits = values.view(torch.uint8).numpy().tobytes()
                    digests[f"{name} {dtype} {wire} {length}"] = hashlib.sha256(bits).hexdigest()
    return digests


def _over_gloo(rank: int) -> dict[str, str]:
    return _digests(rank, GroupTransport())


@pytest.mark.parametrize("world_size", range(2, 9))
def test_gloo_brings_the_bits_of_the_loopback_on_every_rank(world_size: int) -> None:
    # The loopback's sums are held to float64's in test_algorithms.py: the same bits here are as right as those.
    expected = on_ranks(world_size, lambda transport: _digests(transport.rank, transport))[0]
    for rank, digests in enumerate(on_workers(world_size, _over_gloo)):
        assert digests == expected, f"rank {rank}"


def _many_segments(rank: int) -> bool:
    values = torch.arange(100_003) * (rank + 1)
    total = 1 + 2 + 3
    for name in NAMES:
        summed = values.clone()
        partial(find(name, Topology((0, 0, 1))), segment_bytes=4096)(summed, GroupTransport())  # type: ignore[call-arg]
        if not torch.equal(summed, torch.arange(100_003) * total):
            return False
    return True


def test_many_segments_over_gloo_add_up() -> None:
    assert on_workers(3, _many_segments) == [True] * 3


def _in_a_subgroup(rank: int) -> tuple[int, float, float]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    transport = GroupTransport(groups[rank % 2])
    values = torch.tensor([float(rank)])
    halving_doubling(values, transport)
    started = time.monotonic()
    delayed = GroupTransport(groups[rank % 2], latency=0.05)
    halving_doubling(torch.ones(8), delayed)
    return transport.rank, values.item(), time.monotonic() - started


def test_a_subgroup_has_ranks_of_its_own_and_a_delay_line_holds_each_message_back() -> None:
    results = on_workers(4, _in_a_subgroup)
    assert [rank for rank, _, _ in results] == [0, 0, 1, 1]
    assert [total for _, total, _ in results] == [2.0, 4.0, 2.0, 4.0]
    assert max(seconds for _, _, seconds in results) >= 0.1  # 2 steps of 0.05 s at least: no message is early


def _with_one_silent(rank: int) -> tuple[int, str] | None:
    group = dist.new_group([1, 2, 3])
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        try:
            halving_doubling(torch.ones(3), GroupTransport(group, timeout=0.5))
        except PeerLostError as error:
            store.set("named", "")
            return error.rank, error.phase
    store.get("named")
    return None


def test_a_rank_that_does_not_answer_is_named_by_its_number_in_the_job() -> None:
    # Rank 2 of the job is rank 1 of the group, and the partner of its rank 0.
    assert on_workers(4, _with_one_silent)[1] == (2, "reduce-scatter, distance 1")


def _with_one_gone(rank: int) -> tuple[int, str] | None:
    transport = GroupTransport(timeout=50.0)
    halving_doubling(torch.ones(4), transport)
    if rank == 1:
        dist.destroy_process_group()
        dist.barrier = lambda: None  # it leaves the job for good
        return None
    try:
        halving_doubling(torch.ones(4), transport)
    except PeerLostError as error:
        dist.barrier = lambda: None
        return error.rank, error.phase
    return None


def test_a_rank_that_has_left_is_named_long_before_the_timeout() -> None:
    assert on_workers(2, _with_one_gone, seconds=40.0)[0] == (1, "reduce-scatter, distance 1")


def _starts_alone(rank: int) -> bool:
    transport = GroupTransport()
    store = dist.distributed_c10d._get_default_store()
    room = torch.full((1 << 22,), float(1 - rank))
    if rank == 0:
        pending = [transport.send(room, 1, "to one that is not there yet") for _ in range(3)]
        store.set("started", "")  # the receiver waits for this: a send that blocked would never get here
    else:
        store.get("started")
        pending = [transport.receive(room, 0, "late")]
        pending += [transport.receive(torch.empty_like(room), 0, "late") for _ in range(2)]
    for transfer in pending:
        transfer.wait()
    return bool((room == 1.0).all())


def test_a_send_starts_without_its_receiver() -> None:
    assert on_workers(2, _starts_alone) == [True, True]


def _hosts(rank: int) -> tuple[int, ...]:
    socket.gethostname = lambda: "even" if rank % 2 == 0 else "odd"  # a host's name, as torch's ranks see it
    return find_topology().hosts


def test_ranks_that_see_one_hostname_share_a_host() -> None:
    assert on_workers(4, _hosts) == [(0, 1, 0, 1)] * 4


def _refused(rank: int) -> list[str]:
    said: list[str] = []
    for options in ({"timeout": 0.0}, {"latency": -1.0}):
        try:
            GroupTransport(**options)
        except ConfigError as error:
            said.append(str(error))
    return said


def test_a_transport_says_what_it_cannot_do() -> None:
    for said in on_workers(2, _refused):
        assert len(said) == 2
        assert all("timeout must be above 0" in message for message in said)
    with pytest.raises(ConfigError, match="not started"):
        GroupTransport()
