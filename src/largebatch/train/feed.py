"""How do a step's examples arrive in time?

What arrives is a function of (seed, position) alone: the same bits for any number of loader processes, of workers and
of resumes. Loaders fetch ahead, but nothing moves by it: the position is the number of steps that were taken.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from largebatch.errors import ConfigError, DataError, LargebatchError
from largebatch.recipe.sampler import ShuffledStream, draws, rank_slice
from largebatch.tasks.task import AugmentedSplit, Split, Task
from largebatch.train.evaluate import to_device

logger = logging.getLogger(__name__)

Augment = Callable[[Any, Tensor], Any]

_NONE = np.empty((0, 8), dtype=np.float32)


@runtime_checkable
class SkippingSplit(Split, Protocol):
    """Examples of which some may be unreadable: a batch is then shorter, and the split says by which.

    Such a split augments by itself (`fetch_augmented`), since it alone knows which rows are left.
    """

    def take_skipped(self) -> list[tuple[str, str]]:
        """What was left out since the last call, as (name, why), and forget it."""
        ...


@runtime_checkable
class FinishedSplit(Split, Protocol):
    """Examples that travel small, as pictures' bytes do, and become what a task takes where the model is."""

    def finish(self, batch: Any) -> Any:
        """Turn what `fetch_augmented` returned, moved to the device, into the batch that a task's loss takes."""
        ...


class _Cut(NamedTuple):
    """One microbatch, not fetched yet."""

    indices: NDArray[np.int64]
    """Which examples, shape (count,)."""
    draws: NDArray[np.float32]
    """Their augmentation's random numbers, shape (count, 8); none where nothing is random."""


@dataclass(frozen=True, slots=True)
class _Fetched:
    """One microbatch as a loader hands it over."""

    batch: Any
    draws: NDArray[np.float32]
    skipped: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    error: tuple[type[LargebatchError], str] | None = None
    """What the split raised: a DataLoader would wrap it into a page of text; as a value it stays the sentence it is."""

    def pin_memory(self) -> _Fetched:
        """Called by the DataLoader, which would turn a batch's tuples into lists."""
        return replace(self, batch=_pinned(self.batch))


class _Fetch(Dataset[_Fetched]):
    """A cut -> what is there of it, in the loop's process or in a loader."""

    def __init__(self, split: Split, augment: Augment | None) -> None:
        self.split, self.augment = split, augment
        # Asked once: a protocol's isinstance takes longer than a small batch.
        self._fetches_augmented = split.fetch_augmented if isinstance(split, AugmentedSplit) else None
        self._take_skipped = split.take_skipped if isinstance(split, SkippingSplit) else None

    @property
    def needs_draws(self) -> bool:
        """Whether anything is random in what is made of an example."""
        return self.augment is not None or self._fetches_augmented is not None

    def __getitem__(self, cut: _Cut) -> _Fetched:
        split, indices, random = self.split, torch.from_numpy(cut.indices), torch.from_numpy(cut.draws)
        try:
            if self._fetches_augmented is not None:
                batch = self._fetches_augmented(indices, random)
            else:
                batch = split.fetch(indices)
            if self.augment is not None:
                batch = self.augment(batch, random)
        except LargebatchError as error:
            return _Fetched(None, cut.draws, error=(type(error), str(error)))
        return _Fetched(batch, cut.draws, self._take_skipped() if self._take_skipped else [])


class _Cuts(Sampler[_Cut]):
    """One worker's microbatches from a position of the stream on, without end."""

    def __init__(
        self, stream: ShuffledStream, batch: int, microbatch: int, start: int, rank: int, world_size: int,
        with_draws: bool,
    ) -> None:  # fmt: skip
        self.stream, self.batch, self.microbatch, self.start = stream, batch, microbatch, start
        self.with_draws = with_draws
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[_Cut]:
        for position in itertools.count(self.start, self.batch):
            first, local_batch = rank_slice(position, self.batch, self.rank, self.world_size)
            indices = self.stream.indices(first, local_batch)
            random = _NONE
            if self.with_draws:
                epochs = self.stream.epochs(first, local_batch)
                random = draws(self.stream.seed, epochs, indices).astype(np.float32)
            for at in range(0, local_batch, self.microbatch):
                part = slice(at, at + self.microbatch)
                yield _Cut(indices[part], random[part])


