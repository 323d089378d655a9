"""When a rank dies or hangs, do all others name it, and the phase, within the timeout?

gloo alone names an address, on whoever waits for the lost rank; the others it lets time out blaming each other.
"""

import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.parallel.hook import pipelined_allreduce
from largebatch.parallel.lost import Alarm, RollCall, Wait, judge
from largebatch.parallel.topology import Topology
from largebatch.parallel.transport import PeerLostError
from parallel.survivors import survivors

TIMEOUT = 5.0
"""Seconds; what the hook is told. Its roll call takes a fifth of that, in which two busy cores must let it answer."""
SLACK = 5.0
"""Seconds more until a rank hangs, for these tests: the machine may be busy. One that does hang does so for ever."""


class Ill(torch.autograd.Function):
    """Does something in the middle of the backward, after the first buckets are on their way."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.act()
        return grad, None


def nothing():
    return


def make_model(act):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Sequential(*(nn.Linear(30, 30) for _ in range(6))), nn.Linear(30, 30)

        def forward(self, x, is_ill):
            return self.last(Ill.apply(self.first(x), act if is_ill else nothing))

    torch.manual_seed(0)
    return DistributedDataParallel(Net(), bucket_cap_mb=0.005)


def signal_self(kind):
    os.kill(os.getpid(), kind)


def hang():
    """In code of its own, alive: a backward that does not go on."""
    time.sleep(600)


def own_error():
    raise ValueError("a picture that cannot be read")


def train(rank, lost, act, hook):
    """What the backward of step 2 raises, and after how long."""
    model = make_model(act)
    pipelined_allreduce(model, timeout=TIMEOUT, **hook)
    for step in range(4):
        started = time.monotonic()
        loss = model(torch.randn(4, 30), step == 2 and rank in lost).square().mean()
        try:
            loss.backward()
        except PeerLostError as error:
            return error, step, time.monotonic() - started
    return None


def check(found, world_size, lost):
    assert set(found) == set(range(world_size)) - set(lost)
    for result in found.values():
        assert not isinstance(result, BaseException), result
        error, step, seconds = result
        assert type(error) is PeerLostError
        assert error.rank in lost
        assert step == 2
        assert f"rank {error.rank} was lost in phase {error.phase!r}" in str(error) or '"' in error.phase
        assert seconds < TIMEOUT + SLACK
    assert len({error.rank for error, _, _ in found.values()}) == 1


KILL, STOP = partial(signal_self, signal.SIGKILL), partial(signal_self, signal.SIGSTOP)
NAMES = {KILL: "kill", STOP: "stop", hang: "hang"}
TWO_HOSTS = Topology((0, 0, 1, 1))
HALVING = {"algorithm": "halving_doubling"}


@pytest.mark.parametrize(
    ("world_size", "lost", "act", "hook"),
    [
        (4, [2], KILL, HALVING),
        (2, [1], KILL, {"algorithm": "ring", "concurrency": 1}),
        (4, [0], KILL, HALVING),  # and with it the store
        (4, [2, 3], KILL, {"algorithm": "hierarchical", "topology": TWO_HOSTS}),  # a host
        (4, [3], KILL, {"algorithm": "hierarchical", "topology": TWO_HOSTS, "inside": "gloo"}),
        pytest.param(4, [2], STOP, HALVING, marks=pytest.mark.proofs),
        (4, [2, 3], STOP, {"algorithm": "hierarchical", "topology": TWO_HOSTS}),  # a host that stops to read
        (4, [0], STOP, HALVING),  # the store, too, says nothing more
        pytest.param(4, [1], STOP, {"algorithm": "backend"}, marks=pytest.mark.proofs),
        (4, [1], hang, {"algorithm": "ring", "concurrency": 3}),
    ],
    ids=lambda value: value["algorithm"] if isinstance(value, dict) else NAMES.get(value) if callable(value) else None,
)
def test_all_survivors_name_the_lost_rank_and_its_phase_within_the_timeout(world_size, lost, act, hook):
    found = survivors(world_size, lost, train, lost, act, hook, seconds=60)
    check(found, world_size, lost)
    known = ("reduce-scatter", "all-gather", "inside the host", "between hosts", "the backend's own")
    assert all(error.phase.startswith(known) for error, _, _ in found.values())


def train_in_context(rank, victim, act):
    """DDP sends a batch norm's buffers from rank 0 before each forward: by its own group, which we do not see."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30)))
    try:
        with pipelined_allreduce(model, timeout=TIMEOUT, **HALVING) as handle:
            for step in range(40):
                if step == 2 and rank == victim:
                    act()
                model(torch.randn(4, 30)).square().mean().backward()
                handle.check()
    except (PeerLostError, ValueError) as error:
        return error
    return None


