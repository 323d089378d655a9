"""Where on this machine are the files of a named data set?"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from largebatch.errors import DataError
from largebatch.tasks.idx import read_idx

logger = logging.getLogger(__name__)

IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""Training images and labels, held-out images and labels; each may end in .gz."""

_TIMEOUT_S = 10.0


def places(name: str, torchvision_name: str, data: Path | None) -> list[Path]:
    """The directories that may hold a data set, in the order in which they are tried.

    A directory that the user names is the only one tried. Without one: $LARGEBATCH_DATA, ./data and
    /usr/share/datasets, each with a folder called `name`.

    Args:
        name: the task's name.
        torchvision_name: what torchvision calls the data set (its files lie in NAME/raw).
        data: the directory that the user names, or None.

    Returns:
        Directories, whether or not they exist, without repeats.
    """
    if data is not None:
        return [data, data / name, data / torchvision_name / "raw"]
    bases = [Path("data"), Path("/usr/share/datasets")]
    if os.environ.get("LARGEBATCH_DATA"):
        bases.insert(0, Path(os.environ["LARGEBATCH_DATA"]))
    folders = (name, f"{name}/{torchvision_name}/raw", f"{torchvision_name}/raw")
    return list(dict.fromkeys(base / folder for base in bases for folder in folders))


def find_idx(directories: list[Path]) -> list[Path] | None:
    """The four IDX files of the first directory that has any of them, or None.

    Args:
        directories: where to look, first choice first.

    Returns:
        Paths in the order of `IDX_NAMES`; the raw file where both it and the .gz are there.

    Raises:
        DataError: a directory has some of the four, but not all.
    """
    for directory in directories:
        paths = [next((p for p in (directory / n, directory / f"{n}.gz") if p.is_file()), None) for n in IDX_NAMES]
        whole = [path for path in paths if path is not None]
        if len(whole) == len(IDX_NAMES):
            return whole
        if whole:
            missing = [name for name, path in zip(IDX_NAMES, paths, strict=True) if path is None]
            raise DataError(
                f"{directory} has {len(whole)} of 4 files; missing: {', '.join(missing)} (or with .gz). "
                "Fetch the missing ones, or delete the folder and fetch all again."
            )
    return None


def read_classes(images_path: Path, labels_path: Path, num_classes: int) -> tuple[Tensor, Tensor]:
    """Read one half of a data set from its two IDX files.

    Args:
        images_path: an IDX file of 3 dims.
        labels_path: an IDX file of 1 dim.
        num_classes: every label must be below it.

    Returns:
        Images, uint8, shape (num_examples, 1, height, width), and labels, int64, shape (num_examples,).

    Raises:
        DataError: a file is not what it should be, or the two do not fit together.
    """
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} has {len(images):,} images, but {labels_path} has {len(labels):,} labels. "
            "Fetch both again from one source."
        )
    if len(labels) and int(labels.max()) >= num_classes:
        raise DataError(f"{labels_path} has a label {int(labels.max())}; labels must be below {num_classes}.")
    return images.unsqueeze(1), labels.long()


def download(torchvision_name: str, root: Path, ready: Callable[[], Any]) -> str:
    """Ask torchvision, where it is installed, to download a data set.

    Args:
        torchvision_name: the name of the class in torchvision.datasets.
        root: the directory to download to.
        ready: says whether another process has brought the files in the meantime.

    Returns:
        '' when the files are there, else why they are not.
    """
    if importlib.util.find_spec("torchvision") is None:
        return "torchvision is not installed"
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)
    try:
        logger.info("downloading %s to %s", torchvision_name, root)
        getattr(importlib.import_module("torchvision.datasets"), torchvision_name)(str(root), download=True)
    except Exception as error:  # whatever it is, the user is told how else to get the files
        with contextlib.suppress(OSError):
            os.removedirs(root / torchvision_name / "raw")  # the folders it made, where they are still empty
        said = " ".join(str(error).split())
        return "" if ready() else f"torchvision could not download it ({type(error).__name__}: {said})"
    finally:
        socket.setdefaulttimeout(before)
    return ""


def missing(name: str, directories: list[Path], commands: list[str], why: str = "") -> DataError:
    """The error that says where a data set was looked for, and which commands fetch it."""
    looked = ", ".join(shlex.quote(str(directory.absolute())) for directory in directories)
    download_failed = f"; {why}" if why else ""
    return DataError(
        f"no files of {name} in {looked}{download_failed}. Fetch them by one of: {'; '.join(commands)}. "
        "Or give their directory with --data."
    )
