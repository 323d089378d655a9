"""How does a run survive a kill, a full disk or a damaged file?

A checkpoint is written to a temporary name, fsynced and renamed; the one before it is kept. Each file carries
the SHA-256 of its payload, so damage is noticed before a single weight is loaded, and the last good one is used.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from pathlib import Path
from typing import Any

import torch

from largebatch.errors import CheckpointError
from largebatch.records.files import storage_error, write_atomic

logger = logging.getLogger(__name__)

MAGIC = b"largebatch checkpoint 1\n"
_DIGEST_BYTES = 32


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, text and containers of them) to `path`, keeping the previous file.

    Args:
        path: the checkpoint file; `path` + ".previous" holds the one before.
        state: anything `torch.load(weights_only=True)` can read back.

    Raises:
        StorageError: the disk refused; both earlier files are unchanged.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    fresh = path.with_name(path.name + ".fresh")
    write_atomic(fresh, lambda file: file.write(MAGIC + hashlib.sha256(payload).digest() + payload))
    try:
        if path.exists():
            path.replace(previous_of(path))
        fresh.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error


def load_checkpoint(path: Path, map_location: str = "cpu") -> dict[str, Any] | None:
    """Return the newest checkpoint that is whole, or None when there never was one.

    A damaged one is reported by a warning that names it, and the one before it is used.

    Raises:
        CheckpointError: there are checkpoint files, and none of them is whole.
    """
    # A kill between the two renames leaves the newest state under ".fresh".
    candidates = [path.with_name(path.name + ".fresh"), path, previous_of(path)]
    damaged: list[str] = []
    for candidate in candidates:
        if not candidate.exists():
            continue
        try:
            return _read(candidate, map_location)
        except (OSError, CheckpointError) as error:
            damaged.append(f"{candidate} ({error})")
            logger.warning("checkpoint %s is damaged (%s); looking for the one before it", candidate, error)
    if damaged:
        raise CheckpointError(
            f"no checkpoint is whole: {'; '.join(damaged)}. Delete these files to start the run from its beginning."
        )
    return None


def previous_of(path: Path) -> Path:
    """Where the checkpoint before `path` is kept."""
    return path.with_name(path.name + ".previous")


def delete_checkpoints(path: Path) -> None:
    """Remove the checkpoint and the one before it, once the run has ended."""
    for file in (path.with_name(path.name + ".fresh"), path, previous_of(path)):
        file.unlink(missing_ok=True)


def _read(path: Path, map_location: str) -> dict[str, Any]:
    data = path.read_bytes()
    start = len(MAGIC) + _DIGEST_BYTES
    if len(data) < start or not data.startswith(MAGIC):
        raise CheckpointError("it is cut short or is no largebatch checkpoint")
    payload = data[start:]
    if hashlib.sha256(payload).digest() != data[len(MAGIC) : start]:
        raise CheckpointError("its checksum does not match its content")
    return torch.load(io.BytesIO(payload), map_location=map_location, weights_only=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
