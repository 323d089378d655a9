"""What are the gradients of a mean loss and of an average of averages, in float64 numpy, in closed form?

The model is a row of weights for each class of a token: logits = x W, loss = cross-entropy of the softmax (a language
model's last layer). Sequences are padded, a target of PAD is no unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PAD = -100
Array = NDArray[np.float64]


def tokens(num_sequences: int, length: int, dim: int, classes: int, seed: int) -> tuple[Array, NDArray[np.int64]]:
    """Inputs (sequences, length, dim) and targets (sequences, length), each sequence padded after its own length.

    Lengths go from 1 to `length`, so that equal numbers of sequences are unequal numbers of tokens.
    """
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((num_sequences, length, dim))
    targets = rng.integers(0, classes, (num_sequences, length))
    lengths = rng.integers(1, length + 1, num_sequences)
    targets[np.arange(length) >= lengths[:, np.newaxis]] = PAD
    return inputs, targets


def summed_gradient(weights: Array, inputs: Array, targets: NDArray[np.int64]) -> tuple[Array, int]:
    """The sum over tokens that are no padding of d loss / d weights = x (softmax(x W) - onehot)^T, and their number."""
    kept = targets.reshape(-1) != PAD
    x, y = inputs.reshape(-1, inputs.shape[-1])[kept], targets.reshape(-1)[kept]
    logits = x @ weights
    soft = np.exp(logits - logits.max(axis=1, keepdims=True))
    soft /= soft.sum(axis=1, keepdims=True)
    soft[np.arange(len(y)), y] -= 1
    return x.T @ soft, len(y)


def mean_gradient(weights: Array, inputs: Array, targets: NDArray[np.int64]) -> Array:
    """Goyal 2017, sec. 3, gradient aggregation: (1/kn) times the sum over all kn units."""
    total, count = summed_gradient(weights, inputs, targets)
    return total / count


def average_of_averages(
    weights: Array, inputs: Array, targets: NDArray[np.int64], parts: Sequence[NDArray[np.int64]]
) -> Array:
    """What k workers get that divide by their own n_j and then average: (1/k) sum_j (1/n_j) sum_{x in B_j} grad."""
    own = [summed_gradient(weights, inputs[part], targets[part]) for part in parts]
    return sum(total / count for total, count in own) / len(parts)


def gap(weights: Array, inputs: Array, targets: NDArray[np.int64], parts: Sequence[NDArray[np.int64]]) -> Array:
    """By how much that is off: sum_j (1/k - n_j/kn) times the mean gradient of part j; 0 where all n_j are equal."""
    own = [summed_gradient(weights, inputs[part], targets[part]) for part in parts]
    whole = sum(count for _, count in own)
    return sum((1 / len(parts) - count / whole) * (total / count) for total, count in own)