def unevenly(rank):
    """Rank 0 is done and has left when rank 1 fails after its last step."""
    model = make_model(nothing)
    try:
        with pipelined_allreduce(model, algorithm="ring", timeout=TIMEOUT):
            model(torch.randn(4, 30), False).square().mean().backward()
            torch.distributed.barrier()
            if rank == 1:
                time.sleep(1.0)
                raise RuntimeError("out of memory")
    except RuntimeError as error:
        return type(error).__name__, str(error)
    time.sleep(4.0)
    return "done", ""


def test_one_that_is_done_before_another_fails_is_not_blamed():
    assert survivors(2, (), unevenly) == {0: ("done", ""), 1: ("RuntimeError", "out of memory")}


def test_an_error_of_one_rank_alone_is_told_to_the_others_in_its_own_words():
    found = survivors(3, [], train_in_context, 1, own_error)
    assert type(found[1]) is ValueError
    for rank in (0, 2):
        assert type(found[rank]) is PeerLostError
        assert found[rank].rank == 1
        assert "it raised ValueError: a picture that cannot be read" in str(found[rank])


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_while_others_are_in_a_forward_is_named_too(victim):
    found = survivors(3, [victim], train_in_context, victim, KILL)
    assert {type(error) for error in found.values()} == {PeerLostError}, found
    assert {error.rank for error in found.values()} == {victim}


class Memory:
    """A store in memory, with what torch's do."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def check(self, keys):
        with self.lock:
            return all(key in self.values for key in keys)

    def get(self, key):
        with self.lock:
            return self.values[key].encode()

    def set(self, key, value):
        with self.lock:
            self.values[key] = value

    def compare_set(self, key, expected, value):
        with self.lock:
            if self.values.get(key, "") == expected:
                self.values[key] = value
            return self.values[key].encode()


@given(data=st.data(), world_size=st.integers(2, 7))
def test_the_rank_that_is_silent_or_waits_for_nobody_is_judged_lost(data, world_size):
    # Any forest of waits that ends in the culprit: each other rank waits for the culprit or for one that waits already.
    ranks = data.draw(st.permutations(range(world_size)))
    culprit, others = ranks[0], ranks[1:]
    answers = {}
    for index, rank in enumerate(others):
        peer = data.draw(st.sampled_from(ranks[: index + 1]))
        answers[rank] = [Wait(ranks=(peer,), phase=f"{rank} on {peer}", since=0.0)]
    by = data.draw(st.sampled_from(others))
    wait = answers[by][0]
    alarm = Alarm(by=by, suspects=wait.ranks, phase=wait.phase, said="", is_gone=data.draw(st.booleans()))
    if data.draw(st.booleans(), label="the culprit is alive"):
        answers[culprit] = []
    rank, phase = judge(alarm, answers, range(world_size))
    assert rank == culprit
    assert phase.endswith(f"on {culprit}")


def test_many_alarms_at_once_end_in_one_verdict():
    store, heard = Memory(), [[] for _ in range(5)]
    calls = [
        RollCall(store, rank=rank, ranks=range(5), timeout=4.0, on_lost=heard[rank].append) for rank in range(4)
    ]  # rank 4 is silent
    for rank, call in enumerate(calls):
        call.waits(0, ((rank + 1) % 5,), f"step {rank}")
    threads = [
        threading.Thread(target=call.alarm, args=(((rank + 1) % 5,), f"step {rank}", "no message"),
                         kwargs={"is_gone": False})
        for rank, call in enumerate(calls)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[(error.rank, error.phase) for error in of_rank] for of_rank in heard[:4]] == [[(4, "step 3")]] * 4
    for call in calls:
        call.close()
