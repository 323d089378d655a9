"""Are the faults found that are put into sane set-ups, and nothing else?"""

import random

import pytest

from audit.setups import EXCLUSIVE, FAULTS, SETUPS, Options

NUM_DRAWS = 60
"""Draws from each of the four peers."""


@pytest.mark.parametrize("peer", SETUPS)
def test_a_sane_setup_has_no_finding(peer: str):
    build, _ = SETUPS[peer]
    assert build(Options()).inspect() == []


@pytest.mark.parametrize(("peer", "code"), [(peer, code) for peer in SETUPS for code in sorted(SETUPS[peer][1])])
def test_each_fault_alone_is_found_and_gives_its_own_code_only(peer: str, code: str):
    build, _ = SETUPS[peer]
    for way in FAULTS[code]:
        assert build(Options(**way)).codes() == {code}, way


@pytest.mark.parametrize("peer", SETUPS)
def test_one_to_three_random_faults_are_found_and_nothing_else(peer: str):
    build, possible = SETUPS[peer]
    draw = random.Random(f"faults of {peer}")
    num_put, num_found = 0, 0
    for _ in range(NUM_DRAWS):
        put = set(draw.sample(sorted(possible), draw.randint(1, 3)))
        put -= {max(pair) for pair in EXCLUSIVE if pair <= put}
        ways = [draw.choice(FAULTS[code]) for code in sorted(put)]
        options = Options(**{name: value for way in ways for name, value in way.items()})
        found = build(options).codes()
        assert found <= put, f"false codes {found - put} with {ways}"
        num_put += len(put)
        num_found += len(found)
    assert num_found >= 0.95 * num_put
