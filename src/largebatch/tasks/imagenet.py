"""Can a ResNet tell apart the 1,000 classes of ImageNet, by the recipe that trained it in one hour?

Batch norm's n is part of the loss (Goyal 2017, sec. 2.3), and so is held here: a forward sees 32 pictures, whatever the
batch and the number of workers; a worker with more goes through them 32 at a time. (One that has fewer, at a batch of
less than 32 a worker, can only normalise over those: `largebatch train` says so.)
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from largebatch.errors import ConfigError, DataError, MissingExtraError
from largebatch.recipe.initial import init_classifier, zero_last_gammas
from largebatch.recipe.recipes import goyal2017_resnet50
from largebatch.tasks.files import places
from largebatch.tasks.image_folder import image_folders
from largebatch.tasks.task import Task, count_wrong, cross_entropy_sum

try:
    import torchvision.models as zoo
except ImportError as error:
    raise MissingExtraError("torchvision", "vision", "the networks of the task imagenet") from error

NAME = "imagenet"
MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": zoo.resnet18, "resnet34": zoo.resnet34, "resnet50": zoo.resnet50, "resnet101": zoo.resnet101,
    "resnet152": zoo.resnet152,
}  # fmt: skip
"""Residual nets by name. torchvision's bottlenecks stride in their 3x3, as the paper's."""
BATCHNORM_N = 32
"""Pictures in one forward: what each GPU of the paper's baseline had."""
_MAX_LOADERS = 8
_WHERE = "https://image-net.org/download (ILSVRC2012, unpacked: one folder a class below train and below val)"


def load(data: Path | None = None, model: str = "resnet50", *, size: int = 224) -> Task:
    """Make the task from two folders of class folders: DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg.

    The number of classes is that of the folders, so that any pictures in this layout can be trained on. A picture that
    is no whole one is left out of its batch, counted and named.

    Args:
        data: holds `train` and `val`; None looks in ./data/imagenet and the usual places.
        model: one of `MODELS`.
        size: of the crops' sides, in pixels, >= 1.

    Returns:
        The task, with the recipe of the paper: 90 epochs, reference batch 256 at 0.1, batch norm over 32, no decay on
        norm layers, gamma 0 on the last norm of each block, the classifier drawn from N(0, 0.01^2).

    Raises:
        ConfigError: there is no such model, or the size is below 1.
        DataError: a folder is missing or empty, or the two have not the same classes.

    Source: Goyal 2017, sec. 5.1.
    """
    if model not in MODELS:
        near = difflib.get_close_matches(str(model).lower().replace("-", "").replace("_", ""), MODELS, n=1, cutoff=0.5)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no model {model!r}.{meant} Models: {', '.join(MODELS)}.")
    train, held_out = image_folders(_directory(data), size=size)
    return Task(
        name=NAME if model == "resnet50" else f"{NAME}-{model}",
        train=train,
        held_out=held_out,
        model=lambda: make_model(model, len(train.classes)),
        loss=cross_entropy_sum,
        errors=count_wrong,
        recipe=goyal2017_resnet50(),
        max_microbatch=256,
        microbatch=BATCHNORM_N,
        loaders=default_loaders(),
    )


def make_model(model: str, num_classes: int) -> nn.Module:
    """Make fresh weights: He 2015 for convolutions, gamma 0 at the end of each block, N(0, 0.01^2) for the classifier.

    >>> net = make_model("resnet18", 10)
    >>> float(net.layer1[0].bn2.weight.sum()), float(net.layer1[0].bn1.weight.mean())
    (0.0, 1.0)
    """
    net: Any = MODELS[model](weights=None, num_classes=num_classes)
    zero_last_gammas(net)
    init_classifier(net, name="fc")
    return net


def default_loaders() -> int:
    """Processes that fetch ahead for each of this machine's workers: the cores shared out, at most 8."""
    workers_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_LOADERS, cores // workers_here)


def _directory(data: Path | None) -> Path:
    if data is not None:
        return data
    tried = places(NAME, "", None)
    for directory in tried:
        if (directory / "train").is_dir():
            return directory
    raise DataError(
        f"no pictures of {NAME} in {', '.join(map(str, tried))}. Give --data DIR with DIR/train/CLASS/*.jpg and "
        f"DIR/val/CLASS/*.jpg. ImageNet itself: {_WHERE}."
    )
