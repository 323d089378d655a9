"""A set-up that can be pickled, for workers that are spawned."""

from __future__ import annotations

from typing import Any

from testing.setups import setup


def make(rank: int, world_size: int) -> Any:
    return setup()(rank, world_size)
