"""Can several all-reduces at once deadlock, and do they run in the paper's order?

Source of the order: Goyal et al. 2017, section 4: completion of all-reduce n unblocks n + c.
"""

import queue
import random
import threading
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.errors import ConfigError
from largebatch.parallel.group_transport import GroupTransport
from largebatch.parallel.hierarchical import hierarchical
from largebatch.parallel.lanes import Lanes
from largebatch.parallel.loopback import Loopback
from largebatch.parallel.ring import ring
from largebatch.parallel.topology import Topology
from workers import on_workers


def stop_all(lanes):
    return lambda lane, error: lanes[0].stop(error)


def make_lanes(concurrency):
    made = []
    made.append(Lanes(concurrency, stop_all(made)))
    return made[0]


def loopbacks(world_size, concurrency, timeout=20.0):
    """The transports of each rank: one a lane, as the hook makes one process group a lane."""
    mails = [defaultdict(queue.SimpleQueue) for _ in range(concurrency)]
    for mail in mails:
        for source in range(world_size):
            for to in range(world_size):
                mail[source, to] = queue.SimpleQueue()
    return [
        [Loopback(rank=rank, world_size=world_size, timeout=timeout, mail=mail) for mail in mails]
        for rank in range(world_size)
    ]


def reduce_in_order(transports, order, lengths, lanes, num_steps):
    """This rank's sums of every bucket, when its buckets become ready in `order`; then again, in the next step."""
    rank, found = transports[0].rank, []
    for step in range(num_steps):
        buckets = [torch.full((length,), 100.0 * number + rank + step) for number, length in enumerate(lengths)]
        for number in order:
            lanes.submit(number, lambda lane, values=buckets[number]: ring(values, transports[lane]))
        lanes.drain()
        found += [bucket.tolist() for bucket in buckets]
    return found


def right(world_size, lengths, num_steps):
    ranks = world_size * (world_size - 1) / 2
    return [
        [world_size * (100.0 * number + step) + ranks] * length
        for step in range(num_steps)
        for number, length in enumerate(lengths)
    ]


@settings(max_examples=60)
@given(data=st.data(), world_size=st.integers(2, 4), concurrency=st.integers(1, 4))
def test_no_order_of_buckets_deadlocks_however_different_on_each_rank(data, world_size, concurrency):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9), label="lengths")
    orders = [data.draw(st.permutations(range(len(lengths))), label=f"order {rank}") for rank in range(world_size)]
    transports = loopbacks(world_size, concurrency)
    found = [None] * world_size

    def train(rank):
        lanes = make_lanes(concurrency)
        found[rank] = reduce_in_order(transports[rank], orders[rank], lengths, lanes, num_steps=2)
        lanes.close()

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [right(world_size, lengths, 2)] * world_size


LENGTHS = [5, 1, 300, 17, 64, 2, 9]


def random_orders(rank, concurrency):
    """A job whose ranks' buckets become ready in orders drawn by each rank for itself."""
    transports = [GroupTransport(dist.new_group(backend="gloo"), timeout=20) for _ in range(concurrency)]
    lanes = make_lanes(concurrency)
    draw = random.Random(1000 * concurrency + rank)
    order = list(range(len(LENGTHS)))
    found = []
    for _ in range(5):
        draw.shuffle(order)
        found.append(reduce_in_order(transports, order, LENGTHS, lanes, num_steps=1))
    lanes.close()
    return found


@pytest.mark.parametrize("concurrency", [1, 2, 3, 4])
def test_no_order_deadlocks_over_gloo(concurrency):
    assert on_workers(4, random_orders, concurrency) == [[right(4, LENGTHS, 1)] * 5] * 4


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_the_completion_of_one_frees_the_one_c_later_and_no_other(concurrency):
    lanes, ends = make_lanes(concurrency), [threading.Event() for _ in range(8)]
    begun = queue.SimpleQueue()

    def work(number):
        def run(lane):
            begun.put((number, lane))
            assert ends[number].wait(20)

        return run

    for number in reversed(range(8)):
        lanes.submit(number, work(number))
    first = {begun.get(timeout=20) for _ in range(concurrency)}
    assert first == {(number, number) for number in range(concurrency)}
    # Freed in an order other than that of the numbers: each end must start exactly the one that is c later.
    under_way = sorted(number for number, _ in first)
    while under_way:
        ended = under_way.pop()
        assert begun.empty()
        ends[ended].set()
        if ended + concurrency < 8:
            number, lane = begun.get(timeout=20)
            assert (number, lane) == (ended + concurrency, ended % concurrency)
            under_way.append(number)
    lanes.drain()
    lanes.close()


class Held:
    """A transport whose messages between hosts wait until the test lets them go."""

    def __init__(self, transport, gate):
        self.inner, self.gate = transport, gate
        self.rank, self.world_size = transport.rank, transport.world_size

    def send(self, values, to, phase):
        if phase.startswith("between hosts"):
            assert self.gate.wait(20)
        return self.inner.send(values, to, phase)

    def receive(self, values, source, phase):
        return self.inner.receive(values, source, phase)


def test_one_bucket_passes_inside_the_hosts_while_the_one_before_is_between_them():
    # Goyal et al. 2017, section 4: the phases are pipelined. Bucket 0 is held between hosts for as long as bucket 1
    # takes through all of its phases.
    world_size, topology, transports = 4, Topology((0, 0, 1, 1)), loopbacks(4, 2)
    gates, ended = [threading.Event(), threading.Event()], queue.SimpleQueue()
    gates[1].set()
    buckets = [[torch.full((8,), float(rank + number)) for number in range(2)] for rank in range(world_size)]
    all_lanes = [make_lanes(2) for _ in range(world_size)]

    def work(rank, number):
        def run(lane):
            held = Held(transports[rank][lane], gates[number])
            hierarchical(buckets[rank][number], held, topology=topology)
            ended.put(number)

        return run

    for rank, lanes in enumerate(all_lanes):
        for number in range(2):
            lanes.submit(number, work(rank, number))
    assert [ended.get(timeout=20) for _ in range(world_size)] == [1] * world_size
    gates[0].set()
    for lanes in all_lanes:
        lanes.drain()
        lanes.close()
    assert [[bucket.tolist() for bucket in of_rank] for of_rank in buckets] == [[[6.0] * 8, [10.0] * 8]] * world_size


def test_an_error_in_one_lane_ends_the_wait_for_all():
    lanes = make_lanes(2)
    never = threading.Event()

    def fail(_):
        raise ArithmeticError("of lane 1")

    lanes.submit(0, lambda _: never.wait())
    lanes.submit(1, fail)
    with pytest.raises(ArithmeticError, match="of lane 1"):
        lanes.drain()
    with pytest.raises(ArithmeticError):  # and in every later step
        lanes.drain()
    assert lanes.error is not None
    lanes.close()
    never.set()


def test_a_number_that_never_came_is_a_bug_of_ours_and_no_hang():
    lanes = make_lanes(1)
    lanes.submit(1, lambda _: None)
    with pytest.raises(AssertionError, match="all-reduce 0 was never submitted"):
        lanes.drain()
    lanes.close()


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.5])
def test_lanes_are_counted_by_a_positive_integer(concurrency):
    with pytest.raises(ConfigError, match="at least 1"):
        Lanes(concurrency, lambda lane, error: None)
