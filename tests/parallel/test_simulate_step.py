"""Steps from a table alone: by hand, by laws, and beside the bound of a wire that is never idle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.errors import ConfigError
from largebatch.parallel.simulate.engine import Bucket, Phase, run_buckets
from largebatch.parallel.simulate.step import step_bound, step_time

SECONDS = st.floats(0, 10, allow_subnormal=False)
TABLES = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8).map(
    lambda rows: (sorted(ready for ready, _ in rows), [comm for _, comm in rows])
)


def recurrence(ready, comm):
    """One at a time: a bucket starts when it is ready and the one before is done."""
    end = 0.0
    for at, seconds in zip(ready, comm, strict=True):
        end = max(end, at) + seconds
    return max(end, *ready)


def test_two_buckets_by_hand():
    # One at a time: 2 to 5, 5 to 6. Two at once from 4: the first has 1 s left, both share, at 6 both are done.
    assert step_time([2, 4], [3, 1]) == 6
    assert step_time([2, 4], [3, 1], concurrency=2) == pytest.approx(6)
    # Half of each is latency. Together from 4: b / (w + b s) summed is 1 at s = 1, so neither hinders the other.
    assert step_time([2, 4], [3, 1], concurrency=2, waiting_s=[1.5, 0.5]) == pytest.approx(5)


def test_two_buckets_in_three_phases_by_hand():
    # inside 1, between 3, inside 1; both ready at 0. With two in flight the second goes inside while the first is
    # between: shared inside 0 to 2 for both, between shared 2 to 8, inside shared 8 to 10.
    phases = (Phase("reduce", "inside", 0, 1), Phase("sum", "between", 0, 3), Phase("broadcast", "inside", 0, 1))
    spans = run_buckets([Bucket(0, phases), Bucket(0, phases)], 2)
    assert max(span.stop for span in spans) == pytest.approx(10)
    spans = run_buckets([Bucket(0, phases), Bucket(1, phases)], 2)  # apart by one: inside never shared at first
    # 0-1, then 1-2 inside; the first is between alone 1 to 2, has 2 left, shares 2 to 6; the second has 1 left: 7.
    stops = {(span.bucket, span.name): span.stop for span in spans}
    assert stops == pytest.approx(
        {(0, "reduce"): 1, (1, "reduce"): 2, (0, "sum"): 6, (0, "broadcast"): 7, (1, "sum"): 7, (1, "broadcast"): 8}
    )


@given(TABLES)
def test_one_at_a_time_is_the_recurrence(table):
    ready, comm = table
    assert step_time(ready, comm) == pytest.approx(recurrence(ready, comm), abs=1e-9)


@given(TABLES, st.integers(1, 4))
def test_a_shared_wire_that_is_never_idle_reaches_the_bound_at_any_concurrency(table, concurrency):
    ready, comm = table
    assert step_time(ready, comm, concurrency) == pytest.approx(step_bound(ready, comm), abs=1e-9)


@given(TABLES, st.integers(1, 4), st.floats(0, 1))
def test_no_step_beats_its_wire_nor_its_longest_bucket(table, concurrency, share):
    ready, comm = table
    waiting = [seconds * share for seconds in comm]
    took = step_time(ready, comm, concurrency, waiting)
    busy = [whole - wait for whole, wait in zip(comm, waiting, strict=True)]
    assert took >= step_bound(ready, busy) - 1e-9
    assert took >= max(at + seconds for at, seconds in zip(ready, comm, strict=True)) - 1e-9
    assert took <= step_bound(ready, comm) + 1e-9


@given(TABLES, st.integers(0, 7), SECONDS)
def test_a_slower_bucket_never_makes_a_step_shorter(table, position, more):
    ready, comm = table
    slower = list(comm)
    slower[position % len(comm)] += more
    assert step_time(ready, slower) >= step_time(ready, comm) - 1e-9


@given(TABLES, st.integers(1, 4))
def test_every_bucket_runs_once_in_the_cyclic_order(table, concurrency):
    ready, comm = table
    spans = run_buckets(
        [Bucket(at, (Phase("sum", "wire", 0.3 * s, 0.7 * s),)) for at, s in zip(ready, comm, strict=True)], concurrency
    )
    assert sorted(span.bucket for span in spans) == list(range(len(ready)))
    stops = {span.bucket: span.stop for span in spans}
    for span in spans:
        assert span.start >= ready[span.bucket]
        if span.bucket >= concurrency:  # n unblocks n + c
            assert span.start >= stops[span.bucket - concurrency]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1], [1, 2]), "each bucket has one time"),
        (([1], [-1]), "comm_s holds seconds"),
        (([float("nan")], [1]), "ready_s holds seconds"),
        (([1], [1], 0), "concurrency is 1 or more"),
        (([1], [1], 1, [2]), "waiting_s is a part"),
    ],
)
def test_bad_tables_are_one_sentence(arguments, says):
    with pytest.raises(ConfigError, match=says):
        step_time(*arguments)
