"""Do all ranks get one table out of a calibration, and is what it times what it says?

Real gloo workers. No time is compared with a clock: what is checked is who measured what, how often, and that all
agree, also where ranks are told different things by their clocks.
"""

import importlib
import time

import pytest
import torch
import torch.distributed as dist

from largebatch.errors import ConfigError
from largebatch.parallel.calibrate import SIZES, calibrate
from largebatch.parallel.choose import BACKEND, Choices, candidates
from largebatch.parallel.group_transport import GroupTransport
from largebatch.parallel.measure import allreduce_calls, time_in_turns, time_links
from largebatch.parallel.topology import Topology
from workers import on_workers

HOSTS = (0, 0, 1, 1)
module = importlib.import_module("largebatch.parallel.calibrate")  # the room exports the function by that name


def calibrated(rank, hosts):
    choices = calibrate(topology=Topology(hosts), seconds=0.3, max_bytes=1 << 17)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)  # the job's own group still works
    return choices.as_record(), total.item()


def test_every_rank_holds_the_table_of_the_first():
    found = on_workers(4, calibrated, HOSTS)
    records = [record for record, _ in found]
    assert records == [records[0]] * 4
    assert [total for _, total in found] == [6.0] * 4
    choices = Choices.from_record(records[0])
    assert choices.hosts == HOSTS
    assert {choices(1 << bits) for bits in range(8, 20)} <= set(candidates(Topology(HOSTS)))
    assert [row.num_bytes for row in choices.timings] == list(SIZES[: len(choices.timings)])
    assert all(set(row.seconds) == set(candidates(Topology(HOSTS))) for row in choices.timings)


def disagreeing(rank):
    """Each rank's own table says something else: rank r prefers one algorithm of four, by times of its own."""
    names = candidates(Topology(HOSTS))
    real = module.time_in_turns

    def fake(calls, group, **options):
        real(calls, group, **options | {"seconds": 0.01})
        return {name: [1.0 + (name != names[rank])] for name in calls}

    module.time_in_turns = fake
    return calibrate(topology=Topology(HOSTS), seconds=0.2, max_bytes=1 << 10)(1024)


def test_ranks_that_measured_otherwise_choose_as_the_first():
    assert on_workers(4, disagreeing) == [candidates(Topology(HOSTS))[0]] * 4


def counted(rank):
    """A slow rank 1 whose clock would tell it to call less often than rank 0 does."""
    calls = {"short": 0, "long": 0}

    def count(name, seconds):
        def call():
            calls[name] += 1
            time.sleep(seconds if rank == 1 else 0.0)

        return call

    taken = time_in_turns(
        {"short": count("short", 0.0), "long": count("long", 2e-3)}, dist.group.WORLD, seconds=0.05, most=3,
        sample_seconds=1e-3,
    )  # fmt: skip
    return calls, taken


def test_ranks_call_equally_often_and_hold_the_times_of_the_slowest():
    found = on_workers(3, counted)
    assert found == [found[0]] * 3
    _, taken = found[0]
    assert min(taken["long"]) >= 2e-3  # rank 1 slept that long in each; rank 0's own were shorter
    assert len(taken["long"]) == len(taken["short"]) <= 3


def summed(rank):
    """The calls that are timed are all-reduces: each turns ones into the number of ranks, as often as it is called."""
    group, topology = dist.group.WORLD, Topology((0, 0, 1))
    transport = GroupTransport(dist.new_group())
    held = []
    real, torch.empty = torch.empty, lambda *size, **options: held.append(real(*size, **options)) or held[-1]
    calls = allreduce_calls(candidates(topology), 40, transport, group, topology)
    torch.empty = real
    found = {}
    for name, call in calls.items():
        held[0].fill_(1)
        call()
        found[name] = held[0].tolist()
    links = time_links(transport, group, rank ^ 1 if rank < 2 else None, (256, 1024), seconds=0.01)
    return found, sorted(links), all(taken > 0 for taken in links.values())


def test_what_is_timed_is_the_sum():
    for found, sizes, positive in on_workers(3, summed):
        assert found == {name: [3.0] * 10 for name in candidates(Topology((0, 0, 1)))}
        assert sizes == [256, 1024] and positive
    assert BACKEND in found


def refused(rank):
    messages = []
    for options in ({"seconds": 0.0}, {"max_bytes": 1}, {"topology": Topology((0, 0, 1))}):
        with pytest.raises(ConfigError) as error:
            calibrate(**options)
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_is_refused_on_every_rank():
    found = on_workers(2, refused)
    assert found[0] == found[1]
    assert "3 ranks" in found[0][2]


def test_without_a_job_it_says_how_to_start_one():
    with pytest.raises(ConfigError, match="torchrun"):
        calibrate()


def alone(rank):
    return calibrate(seconds=0.1)(1024)


def test_one_rank_alone_takes_any():
    assert on_workers(1, alone)[0] in candidates(Topology((0,)))
