"""Every all-reduce against the float64 sum, and against what Goyal et al. 2017 say it sends."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.parallel import doubling, halving_doubling, hierarchical, ring
from largebatch.parallel.algorithms import NAMES, find
from largebatch.parallel.loopback import Loopback, on_ranks
from largebatch.parallel.subset import Subset
from largebatch.parallel.topology import Topology
from largebatch.parallel.transport import PeerLostError, Pending

WORLD_SIZES = st.integers(1, 33)
LENGTHS = st.integers(0, 5_000)
WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@st.composite
def topologies(draw: st.DrawFn, world_size: int) -> Topology:
    """Ranks on hosts at random, so hosts are uneven and their ranks scattered."""
    num_hosts = draw(st.integers(1, world_size))
    return Topology.of(draw(st.lists(st.integers(1, num_hosts), min_size=world_size, max_size=world_size)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Topology, int, int]:
    """An algorithm, where its ranks are, a length and a seed."""
    topology = draw(topologies(draw(WORLD_SIZES)))
    return draw(st.sampled_from(NAMES)), topology, draw(LENGTHS), draw(st.integers(0, 2**31))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one rank ends with, and what it has sent."""

    values: Tensor
    num_bytes: int
    num_messages: int


def reduced(addends: list[Tensor], algorithm: Callable[[Tensor, Loopback], None]) -> list[Outcome]:
    """Run an algorithm on a rank for each addend."""

    def body(transport: Loopback) -> Outcome:
        values = addends[transport.rank].clone()
        algorithm(values, transport)
        return Outcome(values=values, num_bytes=transport.num_bytes, num_messages=transport.num_messages)

    return on_ranks(len(addends), body)


def the_bits(outcomes: list[Outcome]) -> Tensor:
    """What all ranks have, which is the same to the bit."""
    first = outcomes[0].values
    for rank, outcome in enumerate(outcomes):
        assert torch.equal(outcome.values, first), f"rank {rank} has other values"
        if len(first):  # torch gives no bytes of nothing
            assert torch.equal(outcome.values.view(torch.uint8), first.view(torch.uint8)), f"rank {rank} has other bits"
    return first


def random_addends(dtype: torch.dtype, world_size: int, length: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world_size)]


def assert_sums(found: Tensor, addends: list[Tensor], roundings: int, unit: float) -> None:
    """Within `roundings` roundings of relative size `unit`.

    |error| <= ((1 + u)^k - 1) sum |x| (Higham 2002, Accuracy and Stability of Numerical Algorithms, eq. 4.4).
    """
    # The oracle adds in 80 bits where the machine has them, so that float64 too has a wider one.
    exact = np.stack([addend.double().numpy() for addend in addends]).astype(np.longdouble)
    bound = np.expm1(roundings * np.log1p(np.longdouble(unit))) * np.abs(exact).sum(0)
    assert (np.abs(found.double().numpy() - exact.sum(0)) <= bound).all()


@settings(max_examples=60, deadline=None)
@given(case=cases(), dtype=st.sampled_from(WHOLE_NUMBERS), segment_bytes=st.sampled_from((1 << 22, 1 << 10)))
def test_whole_numbers_add_up_exactly_at_any_world_size_and_length(
    case: tuple[str, Topology, int, int], dtype: torch.dtype, segment_bytes: int
) -> None:
    name, topology, length, seed = case
    rng = np.random.default_rng(seed)
    limit = np.iinfo(str(dtype).removeprefix("torch."))
    drawn = rng.integers(limit.min, limit.max, (topology.world_size, length), dtype=limit.dtype, endpoint=True)
    algorithm = partial(find(name, topology), segment_bytes=segment_bytes)  # type: ignore[call-arg]
    found = the_bits(reduced([torch.from_numpy(row) for row in drawn], algorithm))
    with np.errstate(over="ignore"):
        assert np.array_equal(found.numpy(), drawn.sum(0, dtype=limit.dtype))  # two's complement, as torch's


@settings(max_examples=60, deadline=None)
@given(case=cases(), dtype=st.sampled_from(FLOATS))
def test_floats_add_up_within_one_rounding_an_addition(
    case: tuple[str, Topology, int, int], dtype: torch.dtype
) -> None:
    name, topology, length, seed = case
    addends = random_addends(dtype, topology.world_size, length, seed)
    found = the_bits(reduced(addends, find(name, topology)))
    # p - 1 additions at most lie above an addend, each of half an ulp; one more covers the oracle's own.
    assert_sums(found, addends, topology.world_size, torch.finfo(dtype).eps / 2)


