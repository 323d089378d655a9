"""Which pixels of a picture does a step see?

Training crops at random as GoogLeNet did and flips (Goyal 2017, 5.1); evaluation takes the centre of the picture
resized to 256/224 of the crop. The law of the boxes is torchvision's, and so are the pixels, at less work a picture:

- Pictures are decoded by Pillow, as by torchvision's folders, but resized by torch, on bytes: within one level of 255
  of Pillow's resize.
- A JPEG whose crop has at least 4 times the pixels a side that are needed is decoded at 1/2, 1/4 or 1/8 by its own
  cosine transform, so that at least twice are left to the resize: on photographs a mean difference of half a level,
  for no crop more than 1.5.
- Pictures travel between processes as bytes, a quarter of the numbers they become (`finish`).
"""

from __future__ import annotations

import functools
import io
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from largebatch.errors import ConfigError, DataError, MissingExtraError

try:
    from PIL import Image
except ImportError as error:
    raise MissingExtraError("pillow", "vision", "reading pictures") from error

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's training pixels, by colour, as shares of 255; what torchvision's weights were trained with."""

_AREAS, _RATIOS, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10


class Box(NamedTuple):
    """A part of a picture, in its pixels."""

    left: int
    top: int
    width: int
    height: int


def random_box(width: int, height: int, chance: random.Random) -> Box:
    """Draw a crop: 8 to 100 % of the area, 3:4 to 4:3, both uniform (the ratio's logarithm is), anywhere within.

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        chance: where the random numbers come from.

    Returns:
        The crop; after 10 that were wider or higher than the picture, the largest in its centre that is neither too
        wide nor too high.

    Source: Szegedy et al. 2015; the law of torchvision's RandomResizedCrop.
    """
    for _ in range(_TRIES):
        area = width * height * chance.uniform(*_AREAS)
        ratio = math.exp(chance.uniform(math.log(_RATIOS[0]), math.log(_RATIOS[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return Box(chance.randint(0, width - wide), chance.randint(0, height - high), wide, high)
    wide, high = width, height
    if width / height < _RATIOS[0]:
        high = round(wide / _RATIOS[0])
    elif width / height > _RATIOS[1]:
        wide = round(high * _RATIOS[1])
    return Box((width - wide) // 2, (height - high) // 2, wide, high)


def training_crop(data: bytes, size: int, draws: Tensor) -> Tensor:
    """Cut a random crop out of an encoded picture, in half of the cases mirrored.

    Args:
        data: the file's bytes.
        size: of the crop's sides, in pixels.
        draws: 8 numbers in [0, 1), which fix all that is random.

    Returns:
        The crop's colours, uint8, shape (3, size, size).

    Raises:
        UnreadableError: the bytes are no whole picture.
    """
    picture = _open(data)
    chance = random.Random(draws.to(torch.float32).numpy().tobytes())
    box, mirrored = random_box(*picture.size, chance), chance.random() < 0.5
    crop = _resized(picture, box, size, size)
    return crop.flip(-1) if mirrored else crop


def centre_crop(data: bytes, size: int) -> Tensor:
    """Cut the centre out of an encoded picture whose short side was made 256/224 of the crop's; as training_crop."""
    picture = _open(data)
    width, height = picture.size
    short = round(size * 256 / 224)
    wide, high = (short * width // min(width, height), short * height // min(width, height))
    whole = _resized(picture, Box(0, 0, width, height), wide, high)
    top, left = round((high - size) / 2), round((wide - size) / 2)
    return whole[:, top : top + size, left : left + size]


class UnreadableError(Exception):
    """The bytes are no whole picture; why, in a few words."""


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data))  # reads the header alone
    except Exception as error:  # formats fail in their own ways: SyntaxError, struct.error, ...
        raise UnreadableError("no picture of a known format" if data else "an empty file") from error


