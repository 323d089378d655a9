"""What do splitmix64 (Steele, Lea and Flood 2014) and the shuffle built on it give, in Python's own integers?"""

from __future__ import annotations

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(state: int, number: int) -> int:
    """The number-th output (from 1) of the generator that starts at `state`."""
    z = (state + number * GAMMA) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key(seed: int, purpose: int, epoch: int, index: int) -> int:
    """The index-th output of the epoch-th generator of the purpose-th generator of the seed."""
    return splitmix64(splitmix64(splitmix64(seed, purpose), epoch + 1), index + 1)


def permutation(num_examples: int, seed: int, epoch: int) -> list[int]:
    """The order of one epoch: examples sorted by their key (purpose 1)."""
    return sorted(range(num_examples), key=lambda index: key(seed, 1, epoch, index))


def draw(seed: int, epoch: int, index: int, number: int) -> float:
    """The number-th (from 0) random number of one example in one epoch (purpose 2)."""
    return (splitmix64(key(seed, 2, epoch, index), number + 1) >> 40) / 2**24


def stream(num_examples: int, seed: int, start: int, count: int) -> list[int]:
    """What stands at positions start to start + count of epoch 0's permutation, then epoch 1's, and so on."""
    whole: list[int] = []
    first = start // num_examples
    while len(whole) < start - first * num_examples + count:
        whole += permutation(num_examples, seed, first + len(whole) // num_examples)
    return whole[start - first * num_examples :][:count]


def step_sizes(num_examples: int, batch: int, start: int, keep_short: bool) -> list[int]:
    """How many examples the steps of one pass have, counted one example at a time.

    A pass is the steps that begin in the epoch of `start`. A step is full at `batch` examples, or, with keep_short,
    at the end of the epoch.
    """
    sizes, size, position = [], 0, start
    epoch = start // num_examples
    while position // num_examples == epoch or size:
        position, size = position + 1, size + 1
        if size == batch or (keep_short and position % num_examples == 0):
            sizes.append(size)
            size = 0
    return sizes
