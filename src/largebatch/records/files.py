"""How does a record reach the disk so that a kill never loses or half-writes it?

Two kinds of file: whole documents, written to a temporary name, fsynced and renamed; and JSON lines,
appended one step at a time, readable while being written, whose torn last line is dropped on reading.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from largebatch.errors import RecordError, StorageError


def storage_error(path: Path, error: OSError) -> StorageError:
    """Say which file the disk refused and why, and that what stood there before is whole."""
    reason = error.strerror or str(error)
    return StorageError(
        f"cannot write {path}: {reason}. What was there before is unchanged; free some space or choose another --out, "
        "and run the same command again to go on from here."
    )


def write_atomic(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call `write` on a temporary file, fsync it, and rename it to `path`. Raises StorageError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error(path, error) from error
        raise


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write one JSON document atomically; floats keep all their digits, nan and inf are refused."""
    text = json.dumps(plain(document), indent=1, allow_nan=False) + "\n"
    write_atomic(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON document. Raises RecordError when it is missing or is not a JSON object."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise RecordError(f"{path} does not exist.") from error
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read as JSON ({error}). Delete it to have it made again.") from error
    if not isinstance(document, dict):
        raise RecordError(f"{path} holds a {type(document).__name__}, not a record. Delete it to have it made again.")
    return document


def plain(value: Any) -> Any:
    """Turn tuples into lists and non-finite floats into None, so that any JSON reader can read it."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class JsonLines:
    """An append-only file of one JSON object a line, flushed line by line.

    Opening it drops a torn last line (the writer was killed in the middle of it) and every line after the
    first `keep`: a run that resumes from a checkpoint writes what came after it again.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self.path = path
        self.count = 0
        """Whole lines in the file."""
        length = 0
        for self.count, (offset, _) in enumerate(itertools.islice(_whole_lines(path), keep), start=1):
            length = offset
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            self._file.truncate(length)
        except OSError as error:
            raise storage_error(path, error) from error
        self._length = length

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record through to the operating system; a disk that is full keeps no half of it."""
        line = json.dumps(plain(record), separators=(",", ":"), allow_nan=False) + "\n"
        whole = line.encode()
        try:
            rest = memoryview(whole)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._length)
            raise storage_error(self.path, error) from error
        self._length += len(whole)
        self.count += 1

    def sync(self) -> None:
        """Force what was appended onto the disk (before a checkpoint that counts on it)."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise storage_error(self.path, error) from error

    def close(self) -> None:
        """Close the file; further appends are a bug."""
        try:
            self._file.close()
        except OSError as error:
            raise storage_error(self.path, error) from error

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset after the line, record) for every whole line; a torn or broken one ends it."""
    if not path.exists():
        return
    offset = 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if not isinstance(record, dict):
                return
            offset += len(line)
            yield offset, record


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read every whole record of a JSON-lines file, also while it is being written."""
    return [record for _, record in _whole_lines(path)]