class Feed:
    """The microbatches of one worker, step after step, fetched and augmented.

    With `loaders=0` they are fetched when they are asked for. Otherwise that many processes, of one thread each, fetch
    ahead, two microbatches each; on the way to a GPU they pass through pinned memory. A task's `augment` runs on the
    device, whatever `loaders` is, so that its arithmetic is the same; a split that augments by itself does so in the
    loader.

    >>> from largebatch.tasks import digits
    >>> feed = Feed(digits.load(), seed=0, batch=64, microbatch=48, start=0, device=torch.device("cpu"))
    >>> [len(inputs) for inputs, labels in feed.step()]
    [48, 16]
    >>> feed.close()

    Source: Goyal 2017, remark 4: one shuffle an epoch, dealt out to the workers.
    """

    def __init__(
        self,
        task: Task,
        *,
        seed: int,
        batch: int,
        microbatch: int,
        start: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        loaders: int = 0,
    ) -> None:
        """Begin to fetch.

        Args:
            task: whose training examples.
            seed: of the order and of the augmentation's draws, 0 to 2^64 - 1.
            batch: units in one step over all workers, a multiple of `world_size`, at most the training data.
            microbatch: the largest number of units in one forward/backward, >= 1.
            start: position in the stream of the next step's first example: units trained on so far, by all workers.
            device: where batches are put.
            rank: this worker, 0 to world_size - 1.
            world_size: number of workers, >= 1.
            loaders: processes that fetch ahead, for this worker; 0 fetches in `step`.

        Raises:
            ConfigError: a number is out of its range, `world_size` does not divide `batch`, or the task augments in
                two places.
        """
        if microbatch < 1 or loaders < 0:
            raise ConfigError(f"a feed needs microbatch >= 1 and loaders >= 0; got {microbatch} and {loaders}.")
        if task.augment is not None and isinstance(task.train, AugmentedSplit | SkippingSplit):
            raise ConfigError(
                f"task {task.name!r} has an `augment`, and training examples that augment while they are fetched or "
                "leave some out: its draws would not belong to the rows. Augment in `fetch_augmented` alone."
            )
        self.skipped: dict[str, int] = {}
        """Names of the examples that were left out of this worker's steps so far, with how often each was."""
        self._named: set[str] = set()
        self._device = device
        _, local_batch = rank_slice(start, batch, rank, world_size)
        self._per_step = -(-local_batch // microbatch)
        stream = ShuffledStream(len(task.train), seed)
        stream.indices(start, batch)  # raises where the batch is larger than the data
        # On the CPU a loader may as well augment: the same arithmetic. A GPU's differs, so it stays there.
        on_cpu = device.type == "cpu"
        self._augment = None if on_cpu else task.augment
        self._finish = task.train.finish if isinstance(task.train, FinishedSplit) else None
        fetch = _Fetch(task.train, task.augment if on_cpu else None)
        with_draws = fetch.needs_draws or self._augment is not None
        cuts = _Cuts(stream, batch, microbatch, start, rank, world_size, with_draws)
        self._processes: list[BaseProcess] = []
        self._end = partial(_kill, self._processes)
        self._fetched: Iterator[_Fetched] | None
        if loaders:
            self._fetched = self._start(fetch, cuts, loaders)
        else:
            self._fetched = (fetch[cut] for cut in cuts)

    def step(self) -> list[Any]:
        """This worker's microbatches of the next step, on the device, augmented.

        Raises:
            DataError: an example cannot be read, or a loader process was killed.
            LargebatchError: whatever else of that family the task's own code raised.
        """
        return [self._next() for _ in range(self._per_step)]

    def leave_out(self, skipped: list[tuple[str, str]]) -> None:
        """Count what `take_skipped` said, and name each example the first time."""
        for name, why in skipped:
            if name not in self._named:
                self._named.add(name)
                logger.warning("left out %s: %s", name, why)
            self.skipped[name] = self.skipped.get(name, 0) + 1

    def close(self) -> None:
        """End the loaders: none is left when this returns. A second call does nothing."""
        self._fetched = None  # a DataLoader's iterator ends its processes and waits, when nothing holds it any more
        self._end()
        atexit.unregister(self._end)

    def _start(self, fetch: _Fetch, cuts: _Cuts, loaders: int) -> Iterator[_Fetched]:
        before = set(multiprocessing.active_children())
        handler = signal.getsignal(signal.SIGCHLD)
        iterator = iter(
            DataLoader(
                fetch, batch_size=None, sampler=cuts, num_workers=loaders, collate_fn=_as_it_is,
                pin_memory=self._device.type == "cuda", worker_init_fn=_leave_signals_to_the_loop,
                generator=torch.Generator(),  # its own, so that torch's does not move
            )
        )  # fmt: skip
        if threading.current_thread() is threading.main_thread():
            # A DataLoader's handler raises when a loader dies, in whatever line the loop is just then, be it an
            # optimizer's step or a save. Here the death is found where the next batch is waited for.
            signal.signal(signal.SIGCHLD, handler)
        self._processes += [child for child in multiprocessing.active_children() if child not in before]
        # An exit without close() would wait for loaders that leave SIGTERM to the loop.
        atexit.register(self._end)
        return iterator

    def _next(self) -> Any:
        if self._fetched is None:
            raise ConfigError("this feed was closed: make a new one, with `start` where the loop stands.")
        try:
            found = next(self._fetched)
        except (RuntimeError, OSError, EOFError) as error:
            # A dead loader is also a pipe that ends; the process may need an instant more than its pipe.
            wait([process.sentinel for process in self._processes], timeout=1.0)
            if dead := [process for process in self._processes if process.exitcode]:
                raise self._killed(dead[0]) from error
            raise
        if found.error is not None:
            kind, sentence = found.error
            raise kind.__new__(kind, sentence)
        self.leave_out(found.skipped)
        batch = to_device(found.batch, self._device)
        if self._finish is not None:
            batch = self._finish(batch)
        if self._augment is not None:
            batch = self._augment(batch, torch.from_numpy(found.draws).to(self._device))
        return batch

    def _killed(self, process: BaseProcess) -> DataError:
        code = process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return DataError(
            f"loader process {process.pid}, one of {len(self._processes)}, was {how}, as happens where memory (or "
            "/dev/shm) runs out. Use fewer loaders or a smaller microbatch and run the same command again: it goes on "
            "from the last checkpoint."
        )


def _pinned(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.pin_memory()
    if isinstance(batch, tuple | list):
        pinned = [_pinned(item) for item in batch]
        return type(batch)(*pinned) if hasattr(batch, "_fields") else type(batch)(pinned)
    return {key: _pinned(item) for key, item in batch.items()} if isinstance(batch, dict) else batch


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _as_it_is(fetched: Any) -> Any:
    return fetched


def _leave_signals_to_the_loop(_: int) -> None:
    # Ctrl-C and a job's SIGTERM reach the whole group. The loop decides: it may take its last steps and save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
