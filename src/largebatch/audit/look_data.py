"""Is every epoch one shuffle of the data, dealt out to the workers?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from largebatch.audit.findings import Finding
from largebatch.audit.look_order import Order
from largebatch.audit.look_setup import Setup


def look(setup: Setup) -> Iterator[Finding]:
    """Find LB302, LB303 and LB304."""
    if setup.order is not None and setup.order.sampler is not None:
        yield from _overlap(setup, setup.order)
        yield from _padding(setup.order)
        yield from _stored_order(setup.order)


def _overlap(setup: Setup, order: Order) -> Iterator[Finding]:
    name = _name(order.sampler)
    if order.num_workers is not None:
        if order.num_workers != setup.world_size:
            yield Finding(
                code="LB302",
                seen=f"{_name(order.dealt_by or order.sampler)} deals the data to {order.num_workers} workers, and "
                f"there are {setup.world_size}.",
            )
        elif setup.rank is not None and order.rank is not None and order.rank != setup.rank:
            yield Finding(
                code="LB302",
                seen=f"{_name(order.dealt_by or order.sampler)} deals to worker {order.rank}, and this is worker "
                f"{setup.rank}: two workers have the same part.",
            )
    elif setup.world_size > 1 and order.whole and not setup.resharded and _takes_all(order.sampler):
        yield Finding(
            code="LB302",
            seen=f"there are {setup.world_size} workers, and {name} gives each of them all "
            f"{_examples(order)} in an order of its own.",
        )


def _takes_all(sampler: Any) -> bool:
    """Whether a sampler goes through the whole data set; a weighted or a subset's one may be meant for a worker."""
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement
    return type(sampler) is SequentialSampler


def _padding(order: Order) -> Iterator[Finding]:
    sampler, num_examples = order.sampler, order.num_examples
    if num_examples is None:
        return
    total = getattr(sampler, "total_size", None)
    # Padding evens the workers out; a sampler that repeats more than that (repeated augmentation) means to.
    if isinstance(total, int) and order.num_workers and 0 < total - num_examples < order.num_workers:
        yield Finding(
            code="LB303",
            seen=f"{_name(sampler)} deals {num_examples} examples to {order.num_workers} workers and repeats "
            f"{total - num_examples} of them in every epoch.",
        )
    shard = order.dealt_by
    if shard is not None and shard.num_processes > 1 and shard.even_batches and not getattr(shard, "drop_last", False):
        step = (order.local_batch or 0) * shard.num_processes
        if step and num_examples % step:
            yield Finding(
                code="LB303",
                seen=f"{_name(shard)} fills the last of its steps of {step} with {step - num_examples % step} examples "
                f"from the beginning of the epoch ({num_examples} examples, even_batches=True).",
            )


def _stored_order(order: Order) -> Iterator[Finding]:
    sampler = order.sampler
    in_order = type(sampler) is SequentialSampler or (isinstance(sampler, DistributedSampler) and not sampler.shuffle)
    if in_order and order.whole and order.num_examples != 1:
        what = "goes through" if type(sampler) is SequentialSampler else "with shuffle=False goes through"
        yield Finding(code="LB304", seen=f"{_name(sampler)} {what} {_examples(order)} in their stored order.")


def _examples(order: Order) -> str:
    return "the examples" if order.num_examples is None else f"{order.num_examples} examples"


def _name(owner: Any) -> str:
    return type(owner).__name__
