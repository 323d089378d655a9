"""Do workers that start again meet each other, and not the addresses of the dead?"""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from largebatch.train.meeting import meet


def together(store, world_size, **options):
    """What each of `world_size` workers, a thread each, has met at."""
    found = {}

    def come(rank):
        try:
            found[rank] = meet(store, rank, world_size, **options)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world_size)]


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_meet_at_one_place(store, world_size):
    met = together(store, world_size)
    met[-1].set("address", "here")
    assert [each.get("address") for each in met] == [b"here"] * world_size


def test_what_the_dead_wrote_is_not_read(store):
    for _ in range(3):  # torchrun's store outlives each restart
        met = together(store, 3)
        assert not any(each.check(["rank_1"]) for each in met)
        met[1].set("rank_1", "an address nobody listens at")


def test_one_that_died_before_it_met_the_others_leaves_nothing_to_wait_for(store):
    store.set("word/1", "of a worker that was killed")
    met = together(store, 2)
    met[0].set("address", "here")
    assert met[1].get("address") == b"here"


def test_who_did_not_come_is_named(store):
    with pytest.raises(RuntimeError, match="worker 1 did not come"):
        meet(store, 0, 3, seconds=0.05)
    with pytest.raises(RuntimeError, match="worker 0 did not come"):
        meet(store, 2, 3, seconds=0.05)


def test_it_works_over_the_store_that_torchrun_has(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    for _ in range(2):
        met = together(store, 2)
        met[0].set("address", "here")
        assert met[1].get("address") == b"here"
