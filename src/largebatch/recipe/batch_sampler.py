"""How does torch's DataLoader deal out one shuffle an epoch, and go on after a kill where the loop stood?

`ShuffledLoader` is a DataLoader whose order is that of ShuffledStream: the same for any number of workers, of loader
processes and of microbatches. Its position counts what reached the loop, not what was drawn ahead by loader processes:
it moves when a step's last microbatch is handed over, so that there is nothing to call and nothing to forget.

    loader = ShuffledLoader(dataset, batch=256, seed=0, microbatch=32, num_workers=4)
    for epoch in range(loader.epoch, 90):
        for number, microbatch in enumerate(loader, start=1):      # a pass: the steps that begin in this epoch
            ...                                                    # backward
            if number % loader.accumulation == 0:
                ...                                                # optimizer step; loader.state_dict() is safe here
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler

from largebatch.errors import ConfigError
from largebatch.groups import num_workers
from largebatch.recipe.sampler import ShuffledStream, rank_slice

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class ShuffledBatches(Sampler[list[int]]):
    """One worker's microbatches of every step of a pass, as a batch sampler for a DataLoader of your own.

    A pass is the steps that begin in one epoch; an iteration that came to its end leaves `start` at the next one. It
    has no state to save: a DataLoader draws ahead of the loop, so what was drawn is not what was used. Use
    ShuffledLoader, which knows, or make it anew with `start=num_steps * batch`.

    >>> batches = ShuffledBatches(10, batch=4, seed=0, microbatch=2)
    >>> [len(indices) for indices in batches], batches.start
    ([2, 2, 2, 2, 2, 2], 12)

    Source: Goyal 2017, remark 4.
    """

    def __init__(
        self,
        num_examples: int,
        *,
        batch: int,
        seed: int,
        rank: int | None = None,
        world_size: int | None = None,
        microbatch: int | None = None,
        keep_short: bool = False,
        endless: bool = False,
        start: int = 0,
    ) -> None:
        """Divide the batches of a stream among workers and microbatches.

        Args:
            num_examples: examples in the data, >= 1.
            batch: examples in one optimizer step over all workers and microbatches (Goyal's kn), a multiple of
                `world_size`, at most `num_examples`.
            seed: of the shuffles, 0 to 2^64 - 1, the same on all workers.
            rank: this worker, 0 to world_size - 1; None takes both from torch.distributed (0 of 1 where not started).
            world_size: workers among which a batch is dealt out.
            microbatch: examples in one forward, at most; None is the worker's whole share.
            keep_short: end an epoch by a short batch, where the batch does not divide it, instead of filling that from
                the next epoch. Its shares differ by one example at most: divide the loss by the step's own total.
            endless: go on for ever, instead of ending with the steps that begin in the epoch.
            start: position in the stream, the examples used so far: `num_steps * batch`.

        Raises:
            ConfigError: the workers do not divide the batch (it names the nearest that they do), the batch is larger
                than the data, a short batch would leave a microbatch empty, or the job's workers are not known yet.
        """
        num_examples, batch, seed = _whole("num_examples", num_examples), _whole("batch", batch), _whole("seed", seed)
        microbatch = None if microbatch is None else _whole("microbatch", microbatch)
        self.stream = ShuffledStream(num_examples, seed)
        self.rank, self.world_size = _place(rank, world_size)
        _, local_batch = rank_slice(0, batch, self.rank, self.world_size)
        self.stream.epochs(0, batch)  # refuses a batch larger than the data
        if microbatch is not None and microbatch < 1:
            raise ConfigError(f"a microbatch has at least 1 example; got {microbatch}.")
        self.batch, self.keep_short, self.endless = batch, keep_short, endless
        self.accumulation = -(-local_batch // (microbatch or local_batch))
        """Microbatches in each step of a worker; also in a short one, so that all workers do as many backwards."""
        self.num_iterations = 0
        self._check_short(num_examples % batch)
        self.begin_at(_whole("start", start))

    def begin_at(self, position: int) -> None:
        """Let the next iteration begin at `position` (>= 0) of the stream.

        Raises:
            ConfigError: the position is negative, or the short batch at this epoch's end leaves a microbatch empty.
        """
        self.stream.epoch_of(position)  # refuses what is below 0
        self._check_short((self.stream.num_examples - position % self.stream.num_examples) % self.batch)
        self.start = position

    def after(self, position: int) -> int:
        """The position at which the step ends that begins at `position`.

        >>> ShuffledBatches(10, batch=4, seed=0, keep_short=True).after(8)
        10
        """
        return position + self._count(position)

    def microbatches(self, position: int) -> list[list[int]]:
        """This worker's example indices in the step that begins at `position`, one list a microbatch."""
        count, num_parts = self._count(position), self.world_size * self.accumulation
        first = self.rank * self.accumulation
        bounds = [part * count // num_parts for part in range(first, first + self.accumulation + 1)]
        indices = self.stream.indices(position + bounds[0], bounds[-1] - bounds[0]).tolist()
        return [indices[low - bounds[0] : high - bounds[0]] for low, high in pairwise(bounds)]

    def pass_length(self, position: int) -> int:
        """This worker's microbatches in the whole pass to which `position` belongs."""
        done = position % self.stream.num_examples
        return (done // self.batch - (done - self.stream.num_examples) // self.batch) * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        """The microbatches from `start` to the end of its pass."""
        self.num_iterations += 1
        return self._run(self.start)

    def _run(self, position: int) -> Iterator[list[int]]:
        epoch = self.stream.epoch_of(position)
        while self.endless or self.stream.epoch_of(position) == epoch:
            yield from self.microbatches(position)
            position = self.after(position)
        self.start = position

    def __len__(self) -> int:
        """This worker's microbatches in the pass that begins at `start`, or is gone on with there."""
        if self.endless:
            raise TypeError("these batches are endless and have no length. Use endless=False to end at each epoch.")
        return self.pass_length(self.start)

    def _count(self, position: int) -> int:
        left = self.stream.num_examples - position % self.stream.num_examples
        return min(self.batch, left) if self.keep_short else self.batch

    def _check_short(self, rest: int) -> None:
        num_parts = self.world_size * self.accumulation
        if self.keep_short and 0 < rest < num_parts:
            raise ConfigError(
                f"keep_short=True would end an epoch by a batch of {rest}, too small for {self.world_size} worker(s) "
                f"of {self.accumulation} microbatch(es) to have an example in each. Use keep_short=False, which fills "
                "the batch from the next epoch, or another batch."
            )


class ShuffledLoader(DataLoader[Any]):
    """A DataLoader over one shuffle an epoch whose position is what the loop has had, not what was drawn ahead.

    An iteration gives one pass, the steps that begin in the epoch; one that was left early is gone on with by the
    next. The position moves as a step's last microbatch is handed over: save `state_dict()` after the optimizer's step.
    In the middle of a step it is the step's beginning, since gradients that were not used are not saved either.
    Random numbers for loader processes come from a generator of its own, so that neither an iteration nor a resume
    moves torch's.

    Lightning saves and loads its state with its own checkpoints (give the Trainer `use_distributed_sampler=False`).
    Leave it out of accelerate's `prepare`, whose own loader deals out once more and knows no position.

    >>> loader = ShuffledLoader(list(range(10)), batch=4, seed=0)
    >>> next(iter(loader)).shape, loader.position
    (torch.Size([4]), 4)

    Source: Goyal 2017, remark 4.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch: int,
        seed: int,
        rank: int | None = None,
        world_size: int | None = None,
        microbatch: int | None = None,
        keep_short: bool = False,
        endless: bool = False,
        **options: Any,
    ) -> None:
        """Make the loader, at the beginning of epoch 0.

        Args:
            dataset: data with a length, whose examples are fetched by index.
            batch, seed, rank, world_size, microbatch, keep_short, endless: as for ShuffledBatches.
            options: DataLoader's (num_workers, prefetch_factor, persistent_workers, collate_fn, pin_memory, ...),
                without those that choose examples.

        Raises:
            ConfigError: as ShuffledBatches; data without a length; an option that chooses or reorders examples.
        """
        if taken := [name for name in _OURS if name in options]:
            raise ConfigError(f"{taken[0]} chooses examples, which batch, seed and microbatch do here: leave it out.")
        if not options.get("in_order", True):
            raise ConfigError("in_order=False gives batches in an order of chance, which nothing can resume.")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(f"{type(dataset).__name__} has no length, so that it cannot be shuffled as a whole.")
        self._batches = ShuffledBatches(
            len(dataset), batch=batch, seed=seed, rank=rank, world_size=world_size, microbatch=microbatch,
            keep_short=keep_short, endless=endless,
        )  # fmt: skip
        self._own_generator = None if options.get("generator") else torch.Generator()
        options["generator"] = self._own_generator or options["generator"]
        super().__init__(dataset, batch_sampler=self._batches, **options)
        self._restart(0)

    @property
    def position(self) -> int:
        """Examples used so far by all workers, in whole steps: the place in the stream."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch, from 0, in which the next step begins."""
        return self._position // self._batches.stream.num_examples

    @property
    def accumulation(self) -> int:
        """Microbatches in each step of this worker."""
        return self._batches.accumulation

    def state_dict(self) -> dict[str, int]:
        """Where the loop stands; the same on every worker, and good for any number of them.

        Raises:
            ConfigError: something else iterated this loader's batch sampler, so that the position is not known.
        """
        if self._batches.num_iterations != self._num_iterations:
            raise ConfigError(
                "another loader drew from this ShuffledLoader's batch sampler (accelerate's prepare makes one), so "
                "what reached the loop is not known. Iterate the ShuffledLoader itself and leave it out of prepare."
            )
        stream = self._batches.stream
        return {"seed": stream.seed, "num_examples": stream.num_examples, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stood, whatever its numbers of workers, loader processes and microbatches.

        Args:
            state: what `state_dict` returned. The batch may be another too: the examples go on in the same order.

        Raises:
            ConfigError: the state is of other data, of another seed, or of something else.
        """
        stream = self._batches.stream
        own = {"seed": stream.seed, "num_examples": stream.num_examples}
        if set(state) != {*own, "position"}:
            raise ConfigError(f"this is no state of a ShuffledLoader, which has seed, num_examples, position: {state}.")
        for name, value in own.items():
            if state[name] != value:
                raise ConfigError(
                    f"the state is of {name}={state[name]}, this loader of {name}={value}: the examples would not go "
                    "on in the same order. Use the same data and seed, or begin without the state."
                )
        self._restart(_whole("position", state["position"]))

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore
        """The microbatches from the position to the end of its pass."""
        self._restart(self._position)
        if self._own_generator is not None:
            # Loader processes draw alike where a pass begins alike, and differently on each worker.
            shift = self._position + self._batches.rank * self._batches.batch // self._batches.world_size
            self._own_generator.manual_seed((self._batches.stream.seed + shift) % 2**64)
        found = super().__iter__()
        self._num_iterations = self._batches.num_iterations
        return self._deliver(found, self._turn)

    def __len__(self) -> int:
        """This worker's microbatches in the whole pass, also where its first part was before a resume."""
        if self._batches.endless:
            return len(self._batches)  # raises
        return self._batches.pass_length(self._begun)

    def _restart(self, position: int) -> None:
        self._batches.begin_at(position)
        self._position = self._begun = position
        self._turn = object()
        self._num_iterations = self._batches.num_iterations

    def _deliver(self, found: Iterator[Any], turn: object) -> Iterator[Any]:
        self._check_turn(turn)
        for number, microbatch in enumerate(found, start=1):
            if number % self.accumulation == 0:
                self._position = self._batches.after(self._position)
            yield microbatch
            self._check_turn(turn)
        self._begun = self._position

    def _check_turn(self, turn: object) -> None:
        if self._turn is not turn:
            raise ConfigError(
                "a newer iteration of this ShuffledLoader has begun, or a state was loaded: two would move one "
                "position. Use one iteration at a time, or make two loaders."
            )


def _whole(name: str, value: Any) -> int:
    """A whole number as Python's own, which a saved state can hold; numpy's counts as one."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is a whole number; got {value!r}.") from None


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This worker and the number of workers: as given, or the job's."""
    if rank is not None and world_size is not None:
        return _whole("rank", rank), _whole("world_size", world_size)
    if rank is not None or world_size is not None:
        raise ConfigError(f"give both rank and world_size or neither; got rank={rank}, world_size={world_size}.")
    if num_workers() > 1:
        return dist.get_rank(), num_workers()
    launched = os.environ.get("WORLD_SIZE", "1")
    started = dist.is_available() and dist.is_initialized()
    if not started and launched.isdigit() and int(launched) > 1:
        raise ConfigError(
            f"this job was launched with {launched} workers, but torch.distributed has not been started, so each would "
            "take all examples. Call init_process_group first, or give rank and world_size."
        )
    return 0, 1
