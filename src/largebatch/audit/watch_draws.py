"""Which examples did the sampler draw, in each epoch and on each worker?

A sampler's iterator is followed while it is used; what it draws, and when, stays as it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import index
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from largebatch.audit.watch_patch import wrapped, wrapped_in_family

MAX_PASSES = 4
"""Passes of a sampler that are kept: two epochs show a mistake, and the first may have begun before anyone looked."""


@dataclass(kw_only=True, slots=True)
class Pass:
    """One pass of a sampler through the data."""

    source: int
    """Number of the sampler, in the order in which they were used."""
    epoch: int | None = None
    """What set_epoch was last called with; None for a sampler that takes no epoch."""
    shuffles: bool = True
    """Whether the sampler shuffles."""
    pads: bool = False
    """Whether the sampler repeats examples so that all workers get as many."""
    local_batch: int = 1
    """Indices drawn at once."""
    num_examples: int | None = None
    """Examples in the data set."""
    data: str = ""
    """What tells one worker's data set from another's, as far as it can be told."""
    drawn: array[int] = field(default_factory=lambda: array("q"))
    """Indices in the order in which they were drawn."""
    num_backwards: int = 0
    """Backwards on it: none for a look at a first batch, or an evaluation."""


class DrawRecorder:
    """Follows the sampler of a data loader, and every shuffling DistributedSampler."""

    def __init__(self, dataloader: Any) -> None:
        """Follow the sampler of `dataloader`; None follows DistributedSamplers only."""
        self.passes: list[Pass] = []
        self._loader = dataloader
        self._own = _index_sampler(dataloader)
        self._inner = list(_chain(self._own))
        self._sources: list[Any] = []
        self._last: Pass | None = None
        self._num_draws = 0

    @contextmanager
    def looking(self) -> Generator[None]:
        """Follow while the context is open."""
        with ExitStack() as stack:
            stack.enter_context(wrapped_in_family(DistributedSampler, "__iter__", self._wrap))
            owner = next((base for base in type(self._own).__mro__ if "__iter__" in vars(base)), object)
            # A list of batches is of a built-in type, which cannot be wrapped.
            if owner.__module__ != "builtins" and not issubclass(owner, DistributedSampler):
                stack.enter_context(wrapped(owner, "__iter__", self._wrap))
            yield

    def backward(self) -> None:
        """A backward was done on what was drawn last."""
        if self._last is not None:
            self._last.num_backwards += 1

    def last_draw(self) -> tuple[int, int] | None:
        """The sampler that has drawn last, and how many times any has drawn; None if none has been followed."""
        return None if self._last is None else (self._last.source, self._num_draws)

    def trained(self) -> list[Pass]:
        """The passes that were trained on, in order."""
        return [one for one in self.passes if one.num_backwards]

    def _wrap(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        def follow(sampler: Any) -> Iterator[Any]:
            iterator = original(sampler)
            return _Followed(iterator, self, self._begin(sampler)) if self._is_wanted(sampler) else iterator

        return follow

    def _is_wanted(self, sampler: Any) -> bool:
        if sampler is self._own:
            return True
        is_inner = any(sampler is inner for inner in self._inner)
        return isinstance(sampler, DistributedSampler) and sampler.shuffle and not is_inner

    def _begin(self, sampler: Any) -> Pass:
        chain = list(_chain(sampler))
        data = _dataset(self._loader if sampler is self._own else None, chain)
        known = [number for number, other in enumerate(self._sources) if other is sampler]
        if not known:
            self._sources.append(sampler)
        num_examples = _length(data)
        holder = next((part for part in chain if hasattr(part, "set_epoch")), None)
        return Pass(
            source=known[0] if known else len(self._sources) - 1,
            epoch=getattr(holder, "epoch", None),
            shuffles=bool(getattr(holder, "shuffle", True)),
            pads=any(getattr(part, "total_size", 0) > num_examples for part in chain if num_examples is not None),
            num_examples=num_examples,
            data=_signature(data),
        )

    def note(self, followed: Pass, item: Any) -> None:
        """Take down what a sampler has drawn: an index, or a batch of them."""
        self._num_draws += 1
        if self._last is not followed:
            self._last = followed
            if not any(one is followed for one in self.passes):
                self._keep(followed)
        indices = _indices(item)
        followed.local_batch = max(followed.local_batch, len(indices))
        followed.drawn.extend(indices)

    def _keep(self, followed: Pass) -> None:
        alike = [one for one in self.passes if one.source == followed.source]
        idle = [one for one in alike if not one.num_backwards]
        self.passes = [one for one in self.passes if not any(one is other for other in idle)]
        if len(alike) - len(idle) < MAX_PASSES:
            self.passes.append(followed)


class _Followed:
    """An iterator that tells what it yields, and is otherwise the one it follows."""

    def __init__(self, iterator: Iterator[Any], recorder: DrawRecorder, followed: Pass) -> None:
        self._iterator, self._recorder, self._followed = iterator, recorder, followed

    def __iter__(self) -> _Followed:
        return self

    def __next__(self) -> Any:
        item = next(self._iterator)
        self._recorder.note(self._followed, item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _indices(item: Any) -> list[int]:
    """The index or the indices that a sampler has yielded; none for keys that are not numbers."""
    try:
        return [index(item)]
    except (TypeError, RuntimeError, ValueError):
        pass
    try:
        return [index(one) for one in item]
    except (TypeError, RuntimeError, ValueError):
        return []


def _index_sampler(loader: Any) -> Any:
    """What a loader takes its batches of indices from, or its indices."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return batch_sampler if batch_sampler is not None else getattr(loader, "sampler", None)


def _chain(sampler: Any) -> Iterator[Any]:
    """A sampler, and what it draws from in turn."""
    seen: list[Any] = []
    while sampler is not None and not any(sampler is other for other in seen):
        seen.append(sampler)
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)


def _dataset(loader: Any, chain: list[Any]) -> Any:
    if isinstance(loader, DataLoader) or hasattr(loader, "dataset"):
        return loader.dataset
    return next((part.dataset for part in chain if hasattr(part, "dataset")), None)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _signature(data: Any) -> str:
    """What differs between two parts of one data set; nothing is fetched, since that may draw random numbers."""
    if isinstance(data, Subset):
        return f"{list(islice(data.indices, 64))} of {_signature(data.dataset)}"
    if isinstance(data, TensorDataset):
        return str([tensor[:1].flatten()[:64].tolist() for tensor in data.tensors])
    return str(getattr(data, "_fingerprint", _length(data)))
