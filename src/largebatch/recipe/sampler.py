"""Which examples go into this step, on this worker?

Epoch e is one permutation of the data, fixed by (seed, e). The epochs' permutations, one after the other, make an
endless stream, and the batches are cut from it: the batch stays constant, nothing is padded or dropped, and an epoch
may be 156.39 steps. The position in the stream is the whole state: `step * batch` resumes it. (A batch that runs from
one epoch into the next may hold an example of each twice; within an epoch it cannot.)

Every draw is counter-based: a hash (splitmix64) of (seed, epoch, index), so that it depends neither on the order of
calls, nor on the number of workers, nor on the version of a random generator.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from largebatch.errors import ConfigError

_STEP, _FACTOR_1, _FACTOR_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's
_MASK = 2**64 - 1
_GAMMA, _MIX_1, _MIX_2 = np.uint64(_STEP), np.uint64(_FACTOR_1), np.uint64(_FACTOR_2)
_SHUFFLE, _DRAW, _FORWARD = 1, 2, 3  # what the hash is for, so that the uses do not share numbers


class ShuffledStream:
    """The endless stream of example indices: epoch 0's permutation, then epoch 1's, and so on.

    >>> stream = ShuffledStream(5, seed=0)
    >>> sorted(stream.indices(0, 5).tolist())
    [0, 1, 2, 3, 4]

    Source: Goyal 2017, remark 4: one shuffle an epoch, dealt out to the workers.
    """

    def __init__(self, num_examples: int, seed: int) -> None:
        """Make the stream over `num_examples` (>= 1) examples; `seed` is in 0 to 2^64 - 1."""
        if num_examples < 1:
            raise ConfigError(f"there is nothing to shuffle: num_examples is {num_examples}.")
        self.num_examples = num_examples
        self.seed = _check_seed(seed)
        self._permutations: dict[int, NDArray[np.int64]] = {}  # the last 2: a batch touches no more

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The example indices at positions start to start + count of the stream.

        Args:
            start: position, >= 0: `step * batch` for a step's first example.
            count: 0 to `num_examples`, so that no batch holds an example of one epoch twice.

        Returns:
            Indices into the data, int64, shape (count,), each in 0 to num_examples - 1.

        Raises:
            ConfigError: `count` is larger than the data, or a number is negative.
        """
        self._check(start, count)
        first, offset = divmod(start, self.num_examples)
        head = self._permutation(first)[offset : offset + count]
        if len(head) == count:
            return head.copy()
        return np.concatenate((head, self._permutation(first + 1)[: count - len(head)]))

    def epoch_of(self, start: int) -> int:
        """The epoch, from 0, to which position `start` (>= 0) of the stream belongs."""
        self._check(start, 0)
        return start // self.num_examples

    def epochs(self, start: int, count: int) -> NDArray[np.int64]:
        """The epoch of each of the positions start to start + count; int64, shape (count,); Raises as `indices`."""
        self._check(start, count)
        return np.arange(start, start + count, dtype=np.int64) // self.num_examples

    def _check(self, start: int, count: int) -> None:
        if start < 0 or count < 0:
            raise ConfigError(f"positions in the stream start at 0; got start={start}, count={count}.")
        if count > self.num_examples:
            raise ConfigError(
                f"a batch of {count} is larger than the data, which has {self.num_examples} examples: it would hold "
                f"examples twice. Use a batch of at most {self.num_examples}."
            )

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            keys = _hash(self.seed, _SHUFFLE, np.uint64(epoch), np.arange(self.num_examples, dtype=np.uint64))
            permutation = np.argsort(keys, kind="stable")
            while len(self._permutations) >= 2:
                del self._permutations[next(iter(self._permutations))]
            self._permutations[epoch] = permutation
        return self._permutations[epoch]


def rank_slice(start: int, batch: int, rank: int, world_size: int) -> tuple[int, int]:
    """The part of a global batch that one worker takes.

    The global batch is the same for any world size; worker r takes the r-th of `world_size` equal runs of it.

    Args:
        start: position of the global batch in the stream, >= 0.
        batch: units in the global batch, a multiple of `world_size`.
        rank: this worker, 0 to world_size - 1.
        world_size: number of workers, >= 1.

    Returns:
        (start, count) of the worker's part, to be given to `ShuffledStream.indices`.

    Raises:
        ConfigError: `world_size` does not divide `batch` (the sentence names the nearest batches it does divide), or
            there is no such worker.

    >>> [rank_slice(512, 256, rank, 2) for rank in (0, 1)]
    [(512, 128), (640, 128)]

    Source: Goyal 2017, remark 4.
    """
    _check_worker(rank, world_size)
    if batch < 1:
        raise ConfigError(f"a batch has at least 1 example; got {batch}.")
    local_batch, rest = divmod(batch, world_size)
    if rest:
        nearest = [str(parts * world_size) for parts in (local_batch, local_batch + 1) if parts]
        raise ConfigError(
            f"a batch of {batch} cannot be dealt out evenly to {world_size} workers. "
            f"The nearest that can: {' or '.join(nearest)}."
        )
    return start + rank * local_batch, local_batch


