"""Can these arguments be used?"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

from largebatch.errors import ConfigError
from largebatch.testing.deal import num_examples


def deals_for_itself(batch: Any) -> bool:
    """Whether `batch` is a function that deals each worker its share, and not the global batch."""
    if not callable(batch):
        return False
    try:
        signature = inspect.signature(batch)
    except (TypeError, ValueError):
        return False
    for count, own in ((1, False), (3, True)):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return own
    raise ConfigError(
        f"batch is a function of {signature}; it takes (step) and returns the global batch of that step, or "
        "(step, rank, world_size) and returns a worker's share."
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_arguments(
    make: Any,
    batch: Any,
    world_sizes: Sequence[int],
    microbatch: int | None,
    uneven: bool,
    steps: int,
    tolerance: float | None,
    timeout: float,
    seed: int,
) -> list[int]:
    """The world sizes, each once.

    Raises:
        ConfigError: an argument cannot be used.
    """
    if not callable(make):
        raise ConfigError(
            f"make is a function of (rank, world_size) that returns (model, optimizer, step); got {make!r}."
        )
    try:
        inspect.signature(make).bind(0, 1)
    except TypeError as error:
        raise ConfigError(f"make takes (rank, world_size); {error}.") from error
    if not isinstance(world_sizes, Sequence):
        raise ConfigError(f"world_sizes is a sequence of numbers of workers, as (1, 2, 4); got {world_sizes!r}.")
    sizes = list(dict.fromkeys(world_sizes))
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise ConfigError(f"world_sizes are whole numbers of workers of at least 1; got {world_sizes!r}.")
    if max(sizes) == 1 and microbatch is None:
        raise ConfigError(
            f"world_sizes={tuple(sizes)} leaves nothing to compare with one worker. Add 2, or give microbatch."
        )
    for name, value in (("steps", steps), ("microbatch", microbatch)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} is a whole number of at least 1; got {value!r}.")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed is a whole number from 0 to 2^63 - 1; got {seed!r}.")
    if not isinstance(uneven, bool):
        raise ConfigError(f"uneven is True or False; got {uneven!r}.")
    if tolerance is not None and not (_is_number(tolerance) and 0 < tolerance < 1):
        raise ConfigError(f"tolerance is a relative difference in (0, 1); got {tolerance!r}.")
    if not (_is_number(timeout) and timeout > 0 and math.isfinite(timeout)):
        raise ConfigError(f"timeout is a finite number of seconds above 0; got {timeout!r}.")
    if deals_for_itself(batch):
        if uneven:
            raise ConfigError(
                "uneven=True deals the global batch, and batch(step, rank, world_size) deals it already. Leave uneven "
                "out, and return unequal shares."
            )
    elif not callable(batch):
        total = num_examples(batch)
        if microbatch is not None and microbatch > total:
            raise ConfigError(f"a microbatch of {microbatch} is larger than the batch of {total}.")
        for size in sizes:
            if total % size and not uneven:
                nearest = [str(parts * size) for parts in (total // size, total // size + 1) if parts]
                raise ConfigError(
                    f"a batch of {total} cannot be dealt out evenly to {size} workers. Give {' or '.join(nearest)} "
                    "examples, or uneven=True."
                )
    return sizes
