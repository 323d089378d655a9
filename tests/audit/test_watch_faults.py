"""Are the faults found that are put into the peers' own loops, and nothing else, over a few real steps?

The rate counts every fault that was put in, one to three at a time; a false code fails at once.
"""

from __future__ import annotations

import random

import pytest

from audit.loops import (
    ACCUMULATING,
    BETWEEN,
    FAULTS,
    HIDING,
    HUGGING_FACE_FAULTS,
    LIGHTNING_FAULTS,
    Flags,
    codes_of,
    hugging_face_run,
    lightning_run,
    timm_loop,
    torchvision_loop,
)
from workers import on_workers

pytestmark = [pytest.mark.xdist_group("lightning"), pytest.mark.filterwarnings("ignore")]

RUNS = {
    "torchvision": (lambda put, _: torchvision_loop(put, ACCUMULATING).watched(), FAULTS),
    "timm": (lambda put, _: timm_loop(put, ACCUMULATING).watched(), FAULTS),
    "lightning": (lambda put, _: lightning_run(put), LIGHTNING_FAULTS),
    "hugging_face": (lambda put, folder: hugging_face_run(folder, put), HUGGING_FACE_FAULTS),
}


def draws_of(peer, possible, num):
    """Sets of one to three faults, of which none hides another; the first few are each fault alone."""
    draw = random.Random(f"faults in the loop of {peer}")
    found = [frozenset((fault,)) for fault in possible]
    draw.shuffle(found)
    while len(found) < num:
        put = frozenset(draw.sample(possible, draw.randint(1, 3)))
        if not any(pair <= put for pair in HIDING):
            found.append(put)
    return found[:num]


def count(runs):
    """Of (faults that were put in, codes that were found) how many there were of each."""
    num_put = num_found = 0
    for put, found in runs:
        expected = {fault[:5] for fault in put}
        assert found <= expected, f"false codes {found - expected} with {sorted(put)}"
        num_put += len(expected)
        num_found += len(found)
    return num_found, num_put


def check(peer, num, folder):
    run, possible = RUNS[peer]
    num_found, num_put = count((put, codes_of(run(put, folder))) for put in draws_of(peer, possible, num))
    assert num_found >= 0.95 * num_put, f"{num_found} of {num_put}"


@pytest.mark.parametrize("peer", RUNS)
def test_an_untouched_loop_shows_nothing(peer, tmp_path):
    watched = RUNS[peer][0](frozenset(), tmp_path)
    assert codes_of(watched) == set()
    assert (watched.num_steps, watched.num_backwards, watched.unread) == (8, 16, ())


@pytest.mark.parametrize(("peer", "num"), [("torchvision", 10), ("timm", 12), ("lightning", 6), ("hugging_face", 5)])
def test_one_to_three_random_faults_are_found_and_nothing_else(peer, num, tmp_path):
    check(peer, num, tmp_path)


@pytest.mark.proofs
@pytest.mark.parametrize("peer", RUNS)
def test_forty_draws_of_random_faults_are_found(peer, tmp_path):
    check(peer, 40, tmp_path)


# What is true of the scripts as they come: at rest their decay and gamma (test_false_alarms.py); in their steps nothing
# on one worker, and on several the examples that a DistributedSampler repeats (LB303) where the workers do not divide.
DEFAULTS = {
    "defaults": Flags(),
    "no even epoch": Flags(num_examples=30),
    "accumulating, no even epoch": Flags(accumulation=2, clip=1.0, num_examples=28),
    "mixed precision": Flags(scaled=True, clip=1.0),
    "by updates": Flags(by_update=True),
}


@pytest.mark.parametrize("flags", DEFAULTS.values(), ids=DEFAULTS)
@pytest.mark.parametrize("make", [torchvision_loop, timm_loop], ids=["torchvision", "timm"])
def test_a_script_s_own_loop_gives_no_false_alarm(make, flags):
    watched = make(flags=flags).watched()
    assert codes_of(watched) == set() and watched.unread == ()


def on_two(rank, sets):
    workers = {"rank": rank, "world_size": 2}
    flags = Flags(accumulation=2, by_update=True, num_examples=64)
    return [codes_of(torchvision_loop(put, flags, **workers).watched()) for put in sets]


def check_workers(num, part=0):
    possible = (*BETWEEN, "LB401", "LB405", "LB407 not zeroed")
    sets = [frozenset(), *draws_of(f"two workers, part {part}", possible, num)]
    first, second = on_workers(2, on_two, sets)
    assert first == second
    num_found, num_put = count(zip(sets, first, strict=True))
    assert num_found >= 0.95 * num_put, f"{num_found} of {num_put}"


def test_random_faults_on_two_workers_are_found_and_nothing_else():
    check_workers(14)


@pytest.mark.proofs
@pytest.mark.parametrize("part", range(1, 5))
def test_twenty_draws_of_random_faults_on_two_workers_are_found(part):
    check_workers(20, part)
