"""Can a small CNN tell apart the 70,000 real pictures of clothes of Fashion-MNIST?"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from largebatch.recipe.recipe import Recipe
from largebatch.tasks.files import download, find_idx, missing, places, read_classes
from largebatch.tasks.splits import standardise
from largebatch.tasks.task import Task, TensorSplit, count_wrong, cross_entropy_sum

_NAME, _TORCHVISION_NAME = "fashion-mnist", "FashionMNIST"
_COMMANDS = [
    "scripts/fetch_data.sh fashion-mnist",
    "sudo apt-get install dataset-fashion-mnist",
    "python -c \"from torchvision.datasets import FashionMNIST; FashionMNIST('data/fashion-mnist', download=True)\"",
]


def make_model() -> nn.Module:
    """Make fresh weights: 2x2 pixels -> 4 channels, conv 16 at stride 2 -> 64 -> 10 logits, 51,482 weights.

    Folding the pixels first costs no accuracy and makes a step more than twice as fast on one thread as a
    convolution over 28x28.
    """
    return nn.Sequential(
        nn.PixelUnshuffle(2),
        nn.Conv2d(4, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def load(data: Path | None = None) -> Task:
    """Make the task from its four IDX files: 60,000 training and 10,000 held-out pictures, the official split.

    Without `data` and without files in the usual places, torchvision downloads them to ./data/fashion-mnist.

    Args:
        data: the directory that holds the files; None looks in the usual places.

    Returns:
        The task. Its recipe reaches about 90 % held-out accuracy.

    Raises:
        DataError: a file is missing, cut short or not what it should be.
    """
    directories = places(_NAME, _TORCHVISION_NAME, data)
    paths, why = find_idx(directories), ""
    if paths is None and data is None:
        why = download(_TORCHVISION_NAME, Path("data") / _NAME, lambda: find_idx(directories))
        paths = find_idx(directories) if not why else None
    if paths is None:
        raise missing(_NAME, directories, _COMMANDS, why)
    images, labels = read_classes(paths[0], paths[1], num_classes=10)
    held_out_images, held_out_labels = read_classes(paths[2], paths[3], num_classes=10)
    images, held_out_images = standardise(images, held_out_images)
    return Task(
        name=_NAME,
        train=TensorSplit((images, labels)),
        held_out=TensorSplit((held_out_images, held_out_labels)),
        model=make_model,
        loss=cross_entropy_sum,
        errors=count_wrong,
        goals=(0.42, 0.36, 0.3),
        # Goyal's 5 epochs of warmup are half of this run: 8 times the batch then lost 0.5 points, with 2 it lost 0.1.
        recipe=Recipe(reference_batch=64, reference_lr=0.02, epochs=10, warmup_epochs=2.0, decay_epochs=(7, 9)),
    )
