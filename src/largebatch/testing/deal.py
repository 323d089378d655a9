"""Which examples of a step's global batch does each worker get?

A tensor or array is cut along its first dimension; a dict or a tuple is a set of columns, each cut alike; a list, or
anything else with a length and an index, is a sequence of examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from largebatch.errors import ConfigError


def num_examples(batch: Any) -> int:
    """How many examples a batch holds.

    Raises:
        ConfigError: it is not a batch, its columns differ in length, or it is empty.

    >>> num_examples({"x": [1, 2, 3], "y": [0, 0, 1]})
    3
    """
    if isinstance(batch, str | bytes) or not hasattr(batch, "__len__") or not hasattr(batch, "__getitem__"):
        raise ConfigError(
            f"a batch is a tensor, a list of examples, or a dict or tuple of columns; got {type(batch).__name__}."
        )
    if isinstance(batch, Mapping | tuple):
        columns = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
        counts = {key: num_examples(column) for key, column in columns.items()}
        if len(set(counts.values())) > 1:
            raise ConfigError(
                f"the columns of a batch differ in length: {counts}. Give every column one row an example; a sequence "
                "of examples is a list, not a tuple."
            )
        if not counts:
            raise ConfigError("a batch holds at least one example; got no columns.")
        return next(iter(counts.values()))
    if isinstance(batch, Tensor | np.ndarray) and batch.ndim == 0:
        raise ConfigError("a batch has one row an example along its first dimension; got a tensor of no dimension.")
    if not len(batch):
        raise ConfigError("a batch holds at least one example; got none.")
    return len(batch)


def take(batch: Any, start: int, stop: int) -> Any:
    """The examples at positions `start` to `stop`, in the batch's own form.

    >>> take(([1, 2, 3], ["a", "b", "c"]), 1, 3)
    ([2, 3], ['b', 'c'])
    """
    if isinstance(batch, Mapping):
        return {key: take(column, start, stop) for key, column in batch.items()}
    if isinstance(batch, tuple):
        columns = [take(column, start, stop) for column in batch]
        return type(batch)(*columns) if hasattr(batch, "_fields") else tuple(columns)
    if isinstance(batch, Tensor | np.ndarray):
        return batch[start:stop]
    return [batch[index] for index in range(start, stop)]


def share_sizes(num: int, world_size: int, uneven: bool) -> tuple[int, ...]:
    """How many of `num` examples each worker gets: equal shares, or shares that are not.

    Raises:
        ConfigError: equal shares are not to be had, or there are too few examples for unequal ones.

    >>> share_sizes(8, 2, uneven=False), share_sizes(8, 2, uneven=True), share_sizes(8, 4, uneven=True)
    ((4, 4), (5, 3), (3, 2, 2, 1))
    """
    each, rest = divmod(num, world_size)
    if uneven and num < world_size:
        raise ConfigError(f"a batch of {num} leaves some of {world_size} workers without an example.")
    if not uneven and rest:
        nearest = [str(parts * world_size) for parts in (each, each + 1) if parts]
        raise ConfigError(
            f"a batch of {num} cannot be dealt out evenly to {world_size} workers. The nearest that can: "
            f"{' or '.join(nearest)}."
        )
    sizes = [each + (rank < rest) for rank in range(world_size)]
    if uneven and world_size > 1 and not rest:
        moved = max(1, each // 4)
        if each <= moved:
            raise ConfigError(
                f"uneven=True needs at least 2 examples a worker; got a batch of {num} for {world_size} workers. "
                f"Give at least {2 * world_size}."
            )
        sizes[0] += moved
        sizes[-1] -= moved
    return tuple(sizes)


def share_of(batch: Any, sizes: Sequence[int], rank: int) -> Any:
    """One worker's run of the batch, where worker r gets the next sizes[r] examples.

    >>> share_of([1, 2, 3, 4, 5], (3, 2), 1)
    [4, 5]
    """
    start = sum(sizes[:rank])
    return take(batch, start, start + sizes[rank])


def microbatches(batch: Any, size: int) -> list[Any]:
    """A share in runs of `size` examples, the last one of what is left.

    >>> microbatches([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    num = num_examples(batch)
    return [take(batch, start, min(start + size, num)) for start in range(0, num, size)]
