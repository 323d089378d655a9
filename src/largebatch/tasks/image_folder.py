"""Which pictures are in a folder of class folders?

DIR/train/CLASS/NAME.jpg    the layout of torchvision's ImageFolder: pictures anywhere below their class
DIR/val/CLASS/NAME.jpg
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from largebatch.errors import DataError
from largebatch.tasks.pictures import Pictures

logger = logging.getLogger(__name__)

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Of the names of pictures, in any case of letters; torchvision's list."""

_EXPECTED = "Expected: {data}/train/CLASS/*.jpg and {data}/val/CLASS/*.jpg, the same classes in both"


class ImageFolder(Pictures):
    """The pictures below a folder, one folder a class, in the order of their names: a split of a task.

    The index is made once, and is one array: processes that are forked share it, and no file is opened for it.
    """

    def __init__(self, folder: Path, *, size: int = 224) -> None:
        """List the folder.

        Args:
            folder: holds one folder for each class; hidden files and folders are passed over.
            size: of the crops' sides, in pixels.

        Raises:
            DataError: there is no such folder, no class in it, or no picture in a class (the sentence names it).
            ConfigError: a size below 1.
        """
        super().__init__(size)
        self.folder = folder
        self.classes: tuple[str, ...] = _class_folders(folder)
        """Their names, sorted; a label is a place in it."""
        names: list[bytes] = []
        counts: list[int] = []
        others: list[str] = []
        for name in self.classes:
            pictures, rest = _pictures_below(folder / name)
            names += pictures
            counts.append(len(pictures))
            others += [f"{name}/{other}" for other in rest]
        if empty := [name for name, count in zip(self.classes, counts, strict=True) if not count]:
            more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
            raise DataError(
                f"no picture in class {', '.join(empty[:5])}{more} of {folder} ({', '.join(ENDINGS)}). Fetch the "
                "pictures again, or delete the folder, here and in the other half of the data."
            )
        if others:
            logger.warning(
                "%d files of %s are no pictures by their names and left out: %s%s",
                len(others), folder, ", ".join(others[:3]), ", ..." if len(others) > 3 else "",
            )  # fmt: skip
        self._names = np.array(names)  # fixed-width bytes
        self._labels = np.repeat(np.arange(len(counts)), counts)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """Class folder and file of the picture at `index`."""
        return f"{self.classes[self._labels[index]]}/{os.fsdecode(self._names[index])}"

    def read(self, index: int) -> tuple[bytes, int]:
        """The bytes of the picture at `index` and its class.

        Raises:
            DataError: the file is no longer there or cannot be read.
        """
        path = self.folder / self.name(index)
        try:
            return path.read_bytes(), int(self._labels[index])
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}. It was there when the folder was listed: fetch it again, or "
                "run the same command again without it."
            ) from error


def image_folders(data: Path, *, size: int = 224) -> tuple[ImageFolder, ImageFolder]:
    """List `data/train` and `data/val`.

    Args:
        data: the folder of both.
        size: of the crops' sides, in pixels.

    Returns:
        Training and held-out pictures; a label means the same class in both.

    Raises:
        DataError: a folder is missing or empty, or the two have not the same classes.
        ConfigError: a size below 1.
    """
    expected = _EXPECTED.format(data=data)
    if not data.is_dir():
        raise DataError(f"{data} {'is a file, not a folder' if data.exists() else 'does not exist'}. {expected}.")
    if missing := [half for half in ("train", "val") if not (data / half).is_dir()]:
        raise DataError(f"{data} has no folder {' and no folder '.join(missing)}. {expected}.")
    train, held_out = (ImageFolder(data / half, size=size) for half in ("train", "val"))
    ours, theirs = set(train.classes), set(held_out.classes)
    if ours != theirs:
        parts = [
            f"only in {half}: {', '.join(sorted(extra)[:5])}{', ...' if len(extra) > 5 else ''}"
            for half, extra in (("train", ours - theirs), ("val", theirs - ours))
            if extra
        ]
        raise DataError(
            f"the classes of {data}/train ({len(ours)}) and {data}/val ({len(theirs)}) differ; {'; '.join(parts)}. "
            "Every class needs pictures in both."
        )
    return train, held_out


def _class_folders(folder: Path) -> tuple[str, ...]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}. Give a folder of class folders.") from error
    if not found:
        raise DataError(f"{folder} has no class folders. Expected: {folder}/CLASS/*.jpg.")
    return tuple(found)


def _pictures_below(folder: Path) -> tuple[list[bytes], list[str]]:
    """Paths below `folder`, sorted, of pictures and of other files."""
    pictures: list[str] = []
    others: list[str] = []
    for base, _, files in os.walk(folder, followlinks=True):
        inside = os.path.relpath(base, folder)
        for file in files:
            if not file.startswith("."):
                path = file if inside == "." else f"{inside}/{file}"
                (pictures if file.lower().endswith(ENDINGS) else others).append(path)
    return [os.fsencode(path) for path in sorted(pictures)], sorted(others)
