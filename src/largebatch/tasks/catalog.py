"""Which task does a name on the command line mean?"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from largebatch.errors import ConfigError
from largebatch.tasks.task import Task


def _digits(data: Path | None) -> Task:
    from largebatch.tasks.digits import load

    return load(data)


def _fashion_mnist(data: Path | None) -> Task:
    from largebatch.tasks.fashion_mnist import load

    return load(data)


def _imagenet(data: Path | None, model: str) -> Task:
    from largebatch.tasks.imagenet import load

    return load(data, model)


def _mnist(data: Path | None) -> Task:
    from largebatch.tasks.mnist import load

    return load(data)


def _detection(data: Path | None, backbone: Path | None = None) -> Task:
    from largebatch.tasks.detection import load

    return load(data, backbone)


def _openclipart(data: Path | None) -> Task:
    from largebatch.tasks.openclipart import load

    return load(data)


def _stamps(data: Path | None, backbone: Path | None = None) -> Task:
    from largebatch.tasks.stamps import load

    return load(data, backbone)


TASKS: dict[str, tuple[str, Callable[..., Task]]] = {
    "detection": ("COCO, Mask R-CNN on a ResNet-50 with a feature pyramid: boxes and masks, days on GPUs", _detection),
    "digits": ("1,797 real digits of 8x8 pixels inside scikit-learn, a small MLP: seconds, no download", _digits),
    "fashion-mnist": ("70,000 real pictures of clothes of 28x28 pixels, a small CNN: minutes", _fashion_mnist),
    "imagenet": (
        "class folders of photographs, ResNet-50 at 224 pixels: the paper's hour",
        partial(_imagenet, model="resnet50"),
    ),
    "imagenet-resnet18": ("the same with the smaller ResNet-18", partial(_imagenet, model="resnet18")),
    "imagenet-resnet101": ("the same with the larger ResNet-101", partial(_imagenet, model="resnet101")),
    "mnist": ("real digits of 28x28 pixels, all 70,000 or 10,000 of them, a small CNN: minutes", _mnist),
    "openclipart": ("6,174 drawings in 10 classes at 32 pixels, ResNet-8: ImageNet's stand-in, minutes", _openclipart),
    "stamps": ("1,900 photographs with stamps pasted on, boxes and masks, a small Mask R-CNN: half an hour", _stamps),
}
"""Name -> (one line about it, what makes it from --data and, where it takes one, --backbone)."""

TAKE_BACKBONE = ("detection", "stamps")
"""The tasks that can start from the weights of a classification run."""


def load_task(name_or_path: str, data: Path | None = None, backbone: Path | None = None) -> Task:
    """Make the task that a name or a path to a Python file stands for.

    Args:
        name_or_path: a name in `TASKS`, or the path of a file that ends in .py.
        data: the directory of the task's files; None looks in the usual places.
        backbone: weights of a classification run to start from, for the tasks in `TAKE_BACKBONE`; None starts afresh.

    Returns:
        The task, its data in memory.

    Raises:
        ConfigError: there is no such task or file, the file defines no task, or the task takes no backbone, or
            not this one.
        DataError: a data file is missing, cut short or not what it should be.
        MissingExtraError: the task needs a package that is not installed.
    """
    if backbone is not None and name_or_path not in TAKE_BACKBONE:
        raise ConfigError(
            f"task {name_or_path!r} starts from fresh weights and takes no backbone; got backbone={backbone}. Leave it "
            f"out. Tasks that take one: {', '.join(TAKE_BACKBONE)}."
        )
    if name_or_path in TASKS:
        make = TASKS[name_or_path][1]
        return make(data) if backbone is None else make(data, backbone)
    if name_or_path.endswith(".py"):
        from largebatch.tasks.user_file import load

        return load(Path(name_or_path), data)
    near = difflib.get_close_matches(name_or_path.lower().replace("_", "-"), TASKS, n=2, cutoff=0.5)
    meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ConfigError(
        f"there is no task {name_or_path!r}.{meant} Tasks: {', '.join(sorted(TASKS))}; "
        "or give the path of a Python file that defines `task`."
    )
