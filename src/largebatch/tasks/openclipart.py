"""Can a small residual net tell what a drawing is of? A stand-in for ImageNet, under its own name.

6,174 drawings of the Open Clip Art Library in 10 folders, which are their classes, very uneven: from 123 tools to 1,797
things around computers. What is left out, of those that become the same pixels all but the first, is said by
`decoded.decode_folder`. One in five of every class is held out.

As in the paper a forward holds 32 pictures, over which batch norm takes its statistics, whatever the batch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from largebatch.errors import DataError
from largebatch.recipe.initial import init_classifier, zero_last_gammas
from largebatch.recipe.recipe import Recipe
from largebatch.tasks.decoded import decode_folder
from largebatch.tasks.files import missing, places
from largebatch.tasks.splits import every_fifth, standardise
from largebatch.tasks.task import Task, TensorSplit, count_wrong, cross_entropy_sum

NAME = "openclipart"
CLASSES = (
    "animals", "computer", "food", "geography", "people", "recreation", "shapes", "signs_and_symbols", "tools",
    "transportation",
)  # fmt: skip
"""The ten largest folders whose name says what is drawn."""
SIZE = 32
"""Of the pictures' sides, in pixels."""
BATCHNORM_N = 32
"""Pictures in one forward."""
_WIDTHS = (16, 32, 64)
_SHIFT = 4
"""Pixels by which a training picture is moved at most, to each side."""
_COMMANDS = ["scripts/fetch_data.sh openclipart", "sudo apt-get install openclipart-png"]
_INSTALLED = Path("/usr/share/openclipart/png")


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, given: Tensor) -> Tensor:
        """Shape (num_examples, before, height, width) -> (num_examples, after, height / stride, width / stride)."""
        hidden = functional.relu(self.norm1(self.conv1(given)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(given))


class ResNet(nn.Module):
    """A residual net of three widths for pictures of 32 x 32: 6 * blocks + 2 layers with weights.

    Source: He et al. 2015, sec. 4.2.
    """

    def __init__(self, *, blocks: int, num_classes: int) -> None:
        """Make fresh weights.

        Args:
            blocks: at each width, >= 1; 1 is ResNet-8, 3 is ResNet-20.
            num_classes: logits that come out.
        """
        super().__init__()
        self.stem = nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(_WIDTHS[0])
        made: list[nn.Module] = []
        before = _WIDTHS[0]
        for width in _WIDTHS:
            for _ in range(blocks):
                made.append(Block(before, width, stride=1 if width == before else 2))
                before = width
        self.blocks = nn.Sequential(*made)
        self.head = nn.Linear(before, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, given: Tensor) -> Tensor:
        """Logits, shape (num_examples, num_classes), of pictures of shape (num_examples, 3, 32, 32)."""
        hidden = functional.relu(self.norm(self.stem(given)))
        return self.head(self.blocks(hidden).mean((2, 3)))


def make_model() -> nn.Module:
    """Make a fresh ResNet-8, 78,042 weights: gamma 0 at the end of each block, N(0, 0.01^2) for the classifier.

    >>> sum(weights.numel() for weights in make_model().parameters())
    78042
    """
    net = ResNet(blocks=1, num_classes=len(CLASSES))
    zero_last_gammas(net)
    init_classifier(net, name="head")
    return net


def augment(batch: tuple[Tensor, Tensor], draws: Tensor) -> tuple[Tensor, Tensor]:
    """Move each picture by up to 4 pixels to each side, what comes in being its own border, and mirror one in two.

    Args:
        batch: images, shape (num_examples, 3, 32, 32), and labels.
        draws: shape (num_examples, 8), uniform in [0, 1).

    Returns:
        Images of the same shape, and the labels as they are.
    """
    images, labels = batch
    size = images.shape[-1]
    padded = functional.pad(images, (_SHIFT,) * 4, mode="replicate")
    top, left = (draws[:, :2] * (2 * _SHIFT + 1)).long().unbind(1)
    along = torch.arange(size, device=images.device)
    rows, columns = top[:, None] + along, left[:, None] + along
    columns = torch.where(draws[:, 2:3] < 0.5, columns.flip(1), columns)
    each = torch.arange(len(images), device=images.device)[:, None, None]
    # Indices beside a slice put the slice's dim last.
    return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous(), labels


def load(data: Path | None = None) -> Task:
    """Make the task from the folders of Debian's openclipart-png.

    The first call decodes the pictures, one or two minutes, and keeps them in a file in the folder.

    Args:
        data: the folder with a folder for each class; None looks in the usual places and where Debian puts them.

    Returns:
        The task, its pictures in memory.

    Raises:
        DataError: the folder is missing or lacks a class.
        MissingExtraError: Pillow is not installed.
    """
    tried = places(NAME, "", data) + ([_INSTALLED] if data is None else [])
    folder = next((each for each in tried if any((each / name).is_dir() for name in CLASSES)), None)
    if folder is None:
        raise missing(NAME, tried, _COMMANDS)
    decoded = decode_folder(folder, CLASSES, size=SIZE)
    images, labels = torch.from_numpy(decoded.images), torch.from_numpy(decoded.labels)
    chosen, others = every_fifth(labels)
    if len(chosen) < 2 * BATCHNORM_N:
        raise DataError(
            f"{folder} has {len(labels)} different pictures in all, too few to train on and to hold some out: at least "
            f"{3 * BATCHNORM_N} are needed. Fetch them again: {_COMMANDS[0]}"
        )
    inputs, held_out = standardise(images[chosen], images[others])
    return Task(
        name=NAME,
        train=TensorSplit((inputs, labels[chosen])),
        held_out=TensorSplit((held_out, labels[others])),
        model=make_model,
        loss=cross_entropy_sum,
        errors=count_wrong,
        augment=augment,
        recipe=Recipe(
            reference_batch=64, reference_lr=0.1, epochs=30, warmup_epochs=1.0, decay_epochs=(18.0, 26.0),
            weight_decay=1e-4, batchnorm_n=BATCHNORM_N,
        ),
        max_microbatch=1024,
        microbatch=BATCHNORM_N,
    )  # fmt: skip
