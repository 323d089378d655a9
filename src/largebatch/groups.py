"""Which workers belong together, and what do they add up?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch.distributed as dist
from torch import Tensor


def num_workers() -> int:
    """Workers of this job: 1 where torch.distributed was not started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_groups(groups: Sequence[dist.ProcessGroup]) -> tuple[dist.ProcessGroup, ...]:
    """Groups of the same workers for traffic of our own, so that it never meets others' in a wrong order.

    Every worker of each group calls this at the same point of its program.
    """
    found = (dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True) for group in groups)
    return tuple(group for group in found if isinstance(group, dist.ProcessGroup))


def sum_over_workers(values: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
    """Add `values` up in place over each group in turn; every worker of the groups calls it.

    A mesh of several axes gives one group an axis: after all of them every worker holds the sum over the mesh.
    """
    for group in groups:
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=group)


def is_spread(tensor: Any) -> TypeGuard[Any]:
    """Whether each worker holds a part: a DTensor, known by its mesh, since its class takes a second to import."""
    return hasattr(tensor, "device_mesh")


def share_out(sizes: Sequence[int], world_size: int) -> list[int]:
    """The worker that takes each piece of work: the largest first, each to who has least; the same on all workers.

    >>> share_out([5, 9, 4, 1], 2)
    [1, 0, 1, 0]
    """
    loads = [0] * world_size
    shares = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        shares[index] = rank = loads.index(min(loads))
        loads[rank] += sizes[index]
    return shares
