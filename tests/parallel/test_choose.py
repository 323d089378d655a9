"""Is the choice the fastest of what was measured, and does a frozen table stay what it is?

The oracle is brute force: the smallest of the measured times themselves, at the sizes they were measured at; between
them the cost model by hand.
"""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.errors import ConfigError
from largebatch.parallel.choose import (
    BACKEND,
    Choices,
    Links,
    Timing,
    candidates,
    choose,
    predict_seconds,
    tabulate,
)
from largebatch.parallel.cost import LinkCost
from largebatch.parallel.fit import fit_link
from largebatch.parallel.topology import Topology

WIRE = LinkCost(50e-6, 1 / 125e6)
LINKS = Links(inside=LinkCost(5e-6, 1 / 10e9), between=WIRE)
FLAT, LEVELS = Topology(tuple(range(8))), Topology((0, 0, 1, 1, 2, 2))

# Sizes that the table's grid of quarter powers of two holds, so that no interpolation is between them and the choice.
sizes = st.lists(st.integers(8, 30), min_size=1, max_size=6, unique=True).map(lambda bits: [1 << bit for bit in bits])
times = st.floats(1e-6, 10.0)


@st.composite
def tables(draw):
    topology = draw(st.sampled_from([FLAT, LEVELS]))
    names = candidates(topology)
    return topology, [Timing(num_bytes=size, seconds={name: draw(times) for name in names}) for size in draw(sizes)]


@settings(max_examples=60, deadline=None)
@given(tables())
def test_at_a_measured_size_the_fastest_is_taken_unless_the_backend_is_as_fast(table):
    topology, rows = table
    choices = tabulate(rows, topology, LINKS, margin=0.1)
    for row in rows:
        chosen, backend = choices(row.num_bytes), row.seconds[BACKEND]
        best = min(row.seconds.values())
        if not math.isclose(best, 0.9 * backend, rel_tol=1e-9):
            assert row.seconds[chosen] == (best if best < 0.9 * backend else backend)


@settings(max_examples=40, deadline=None)
@given(tables(), st.lists(st.integers(0, 1 << 36), max_size=20))
def test_a_table_read_back_from_json_chooses_alike(table, asked):
    choices = tabulate(table[1], table[0], LINKS)
    again = Choices.from_record(json.loads(json.dumps(choices.as_record())))
    assert again == choices
    assert [again(size) for size in asked] == [choices(size) for size in asked]


@settings(max_examples=40, deadline=None)
@given(tables())
def test_the_order_of_the_measurements_does_not_matter(table):
    assert tabulate(table[1], table[0], LINKS) == tabulate(table[1][::-1], table[0], LINKS)


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-7, 1e-2), st.floats(1e-11, 1e-7), st.floats(0.3, 3.0))
def test_times_that_follow_the_model_are_foreseen_between_the_measured_sizes(latency, per_byte, ratio):
    """Halving/doubling: 2 log2 p messages and 2 (p-1)/p b bytes (Goyal et al. 2017, section 4); the crossing by hand.

    The backend as `ratio` times a ring, so both are straight lines in b, and cross once at most.
    """
    link = LinkCost(latency, per_byte)
    p = 8

    def ours(size):
        return 6 * latency + 2 * 7 / 8 * size * per_byte

    def theirs(size):
        return ratio * (14 * latency + 2 * 7 / 8 * size * per_byte)

    rows = [
        Timing(num_bytes=size, seconds={"halving_doubling": ours(size), BACKEND: theirs(size)})
        for size in (1 << 10, 1 << 26)
    ]
    choices = tabulate(rows, Topology(tuple(range(p))), Links(inside=link, between=link), margin=0.0)
    for bits in range(8, 33):
        size = 1 << bits
        if not math.isclose(ours(size), theirs(size), rel_tol=1e-6):
            assert choices(size) == ("halving_doubling" if ours(size) < theirs(size) else BACKEND)


