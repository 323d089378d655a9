"""Which examples are held out, where a data set has no official split?"""

from __future__ import annotations

import torch
from torch import Tensor


def every_fifth(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Split one in five of every class off, by a rule without random numbers, so that it never changes.

    Examples are ordered by class (ties keep the order of the file); positions 0, 5, 10, ... are held out.

    Args:
        labels: classes, shape (num_examples,), integers.

    Returns:
        Indices of the training examples and of the held-out ones, each ascending and int64.
    """
    by_class = torch.argsort(labels, stable=True)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[by_class[::5]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


def standardise(train: Tensor, held_out: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale both by the mean and the standard deviation of all training values.

    Args:
        train: inputs, shape (num_examples, ...), any dtype.
        held_out: inputs, shape (num_held_out, ...), any dtype; they have no part in the two numbers.

    Returns:
        Both as float32; the training values have mean 0 and standard deviation 1.
    """
    train, held_out = train.to(torch.float32), held_out.to(torch.float32)
    std, mean = torch.std_mean(train, correction=0)
    return (train - mean) / std, (held_out - mean) / std