@settings(max_examples=60, deadline=None)
@given(
    case=cases(),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    wire=st.sampled_from((torch.float16, torch.bfloat16)),
)
def test_a_narrow_wire_rounds_each_hop_once_and_leaves_all_ranks_the_same_bits(
    case: tuple[str, Topology, int, int], dtype: torch.dtype, wire: torch.dtype
) -> None:
    name, topology, length, seed = case
    world_size = topology.world_size
    addends = [addend.to(wire).to(dtype) for addend in random_addends(torch.float64, world_size, length, seed)]
    found = the_bits(reduced(addends, partial(find(name, topology), wire=wire)))
    if world_size == 1:
        assert torch.equal(found, addends[0])  # nothing travels
        return
    # A partial sum is rounded to the wire each time that it is sent, p - 1 times at most and once for the total, and to
    # float32 at each addition. Below the wire's smallest normal number roundings are of an absolute size.
    unit = torch.finfo(wire).eps / 2 + torch.finfo(torch.float32).eps
    exact = torch.stack(addends).double()
    bound = ((1 + unit) ** (world_size + 1) - 1) * exact.abs().sum(0) + world_size * torch.finfo(
        wire
    ).smallest_normal * unit
    narrow = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0.0  # the totals are put back in `dtype`
    assert ((found.double() - exact.sum(0)).abs() <= bound * (1 + narrow) + narrow * exact.sum(0).abs()).all()


def test_sums_are_taken_in_float32_where_the_wire_is_of_16_bits() -> None:
    # 256 + 1 is no bfloat16: rank by rank in bfloat16 the ones would all be lost, in float32 one rank keeps 4 of them.
    addends = [torch.full((64,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)]
    topology = Topology((0,) * 8)
    found = the_bits(reduced(addends, partial(find("hierarchical", topology), wire=torch.bfloat16)))
    assert found.tolist() == [264.0] * 64  # 263 to the nearest even bfloat16


@settings(max_examples=60, deadline=None)
@given(case=cases(), dtype=st.sampled_from((torch.uint8, torch.float32, torch.int64)))
def test_each_rank_sends_the_bytes_of_the_formula(case: tuple[str, Topology, int, int], dtype: torch.dtype) -> None:
    name, topology, length, _ = case
    world_size, size = topology.world_size, dtype.itemsize
    outcomes = reduced([torch.ones(length, dtype=dtype) for _ in range(world_size)], find(name, topology))
    formulas: dict[str, Callable[[int], int]] = {
        "ring": lambda rank: ring.num_bytes(rank, world_size, length, size),
        "halving_doubling": lambda rank: halving_doubling.num_bytes(rank, world_size, length, size),
        "doubling": lambda rank: doubling.num_bytes(rank, world_size, length, size),
        "hierarchical": lambda rank: hierarchical.num_bytes(rank, topology, length, size, sharded=False),
        "hierarchical_sharded": lambda rank: hierarchical.num_bytes(rank, topology, length, size, sharded=True),
    }
    assert [outcome.num_bytes for outcome in outcomes] == [formulas[name](rank) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16, 32])
