"""How do workers meet at a store that still holds what dead ones wrote there?

torchrun keeps one store over its restarts, and torch lets the new workers read the addresses of the old: they wait for
ports that nobody listens at, some for 5 s and some without end (torch 2.14, with --master-port). So the workers agree
on a prefix that was never used: each says a word of its own, drawn anew, and takes the prefix only from an answer to
that word, which nobody who died before can have given. It takes that one job
has the store and that nobody of an earlier attempt still lives, which torchrun sees to before it starts new ones.
"""

from __future__ import annotations

import time
import uuid

from torch.distributed.distributed_c10d import PrefixStore, Store

_PAUSE = 0.01
"""Seconds between two looks at the store."""


def meet(store: Store, rank: int, world_size: int, *, seconds: float = 1800.0) -> Store:
    """The part of `store` that belongs to the workers that are alive; every worker calls it.

    Args:
        store: shared by all workers, and perhaps by others before them.
        rank: this worker.
        world_size: workers that meet.
        seconds: to wait for the others.

    Raises:
        RuntimeError: a worker did not come; the message names it.
    """
    deadline = time.monotonic() + seconds
    if rank == 0:
        prefix = f"met/{uuid.uuid4().hex}"
        _answer(store, prefix, world_size, deadline)
    else:
        word = uuid.uuid4().hex
        store.set(f"word/{rank}", word)
        prefix = _await(store, f"answer/{word}", "worker 0", deadline).decode()
        store.set(f"{prefix}/here/{rank}", "")
    return PrefixStore(prefix, store)


def _answer(store: Store, prefix: str, world_size: int, deadline: float) -> None:
    """Answer each worker's word, a new one too, until all have taken the answer."""
    missing = set(range(1, world_size))
    answered: set[str] = set()
    while missing:
        for rank in sorted(missing):
            if store.check([f"{prefix}/here/{rank}"]):
                missing.remove(rank)
            elif store.check([f"word/{rank}"]) and (word := store.get(f"word/{rank}").decode()) not in answered:
                answered.add(word)
                store.set(f"answer/{word}", prefix)
        if missing:
            _pause(f"worker {min(missing)}", deadline)


def _await(store: Store, key: str, whom: str, deadline: float) -> bytes:
    while not store.check([key]):
        _pause(whom, deadline)
    return store.get(key)


def _pause(whom: str, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(f"{whom} did not come in time")
    time.sleep(_PAUSE)