def _resized(picture: Image.Image, box: Box, wide: int, high: int) -> Tensor:
    """The box of the picture, uint8, shape (3, high, wide)."""
    less = max(part for part in (1, 2, 4, 8) if part == 1 or min(box.width / wide, box.height / high) >= 2 * part)
    try:
        if picture.format == "JPEG" and less > 1:
            picture.draft(None, (picture.width // less, picture.height // less))
            left, top, width, height = (side / less for side in box)
            place = (left, top, left + width, top + height)  # not whole pixels any more, which torch does not take
            return _colours(picture.resize((wide, high), Image.Resampling.BILINEAR, box=place))
        colours = _colours(picture)
    except Exception as error:
        raise UnreadableError(" ".join(str(error).split())) from error
    part = colours[:, box.top : box.top + box.height, box.left : box.left + box.width]
    return functional.interpolate(part[None], (high, wide), mode="bilinear", antialias=True)[0]


def _colours(picture: Image.Image) -> Tensor:
    """Of every pixel, uint8, shape (3, height, width)."""
    return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)


def normalised(images: Tensor) -> Tensor:
    """Turn bytes into numbers of mean 0 and standard deviation 1 over ImageNet, on the device they are on.

    Args:
        images: uint8, shape (num_examples, 3, height, width).

    Returns:
        float32, of the same shape: (images / 255 - MEAN) / STD, in one multiplication and one subtraction.
    """
    factor, shift = _affine(images.device)
    return images.to(torch.float32).mul_(factor).sub_(shift)


@functools.cache
def _affine(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = torch.tensor((MEAN, STD), dtype=torch.float64).reshape(2, 3, 1, 1)
    return (1 / (255 * std)).to(device, torch.float32), (mean / std).to(device, torch.float32)


Batch = tuple[Tensor, Tensor]
"""Images and labels."""


class Pictures(ABC):
    """Encoded pictures and their classes, by index: all that a split does but find them.

    A picture that is no whole one is left out of its batch, and named by `take_skipped`.
    """

    def __init__(self, size: int) -> None:
        """Cut pictures to `size` by `size` pixels (>= 1)."""
        if size < 1:
            raise ConfigError(f"a crop has sides of at least 1 pixel; got size={size}.")
        self.size = size
        self._skipped: list[tuple[str, str]] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """What a person finds the picture by."""

    @abstractmethod
    def read(self, index: int) -> tuple[bytes, int]:
        """The picture's encoded bytes and its class. Raises DataError where there is nothing to read."""

    def fetch(self, indices: Tensor) -> Batch:
        """Read pictures for evaluation: the centre of each.

        Args:
            indices: which, int64, shape (num_examples,).

        Returns:
            Images, normalised, float32, shape (n, 3, size, size), and labels, int64, shape (n,); n is smaller than
            num_examples where pictures were left out.

        Raises:
            DataError: none of the pictures is whole (the sentence names them), or there is nothing to read.
        """
        return self.finish(self._gather(indices, lambda data, _: centre_crop(data, self.size)))

    def fetch_augmented(self, indices: Tensor, draws: Tensor) -> Batch:
        """Read pictures for training: a random crop of each, as bytes, which `finish` turns into numbers.

        Args:
            indices: which, int64, shape (num_examples,).
            draws: shape (num_examples, 8), uniform in [0, 1): fixes all that is random.

        Returns:
            Images, uint8, and labels; shapes and Raises as of `fetch`.
        """
        return self._gather(indices, lambda data, row: training_crop(data, self.size, draws[row]))

    def finish(self, batch: Batch) -> Batch:
        """Normalise what `fetch_augmented` returned, on whatever device it is by now."""
        images, labels = batch
        return normalised(images), labels

    def take_skipped(self) -> list[tuple[str, str]]:
        """What was left out since the last call, as (name, why), and forget it."""
        taken, self._skipped = self._skipped, []
        return taken

    def _gather(self, indices: Tensor, crop: Callable[[bytes, int], Tensor]) -> Batch:
        images = torch.empty(len(indices), 3, self.size, self.size, dtype=torch.uint8)
        labels: list[int] = []
        for row, index in enumerate(indices.tolist()):
            data, label = self.read(index)
            try:
                images[len(labels)] = crop(data, row)
                labels.append(label)
            except UnreadableError as error:
                self._skipped.append((self.name(index), str(error)))
        if not labels:
            unreadable = self.take_skipped()[-len(indices) :]
            named = ", ".join(f"{name} ({why})" for name, why in unreadable[:5])
            more = f" and {len(unreadable) - 5} more" if len(unreadable) > 5 else ""
            raise DataError(
                f"none of the {len(indices)} pictures of a microbatch can be read: {named}{more}. Fetch them again, or "
                "delete them."
            )
        return images[: len(labels)], torch.tensor(labels)
