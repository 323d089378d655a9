"""Whose folder is this? One study owns its --out, from its first file to its last."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

from largebatch.errors import RecordError
from largebatch.records.files import plain, read_json, storage_error, write_json


def file_digest(task: str) -> str | None:
    """SHA-256 of a user's task file; None for a task that largebatch ships."""
    path = Path(task)
    return hashlib.sha256(path.read_bytes()).hexdigest() if task.endswith(".py") and path.exists() else None


def claim_folder(out: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Make `out` this study's folder, or find that it already is; return study.json.

    Raises:
        RecordError: it holds another study or other files.
    """
    path = out / "study.json"
    if not path.exists():
        strangers = sorted(entry.name for entry in out.iterdir() if entry.name != "lock") if out.exists() else []
        if strangers:
            raise RecordError(
                f"{out} is not empty and holds no study (found {', '.join(strangers[:3])}). Choose another --out."
            )
        write_json(path, identity)
        return dict(identity)
    found, wanted = read_json(path), plain(identity)
    differing = [key for key in wanted if found.get(key) != wanted[key]]
    if differing:
        key = differing[0]
        raise RecordError(
            f"{out} holds another study: its {key} is {_short(found.get(key))}, this one's is {_short(wanted[key])}. "
            f"Choose another --out, or delete {out} to start afresh."
        )
    return found


@contextlib.contextmanager
def locked(out: Path) -> Generator[None]:
    """Hold the folder's lock, so that two processes never write the same study.

    Raises:
        RecordError: another process holds it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / "lock").open("w")
    except OSError as error:
        raise storage_error(out, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordError(
                f"another process is running a study in {out}. Wait for it, or choose another --out."
            ) from error
        yield


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