def test_the_model_alone_takes_fewer_steps_for_short_buffers_and_two_levels_where_the_wire_is_slow():
    assert choose(64, FLAT, LINKS) == "doubling"
    assert choose(64 << 10, FLAT, LINKS) == "halving_doubling"
    many = Topology(tuple(host for host in range(32) for _ in range(8)))
    # 8 ranks that share a host's wire: whoever carries b/8 each has the wire for b once, and a flat one of 256 ranks
    # has every rank send nearly 2 b through it, which the model of a flat one does not even count.
    assert choose(100 << 20, many, LINKS) in ("halving_doubling", "ring", "hierarchical_sharded")
    seconds = predict_seconds("hierarchical_sharded", 100 << 20, many, LINKS)
    assert seconds == pytest.approx(2 * 31 / 32 * (100 << 20) / 125e6, rel=0.15)


def test_two_levels_are_candidates_only_where_there_are_two():
    assert set(candidates(LEVELS)) - set(candidates(FLAT)) == {"hierarchical", "hierarchical_sharded"}
    assert candidates(Topology((0, 0, 0, 0))) == candidates(FLAT)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [Timing(num_bytes=1024, seconds={"ring": 1.0})],
        [
            Timing(num_bytes=1024, seconds={"ring": 1.0, BACKEND: 1.0}),
            Timing(num_bytes=2048, seconds={"halving_doubling": 1.0, BACKEND: 1.0}),
        ],
        [Timing(num_bytes=1024, seconds={BACKEND: 1.0})] * 2,
    ],
)
def test_timings_that_are_no_table_are_refused(rows):
    with pytest.raises(ConfigError):
        tabulate(rows, FLAT, LINKS)


@pytest.mark.parametrize("broken", [{}, {"steps": []}, {"steps": [[1, "ring"]]}, {"links": {}}, {"timings": [{}]}])
def test_a_record_that_is_broken_is_refused(broken):
    good = tabulate([Timing(num_bytes=1024, seconds={BACKEND: 1.0})], FLAT, LINKS).as_record()
    with pytest.raises(ConfigError):
        Choices.from_record(good | broken if broken else {})


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 1.0), (1, 0.0), (1, math.nan), (1, math.inf)])
def test_a_timing_is_positive(num_bytes, seconds):
    with pytest.raises(ConfigError):
        Timing(num_bytes=num_bytes, seconds={BACKEND: seconds})


@settings(max_examples=80, deadline=None)
@given(
    st.floats(1e-9, 1e-2), st.floats(0, 1e-6), st.lists(st.integers(1, 1 << 24), min_size=2, max_size=6, unique=True)
)
def test_a_wire_is_found_again_from_its_own_times(latency, per_byte, messages):
    seconds = {size: latency + size * per_byte for size in messages}
    found = fit_link(seconds, reduce_seconds_per_byte=1e-10)
    assert found.reduce_seconds_per_byte == 1e-10
    for size, taken in seconds.items():  # the line, not its parts: two sizes near each other hardly tell them apart
        assert found.seconds(size) == pytest.approx(taken, rel=1e-5)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.integers(1, 1 << 24), times, min_size=2, max_size=6))
def test_no_line_of_positive_parts_is_nearer_than_the_fitted_one(seconds):
    """Brute force: no step away from the fitted line, along either part, lowers the sum of squared relative errors."""
    found = fit_link(seconds)

    def error(latency, per_byte):
        return sum(((latency + size * per_byte) / taken - 1) ** 2 for size, taken in seconds.items())

    least = error(found.latency, found.seconds_per_byte)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert error(found.latency * factor, found.seconds_per_byte) >= least * (1 - 1e-6) - 1e-12
        assert error(found.latency, found.seconds_per_byte * factor) >= least * (1 - 1e-6) - 1e-12
    scale = min(seconds.values())
    assert error(found.latency + 1e-3 * scale, found.seconds_per_byte) >= least * (1 - 1e-6) - 1e-12
    assert error(found.latency, found.seconds_per_byte + 1e-3 * scale / max(seconds)) >= least * (1 - 1e-6) - 1e-12


@pytest.mark.parametrize(("ours", "chosen"), [(0.96, BACKEND), (0.94, "ring")])
def test_what_is_hardly_faster_than_the_backend_does_not_take_its_place(ours, chosen):
    row = Timing(num_bytes=1024, seconds={"ring": ours, BACKEND: 1.0})
    assert tabulate([row], FLAT, LINKS, margin=0.05)(1024) == chosen
