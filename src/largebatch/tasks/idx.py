"""What does an IDX file (the format of MNIST and its kin) hold?"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from largebatch.errors import DataError

_UNSIGNED_BYTE = 0x08
_CHUNK = 1 << 20
_AGAIN = "Delete it and fetch it again."


def read_idx(path: Path, num_dims: int) -> Tensor:
    """Read one IDX file of unsigned bytes, raw or gzipped (told by its first two bytes, not by its name).

    Args:
        path: the file.
        num_dims: how many dims its array must have: 3 for images, 1 for labels.

    Returns:
        uint8, with the shape that the file's header states.

    Raises:
        DataError: the file cannot be read, is no IDX file of unsigned bytes, has another number of dims, or
            has more or fewer bytes than its header says (both sizes are named).
    """
    content, damage = _read_bytes(path)
    if len(content) < 4:
        raise DataError(f"{path} is cut short{damage}: its header has 4 bytes or more, it has {len(content)}. {_AGAIN}")
    if content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise DataError(
            f"{path} is not an IDX file of unsigned bytes: it starts with 0x{content[:4].hex()}, "
            f"not 0x000008{num_dims:02x}. Give the original file."
        )
    if content[3] != num_dims:
        raise DataError(
            f"{path} holds an array of {content[3]} dims, but {num_dims} are needed "
            f"(0x{content[:4].hex()} instead of 0x000008{num_dims:02x}). Were images and labels swapped?"
        )
    start = 4 + 4 * num_dims
    if len(content) < start:
        raise DataError(f"{path} is cut short{damage}: its header has {start} bytes, it has {len(content)}. {_AGAIN}")
    shape = [int.from_bytes(content[4 * dim + 4 : 4 * dim + 8], "big") for dim in range(num_dims)]
    expected = start + math.prod(shape)
    if len(content) != expected:
        what = "cut short" if len(content) < expected else "too long"
        raise DataError(
            f"{path} is {what}{damage}: its header says {' x '.join(map(str, shape))}, which is {expected:,} bytes "
            f"when unpacked, but it holds {len(content):,}. {_AGAIN}"
        )
    if damage:
        raise DataError(f"{path} is damaged{damage}. {_AGAIN}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def _read_bytes(path: Path) -> tuple[bytes, str]:
    """The unpacked bytes, as far as they go, and what is wrong with the packing ('' when nothing)."""
    try:
        with path.open("rb") as file:
            if file.read(2) != b"\x1f\x8b":
                file.seek(0)
                return file.read(), ""
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Correct the path or its permissions.") from error
    parts = []
    try:
        with gzip.open(path) as file:
            while part := file.read(_CHUNK):
                parts.append(part)
    except EOFError:
        return b"".join(parts), " (its gzip stream ends early)"
    except (OSError, zlib.error) as error:
        return b"".join(parts), f" (gzip: {error})"
    return b"".join(parts), ""
