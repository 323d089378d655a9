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
