"""What do the pictures of class folders look like, made small once and kept for the next time?

Drawings of any size and shape become squares of one size on white, sides kept in proportion. Decoding thousands takes
minutes, so the outcome is kept in one file beside them, which counts as long as names, sizes and times of all pictures
are what they were.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from largebatch.errors import DataError, MissingExtraError

try:
    from PIL import Image
except ImportError as error:
    raise MissingExtraError("pillow", "vision", "reading pictures") from error

logger = logging.getLogger(__name__)

_VERSION = 1
"""Of how pixels are made: a kept file of another version is made afresh."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """Pictures of one size, no two the same."""

    images: NDArray[np.uint8]
    """Colours, shape (num_examples, 3, size, size)."""
    labels: NDArray[np.int64]
    """Places in the list of classes, shape (num_examples,)."""
    duplicates: int
    """Pictures left out because an earlier one has the same pixels."""
    unreadable: tuple[str, ...]
    """Files left out because they are no whole picture: name (why)."""


def decode_folder(folder: Path, classes: Sequence[str], *, size: int) -> Decoded:
    """Decode the pictures below each class folder, in the order of their names, or take what an earlier call kept.

    Links are passed over: they repeat under one class what lies in another. Of pictures that become the same pixels
    only the first stays. A file that is no whole picture is left out, counted and named by a warning, each time.

    Args:
        folder: holds one folder for each class; others beside them are passed over.
        classes: names of the class folders; a label is a place in it.
        size: of the squares' sides, in pixels.

    Returns:
        The pictures, class by class.

    Raises:
        DataError: a class folder is missing, or none of its files is a picture (the sentence names it).
    """
    files = [(name, label) for label, kind in enumerate(classes) for name in _names_below(folder, kind)]
    kept, mark = folder / f".pixels-{size}.npz", _mark(folder, files, size)
    found = _kept(kept, mark)
    if found is None:
        logger.info("decoding %d pictures of %s, once", len(files), folder)
        found = _decode(folder, files, size)
        _keep(kept, mark, found)
    if found.unreadable:
        more = f" and {len(found.unreadable) - 5} more" if len(found.unreadable) > 5 else ""
        logger.warning(
            "left out %d files of %s that are no whole picture: %s%s",
            len(found.unreadable), folder, ", ".join(found.unreadable[:5]), more,
        )  # fmt: skip
    if empty := [kind for label, kind in enumerate(classes) if not (found.labels == label).any()]:
        raise DataError(
            f"no picture of class {', '.join(empty)} in {folder} that can be read and is not one of another class too. "
            "Fetch the pictures again."
        )
    return found


def small_picture(path: Path, size: int) -> NDArray[np.uint8]:
    """Read a picture, put it on white and make it fit a square, in its centre.

    Args:
        path: of the file.
        size: of the square's sides, in pixels.

    Returns:
        Colours, shape (3, size, size).

    Raises:
        UnreadableError: the file is no whole picture.
    """
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path) as picture:  # about large ones, which are few
            longest = max(picture.size)
            wide, high = (max(1, round(side * size / longest)) for side in picture.size)
            # Colours weighed by their opacity, which averaging must not let transparent pixels add to.
            drawn = picture.convert("RGBA").convert("RGBa").resize((wide, high), Image.Resampling.BOX)
    except Exception as error:  # formats fail in their own ways: SyntaxError, struct.error, DecompressionBombError, ...
        raise UnreadableError(" ".join(str(error).split()).replace(str(path), "the file") or "not a picture") from error
    pixels = np.asarray(drawn, dtype=np.int16)
    square = np.full((size, size, 3), 255, dtype=np.int16)
    top, left = (size - high) // 2, (size - wide) // 2
    square[top : top + high, left : left + wide] = pixels[..., :3] + (255 - pixels[..., 3:])
    return square.clip(0, 255).astype(np.uint8).transpose(2, 0, 1)


class UnreadableError(Exception):
    """A file is no whole picture; why, in a few words."""


def _names_below(folder: Path, kind: str) -> list[str]:
    if not (folder / kind).is_dir():
        raise DataError(f"{folder} has no folder {kind}, one of its classes. Fetch the pictures again.")
    found: list[str] = []
    for base, _, files in os.walk(folder / kind):
        inside = Path(base).relative_to(folder)
        found += [
            str(inside / file) for file in files if not file.startswith(".") and not Path(base, file).is_symlink()
        ]
    return sorted(found)


def _mark(folder: Path, files: Sequence[tuple[str, int]], size: int) -> str:
    """What tells whether the pictures are still those that were decoded."""
    digest = hashlib.sha256(f"{_VERSION} {size}".encode())
    for name, label in files:
        facts = (folder / name).stat()
        digest.update(f"{os.fsencode(name)!r} {label} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _decode(folder: Path, files: Sequence[tuple[str, int]], size: int) -> Decoded:
    seen: set[bytes] = set()
    unreadable: list[str] = []
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for name, label in files:
        try:
            image = small_picture(folder / name, size)
        except UnreadableError as error:
            unreadable.append(f"{name} ({error})")
            continue
        if image.tobytes() not in seen:
            seen.add(image.tobytes())
            images.append(image)
            labels.append(label)
    return Decoded(
        images=np.stack(images) if images else np.empty((0, 3, size, size), dtype=np.uint8),
        labels=np.array(labels, dtype=np.int64),
        duplicates=len(files) - len(unreadable) - len(images), unreadable=tuple(unreadable),
    )  # fmt: skip


def _kept(path: Path, mark: str) -> Decoded | None:
    """What an earlier call kept, where it is whole and of these pictures."""
    try:
        with np.load(path, allow_pickle=False) as held:
            if str(held["mark"]) != mark:
                return None
            return Decoded(
                images=held["images"], labels=held["labels"], duplicates=int(held["duplicates"]),
                unreadable=tuple(map(str, held["unreadable"])),
            )  # fmt: skip
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _keep(path: Path, mark: str, found: Decoded) -> None:
    """Write it whole or not at all; a folder that cannot be written to only costs time."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            np.savez(
                file, mark=mark, images=found.images, labels=found.labels, duplicates=found.duplicates,
                unreadable=np.array(found.unreadable, dtype=np.str_),
            )  # fmt: skip
        partial.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s): the pictures are decoded again each time.", path, error.strerror)
        partial.unlink(missing_ok=True)
