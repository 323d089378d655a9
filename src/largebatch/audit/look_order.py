"""Which sampler decides a loader's order, and how many workers does it deal to?

Loaders wrap each other (timm's prefetcher, accelerate's shards, batch samplers over samplers). Only what is known is
followed: the order of a batch sampler or a sampler of an unknown kind is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from largebatch.recipe.batch_sampler import ShuffledBatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a loader says about its order."""

    sampler: Any = None
    """The innermost sampler that is known to decide; None where it is not known."""
    whole: bool = True
    """Whether nothing unknown stands between the sampler and the loader, which might change or divide the order."""
    dealt_by: Any = None
    """The batch sampler that deals batches out to the workers (accelerate's); None where none does."""
    num_examples: int | None = None
    """Examples in the data set; None where it has no length."""
    local_batch: int | None = None
    """Examples that this worker is given in one batch; None where it is not known."""
    batch: int | None = None
    """Examples in an optimizer step, where the sampler itself deals out whole steps (ShuffledBatches)."""
    num_workers: int | None = None
    """Workers that the data are dealt to; None where nothing deals them."""
    rank: int | None = None
    """The worker that is dealt to here; None where nothing deals."""


def is_loader(loader: Any) -> bool:
    """Whether it is a DataLoader, or wraps one."""
    return hasattr(_innermost(loader), "dataset") and hasattr(_innermost(loader), "batch_sampler")


def order_of(loader: Any) -> Order:
    """What is known of the order of `loader`, whose `batch_sampler` is followed to the sampler that decides."""
    loader = _innermost(loader)
    node: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    local_batch = getattr(node, "batch_size", None) if loader.batch_sampler is not None else None
    ours = _ours(node)
    if ours is not None:
        local_batch = -(-ours.batch // (ours.world_size * ours.accumulation))
    whole = True
    dealt_by: Any = None
    while True:
        kind = type(node)
        if getattr(node, "num_processes", None) is not None and hasattr(node, "batch_sampler"):
            dealt_by, node = node, node.batch_sampler  # accelerate's BatchSamplerShard
        elif kind is BatchSampler or kind.__name__ == "_RepeatSampler":  # timm's, which never ends
            node = node.sampler
            local_batch = getattr(node, "batch_size", local_batch)
        elif isinstance(node, BatchSampler) and getattr(node, "sampler", None) is not None:
            whole, node = False, node.sampler
        else:
            break
    if dealt_by is not None and getattr(dealt_by, "split_batches", False) and local_batch:
        local_batch //= dealt_by.num_processes
    dealer = node if dealt_by is None else dealt_by
    return Order(
        sampler=None if isinstance(loader.dataset, IterableDataset) else node,
        whole=whole,
        dealt_by=dealt_by,
        num_examples=_length(loader.dataset),
        local_batch=local_batch if isinstance(local_batch, int) else None,
        batch=ours.batch if ours is not None else None,
        num_workers=_count(dealer, "num_processes", "num_replicas", "world_size"),
        rank=_count(dealer, "process_index", "rank"),
    )


def is_of_accelerate(loader: Any) -> bool:
    """Whether accelerate prepared the loader, so that it deals to as many processes as there are."""
    return type(loader).__module__.startswith("accelerate.")


def _ours(node: Any) -> ShuffledBatches | None:
    return node if isinstance(node, ShuffledBatches) else None


def _innermost(loader: Any) -> Any:
    while not hasattr(loader, "batch_sampler") and hasattr(loader, "loader"):  # timm's PrefetchLoader
        loader = loader.loader
    return loader


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # torch's samplers raise either where there is no length
        return None


def _count(owner: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