def eval_share(num_examples: int, rank: int, world_size: int) -> range:
    """The examples that one worker evaluates: each of the data on exactly one worker, none twice.

    Give it to a DataLoader as `sampler`. Shares differ by one example at most, so workers may have unequal numbers of
    batches, or none: add up sums and counts over the workers after the loop, never means, and no collective within it.

    Args:
        num_examples: examples in the data, >= 0.
        rank: this worker, 0 to world_size - 1.
        world_size: number of workers, >= 1.

    Returns:
        Indices into the data, every `world_size`-th from `rank`.

    Raises:
        ConfigError: there is no such worker, or a negative number of examples.

    >>> [list(eval_share(7, rank, 3)) for rank in range(3)]
    [[0, 3, 6], [1, 4], [2, 5]]

    Source: torch's DistributedSampler pads by repeating examples instead, which counts them twice.
    """
    _check_worker(rank, world_size)
    if num_examples < 0:
        raise ConfigError(f"there is no data of {num_examples} examples to evaluate.")
    return range(rank, num_examples, world_size)


def draws(
    seed: int, epoch_of_each: int | NDArray[np.integer], indices: NDArray[np.integer], num: int = 8
) -> NDArray[np.float64]:
    """Random numbers for augmentation, fixed by (seed, epoch, index) alone.

    Args:
        seed: 0 to 2^64 - 1.
        epoch_of_each: the epoch of each example, >= 0, shape (num_examples,), or one for all.
        indices: the examples, >= 0, shape (num_examples,).
        num: how many numbers each example gets.

    Returns:
        Uniform in [0, 1), float64, shape (num_examples, num); multiples of 2^-24, so that float32 holds them exactly
        and none becomes 1.

    Raises:
        ConfigError: the seed is out of range.

    >>> draws(0, 3, np.array([7, 8]), num=2).shape
    (2, 2)

    Source: splitmix64 (Steele, Lea and Flood 2014), used as a hash.
    """
    epochs = np.asarray(epoch_of_each).astype(np.uint64)
    keys = _hash(_check_seed(seed), _DRAW, epochs, np.asarray(indices).astype(np.uint64))
    counters = np.arange(1, num + 1, dtype=np.uint64)
    bits = _mix(keys[:, np.newaxis] + counters * _GAMMA)
    return (bits >> np.uint64(40)).astype(np.float64) * 2.0**-24


def forward_seed(seed: int, position: int) -> int:
    """The seed of what a model draws in the forward of the microbatch that begins at `position` of the stream.

    Dropout and sampled regions then depend neither on the number of workers nor on what was drawn before: a run that
    goes on, also on other workers, draws what it would have drawn.

    Args:
        seed: of the run, 0 to 2^64 - 1.
        position: of the microbatch's first example in the stream, >= 0.

    Returns:
        A whole number from 0 to 2^63 - 1, as torch's generators take it.

    Raises:
        ConfigError: the seed is out of range.

    >>> forward_seed(0, 64) == forward_seed(0, 64) != forward_seed(0, 128)
    True

    Source: splitmix64 (Steele, Lea and Flood 2014), used as a hash.
    """
    # `_hash` of one index in Python's own numbers: every microbatch needs one, and arrays cost ten times as much.
    key = _mix_one(_check_seed(seed) + _FORWARD * _STEP)
    key = _mix_one(key + _STEP)
    return _mix_one(key + (position + 1) * _STEP) >> 1


def _hash(
    seed: int, purpose: int, epochs: np.uint64 | NDArray[np.uint64], indices: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    # Each of seed, purpose, epoch and index moves the state by that many increments before it is mixed.
    with np.errstate(over="ignore"):  # arithmetic is meant to wrap at 2^64
        key = _mix(np.array([seed], dtype=np.uint64) + np.uint64(purpose) * _GAMMA)
        key = _mix(key + (epochs + np.uint64(1)) * _GAMMA)
        return _mix(key + (indices + np.uint64(1)) * _GAMMA)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


def _mix_one(bits: int) -> int:
    bits &= _MASK
    bits = ((bits ^ (bits >> 30)) * _FACTOR_1) & _MASK
    bits = ((bits ^ (bits >> 27)) * _FACTOR_2) & _MASK
    return bits ^ (bits >> 31)


def _check_worker(rank: int, world_size: int) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"there is no worker {rank} among {world_size}: rank is 0 to world_size - 1.")


def _check_seed(seed: int) -> int:
    if not 0 <= seed < 2**64:
        raise ConfigError(f"a seed is a whole number from 0 to 2^64 - 1; got {seed}.")
    return seed
