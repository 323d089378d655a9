"""What a study decides is arithmetic on finished results."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import linear_task
from largebatch.errors import ConfigError
from largebatch.study.plan import Protocol, batch_grid, derive_seed, microbatch_for, more_batches, pick_goals

RULES = Protocol()


@given(st.floats(0.1, 1e7), st.integers(4, 10_000_000))
def test_the_grid_is_powers_of_two_within_half_the_data(center, num_units):
    grid = batch_grid(center, num_units, RULES)
    assert grid == sorted(set(grid)) and all(batch & (batch - 1) == 0 for batch in grid)
    assert max(grid) <= max(num_units / 2, 2)
    if num_units >= 2**11:
        assert len(grid) >= 5


@given(st.integers(2, 20_000))
def test_the_microbatch_splits_the_batch_into_two_to_eight(batch):
    part = microbatch_for(batch, RULES, replace(linear_task(), max_microbatch=1000))
    assert 1 <= part < batch and part <= 1000
    assert part == 1000 or -(-batch // part) <= RULES.num_microbatches


@pytest.mark.parametrize("batch", [8, 64, 512])
def test_a_task_whose_loss_depends_on_the_microbatch_keeps_its_own(batch):
    assert microbatch_for(batch, RULES, replace(linear_task(), microbatch=2)) == 2


def test_a_batch_of_one_cannot_be_measured_by_splitting():
    with pytest.raises(ConfigError, match="two batch sizes"):
        microbatch_for(1, RULES, linear_task())


def test_batches_are_added_where_a_side_of_b_crit_is_missing():
    assert more_batches([8, 16, 32, 64], 5.0, 100_000, RULES) == [2, 4]
    assert more_batches([8, 16, 32, 64], 60.0, 100_000, RULES) == [128, 256]
    assert more_batches([8, 16, 32, 64], 60.0, 300, RULES) == [128], "half of 300 is the end"
    assert more_batches([8, 16, 32, 64], 20.0, 100_000, RULES) == []
    assert more_batches(list(range(10)), 5000.0, 100_000, RULES) == [], "no more than max_batches"


def test_goals_fall_along_the_baseline_run():
    curve = [(step, 2.0 * 0.99**step) for step in range(0, 1001, 10)]
    goals = pick_goals(curve, RULES)
    assert list(goals) == sorted(goals, reverse=True) and len(goals) == 3
    assert goals[-1] == pytest.approx(2.0 * 0.99**400, rel=0.01)


@pytest.mark.parametrize("curve", [[(0, 1.0), (50, 1.0), (100, 1.0)], [(0, 1.0), (50, 2.0), (100, 3.0)]])
def test_a_baseline_that_does_not_learn_is_said(curve):
    with pytest.raises(ConfigError, match="does not learn"):
        pick_goals(curve, RULES)


@given(st.integers(0, 1000), st.text(max_size=5), st.integers(0, 10))
def test_seeds_differ_by_purpose_and_stay_in_range(seed, role, number):
    one = derive_seed(seed, role, number)
    assert 0 <= one < 2**31 and one == derive_seed(seed, role, number) != derive_seed(seed, role, number + 1)