def test_ring_and_halving_doubling_send_what_goyal_says_in_as_many_messages_as_steps(world_size: int) -> None:
    # Goyal et al. 2017, section 4: 2 (p-1)/p b bytes each; 2 (p-1) steps, and 2 log2(p).
    b = 4 * 32 * 6
    for name, num_steps in (("ring", 2 * (world_size - 1)), ("halving_doubling", 2 * (world_size.bit_length() - 1))):
        for outcome in reduced([torch.ones(b // 4) for _ in range(world_size)], find(name)):
            assert outcome.num_bytes == 2 * (world_size - 1) * b // world_size
            assert outcome.num_messages == num_steps
    # Thakur et al. 2005, section 4.5: log2(p) steps of b bytes.
    for outcome in reduced([torch.ones(b // 4) for _ in range(world_size)], find("doubling")):
        assert outcome.num_bytes == b * outcome.num_messages == b * doubling.num_steps(world_size)
    assert doubling.num_steps(world_size) == world_size.bit_length() - 1
    assert ring.num_steps(world_size) == 2 * (world_size - 1)
    assert halving_doubling.num_steps(world_size) == 2 * (world_size.bit_length() - 1)


@pytest.mark.parametrize(
    ("world_size", "blocks", "num_steps"),
    [(3, [2, 1], 4), (5, [4, 1], 6), (6, [4, 2], 6), (7, [4, 2, 1], 6), (12, [8, 4], 8), (44, [32, 8, 4], 12)],
)
def test_other_world_sizes_take_two_steps_more_than_their_largest_power_of_two(
    world_size: int, blocks: list[int], num_steps: int
) -> None:
    # Goyal et al. 2017, section 4: "binary blocks", with an extra step before the blocks' all-gather and one after.
    assert [len(block) for block in halving_doubling.binary_blocks(world_size)] == blocks
    assert halving_doubling.num_steps(world_size) == num_steps
    assert max(halving_doubling.plan(rank, world_size, 640).num_steps for rank in range(world_size)) == num_steps
    addends = random_addends(torch.float64, world_size, 641, world_size)
    assert_sums(the_bits(reduced(addends, find("halving_doubling"))), addends, world_size, 2**-53)


@settings(max_examples=200, deadline=None)
@given(world_size=WORLD_SIZES, length=st.integers(0, 300), data=st.data())
def test_what_one_rank_gives_another_takes_and_all_of_the_buffer_comes_back(
    world_size: int, length: int, data: st.DataObject
) -> None:
    topology = data.draw(topologies(world_size))
    plans = {
        "ring": lambda rank: ring.plan(rank, world_size, length),
        "halving_doubling": lambda rank: halving_doubling.plan(rank, world_size, length),
        "doubling": lambda rank: doubling.plan(rank, world_size, length),
        "hierarchical": lambda rank: hierarchical.plan(rank, topology, length, sharded=False),
        "hierarchical_sharded": lambda rank: hierarchical.plan(rank, topology, length, sharded=True),
    }
    plan = plans[data.draw(st.sampled_from(NAMES))]
    gives: list[tuple[int, int, str, int, int]] = []
    takes: list[tuple[int, int, str, int, int]] = []
    for rank in range(world_size):
        mine = plan(rank)
        covered = np.zeros(length, dtype=int)
        covered[slice(*mine.own)] += 1
        for step in mine.sums + mine.totals:
            gives += [(rank, peer, _kind(step.phase), start, stop) for peer, start, stop in step.gives]
            takes += [(peer, rank, _kind(step.phase), start, stop) for peer, start, stop in step.takes]
        for take in itertools.chain.from_iterable(step.takes for step in mine.totals):
            covered[take.start : take.stop] += 1
        assert (covered == 1).all()
    assert sorted(gives) == sorted(takes)


def _kind(phase: str) -> str:
    """Both sides of a step between blocks have their own word for it."""
    return (
        phase.replace("to the larger", "up")
        .replace("from the smaller", "up")
        .replace("from the larger", "down")
        .replace("to the smaller", "down")
    )


@settings(max_examples=30, deadline=None)
@given(
    world_size=st.sampled_from((2, 4, 8, 16)),
    length=st.integers(1, 600),
    dtype=st.sampled_from(FLOATS),
    wire=st.sampled_from((None, torch.float16, torch.bfloat16)),
    data=st.data(),
)
def test_in_a_power_of_two_no_bit_depends_on_where_in_a_buffer_an_element_lies(
    world_size: int, length: int, dtype: torch.dtype, wire: torch.dtype | None, data: st.DataObject
) -> None:
    addends = random_addends(dtype, world_size, length, length)
    algorithm = partial(find("halving_doubling"), wire=wire)
    whole = the_bits(reduced(addends, algorithm))
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=3)))
    spans = list(itertools.pairwise([0, *cuts, length]))
    assert torch.equal(the_bits(reduced(addends, partial(find("doubling"), wire=wire))), whole)  # the same tree
    parts = [the_bits(reduced([addend[start:stop] for addend in addends], algorithm)) for start, stop in spans]
    assert torch.equal(torch.cat(parts), whole)
    order = torch.from_numpy(np.random.default_rng(length).permutation(length))
    assert torch.equal(the_bits(reduced([addend[order] for addend in addends], algorithm)), whole[order])
    if wire is None:
        # ... because all are added in one tree, neighbours first (Goyal et al. 2017: distance 1, then 2, 4, ...).
        tree = addends
        while len(tree) > 1:
            tree = [tree[i] + tree[i + 1] for i in range(0, len(tree), 2)]
        assert torch.equal(whole, tree[0])


def test_the_ring_does_depend_on_it() -> None:
    addends = random_addends(torch.float32, 8, 512, 0)
    whole = the_bits(reduced(addends, find("ring")))
    half = the_bits(reduced([addend[:256] for addend in addends], find("ring")))
    assert not torch.equal(half, whole[:256])


@pytest.mark.parametrize("name", NAMES)
def test_a_second_run_gives_the_same_bits(name: str) -> None:
    addends = random_addends(torch.float32, 13, 999, 1)
    algorithm = find(name, Topology((0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)))
    assert torch.equal(the_bits(reduced(addends, algorithm)), the_bits(reduced(addends, algorithm)))


def test_carriers_of_a_sharded_host_bring_their_own_part_between_hosts() -> None:
    topology = Topology((0, 0, 1, 1))
    crossing: dict[bool, list[int]] = {}
    for sharded in (False, True):
        plans = [hierarchical.plan(rank, topology, 8, sharded=sharded) for rank in range(4)]
        crossing[sharded] = [
            sum(
                part.stop - part.start
                for step in plan.sums + plan.totals
                for part in step.gives
                if topology.hosts[part.peer] != topology.hosts[rank]
            )
            for rank, plan in enumerate(plans)
        ]
    assert crossing == {False: [8, 0, 8, 0], True: [4, 4, 4, 4]}


class Watched:
    """A transport that notes when each transfer starts and is waited for."""

    def __init__(self, inner: Loopback) -> None:
        self.inner, self.rank, self.world_size = inner, inner.rank, inner.world_size
        self.events: list[str] = []

    def send(self, values: Tensor, to: int, phase: str) -> Pending:
        """Note it."""
        self.events.append("send")
        return self.inner.send(values, to, phase)

    def receive(self, values: Tensor, source: int, phase: str) -> Pending:
        """Note it, and when it is waited for."""
        self.events.append("receive")
        pending, events = self.inner.receive(values, source, phase), self.events

        class Noted:
            def wait(self) -> None:
                events.append("wait")
                pending.wait()

        return Noted()


def test_the_next_segment_travels_while_one_is_added_up() -> None:
    def body(inner: Loopback) -> list[str]:
        transport = Watched(inner)
        ring.ring(torch.ones(64), transport, segment_bytes=16)
        return transport.events

    for events in on_ranks(2, body):
        under_way = np.cumsum([{"receive": 1, "wait": -1}.get(event, 0) for event in events])
        waits = [index for index, event in enumerate(events) if event == "wait"]
        # While a segment is waited for and added, all that follow in the step are on their way.
        assert all(under_way[index] > 0 for index in waits[:-1])
        assert events.index("wait") > 8  # the first step's 8 sends all start before anything is waited for


def test_a_lost_rank_is_named_with_its_phase() -> None:
    def body(transport: Loopback) -> tuple[int, str] | None:
        if transport.rank == 2:
            return None
        try:
            halving_doubling.halving_doubling(torch.ones(8), transport)
        except PeerLostError as error:
            return error.rank, error.phase
        raise AssertionError("a sum of three")

    lost = on_ranks(4, body, timeout=0.2)
    assert lost[3] == (2, "reduce-scatter, distance 1")
    assert lost[0] == (2, "reduce-scatter, distance 2")


def test_a_subset_numbers_its_ranks_in_the_order_given_and_says_its_phase() -> None:
    def body(transport: Loopback) -> tuple[list[int], set[str]]:
        if transport.rank % 2:
            return [], set()
        values = torch.tensor([1 << transport.rank])
        among = Subset(transport, (4, 0, 2), "even")
        assert (among.rank, among.world_size) == ((4, 0, 2).index(transport.rank), 3)
        ring.ring(values, among)
        return values.tolist(), {phase.split(":")[0] for phase in transport.phases}

    results = on_ranks(5, body)
    assert [values for values, _ in results] == [[21], [], [21], [], [21]]
    assert results[0][1] == {"even"}


@pytest.mark.parametrize(
    ("hosts", "match"), [((), "at least one rank"), ((1,), "as they first occur"), ((0, 2), "as they first occur")]
)
def test_a_topology_says_what_is_wrong_with_it(hosts: tuple[int, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Topology(hosts)


def test_what_cannot_be_summed_is_refused() -> None:
    alone = on_ranks(1, lambda transport: transport)[0]
    for values, options, match in [
        (torch.ones(2, 2), {}, "one dimension"),
        (torch.ones(4)[::2], {}, "contiguous"),
        (torch.ones(4, dtype=torch.int32), {"wire": torch.float16}, "floating point"),
        (torch.ones(4), {"wire": torch.int8}, "floating point"),
        (torch.ones(4), {"segment_bytes": 0}, "segment_bytes"),
    ]:
        with pytest.raises(ConfigError, match=match):
            ring.ring(values, alone, **options)
    with pytest.raises(ConfigError, match="of 3 ranks, and there are 1"):
        hierarchical.hierarchical(torch.ones(2), alone, topology=Topology((0, 0, 1)))
    with pytest.raises(ConfigError, match="no all-reduce called 'tree'"):
        find("tree")
    with pytest.raises(ConfigError, match="share a host"):
        find("hierarchical")
    with pytest.raises(ConfigError, match="at least one rank"):
        on_ranks(0, lambda transport: None)
    with pytest.raises(ConfigError, match="distinct"):
        Subset(alone, (0, 0), "twice")
