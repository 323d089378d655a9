"""Can a small network read scikit-learn's 1,797 real handwritten digits?"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from largebatch.errors import ConfigError, MissingExtraError
from largebatch.recipe.recipe import Recipe
from largebatch.tasks.splits import every_fifth, standardise
from largebatch.tasks.task import Task, TensorSplit, count_wrong, cross_entropy_sum


def make_model() -> nn.Module:
    """Make fresh weights: 64 pixels -> 64 -> 10 logits, 4,810 weights."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def load(data: Path | None = None) -> Task:
    """Make the task: 1,437 training and 360 held-out digits of 8x8 pixels, one in five of every class held out.

    Args:
        data: must be None; the digits are inside scikit-learn.

    Returns:
        The task. Its recipe reaches about 98 % held-out accuracy.

    Raises:
        ConfigError: `data` was given.
        MissingExtraError: scikit-learn is not installed.
    """
    if data is not None:
        raise ConfigError(
            f"task 'digits' is inside scikit-learn and reads no files; got data={data}. Leave --data out."
        )
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "study", "task 'digits'") from error
    pixels, classes = load_digits(return_X_y=True)
    inputs, labels = torch.from_numpy(pixels), torch.from_numpy(classes).to(torch.int64)
    train, held_out = every_fifth(labels)
    train_inputs, held_out_inputs = standardise(inputs[train], inputs[held_out])
    return Task(
        name="digits",
        train=TensorSplit((train_inputs, labels[train])),
        held_out=TensorSplit((held_out_inputs, labels[held_out])),
        model=make_model,
        loss=cross_entropy_sum,
        errors=count_wrong,
        recipe=Recipe(
            reference_batch=4,
            reference_lr=0.05,
            epochs=10,
            warmup_epochs=3.0,
            decay_epochs=(6, 8),
            momentum=0.0,
            nesterov=False,
        ),
        goals=(0.13, 0.09, 0.03),
    )
