"""What does an IDX file (the format of MNIST and its kin) hold?"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from largebatch.errors import DataError

_UNSIGNED_BYTE = 0x08
_GZIP_MAGIC = b"\x1f\x8b"
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
    content, torn = _read_bytes(path)
    if len(content) < 4:
        raise DataError(f"{path} is cut short{torn}: its header has 4 bytes or more, it has {len(content)}. {_AGAIN}")
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
        raise DataError(f"{path} is cut short{torn}: its header has {start} bytes, it has {len(content)}. {_AGAIN}")
    shape = [int.from_bytes(content[4 * dim + 4 : 4 * dim + 8], "big") for dim in range(num_dims)]
    expected = start + math.prod(shape)
    if len(content) != expected:
        what = "cut short" if len(content) < expected else "too long"
        raise DataError(
            f"{path} is {what}{torn}: its header says {' x '.join(map(str, shape))}, which is {expected:,} bytes "
            f"when unpacked, but it holds {len(content):,}. {_AGAIN}"
        )
    if torn:
        raise DataError(f"{path} is cut short{torn}: its checksum is missing. {_AGAIN}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def _read_bytes(path: Path) -> tuple[bytes, str]:
    """The unpacked bytes, as far as they go, and where they end too soon ('' when nothing is wrong)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Correct the path or its permissions.") from error
    if content[:2] != _GZIP_MAGIC:
        return content, ""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # unlike gzip.open, it gives what a torn stream still has
    try:
        unpacked = unpacker.decompress(content)
    except zlib.error as error:
        raise DataError(f"{path} ({len(content):,} bytes) is damaged (gzip: {error}). {_AGAIN}") from error
    return unpacked, "" if unpacker.eof else " (its gzip stream ends early)"
