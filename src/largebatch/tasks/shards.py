"""How are pictures read that do not fit one disk, or lie behind a network?

As tar files of some hundred megabytes in webdataset's layout (00000012.jpg beside 00000012.cls, the class's number),
and an index that says where each picture lies. A picture is one read of its own bytes, from whatever fsspec reads:
several disks, a cluster's file system, s3://, gs://, https://. So the order stays one shuffle of all the data (Goyal
2017, remark 4), the same for any number of workers and after any resume; where whole shards are streamed, shards are
shuffled and then a buffer's pictures. What it costs is a request a picture, which loaders hide by waiting side by side.

    write_shard_folders(Path("imagenet"), Path("shards"))                  # from DIR/train/CLASS/*.jpg and DIR/val
    train, held_out = shard_folders(["/disk1/shards", "/disk2/shards"])    # shards may lie in any of them
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from largebatch.errors import ConfigError, DataError, StorageError
from largebatch.tasks.image_folder import ImageFolder, image_folders
from largebatch.tasks.pictures import Pictures

INDEX = "index.npz"
_VERSION = 1
_FIELDS = ("version", "classes", "shards", "shard_bytes", "shard_of", "starts", "sizes", "labels", "endings")


class Shards(Pictures):
    """Pictures in tar shards, in the order in which they were written: a split of a task.

    What opens them is made anew in every process, so that loaders may be forked.
    """

    def __init__(self, places: Sequence[str | Path], *, size: int = 224) -> None:
        """Read the index and check that every shard is there, as long as it was written.

        Args:
            places: folders or URLs, of which the first with an index holds the whole index; shards may lie in any.
            size: of the crops' sides, in pixels.

        Raises:
            DataError: there is no index, or a shard is missing or was cut short (the sentence names it).
            ConfigError: no place, or a size below 1.
        """
        super().__init__(size)
        if not places:
            raise ConfigError("shards need at least one folder or URL to be looked for in; got none.")
        self._places = [str(place).rstrip("/") for place in places]
        self._files = _Files(os.getpid())
        index = self._read_index()
        self.classes: tuple[str, ...] = tuple(map(str, index["classes"]))
        """Their names; a label is a place in it."""
        self._shards = [str(name) for name in index["shards"]]
        self._shard_of, self._starts, self._sizes = index["shard_of"], index["starts"], index["sizes"]
        self._labels, self._endings = index["labels"], index["endings"]
        self._urls = [
            self._find(name, int(count)) for name, count in zip(self._shards, index["shard_bytes"], strict=True)
        ]

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        """Shard and member of the picture at `index`."""
        return f"{self._shards[self._shard_of[index]]}:{index:08d}{self._endings[index]}"

    def read(self, index: int) -> tuple[bytes, int]:
        """The bytes of the picture at `index` and its class.

        Raises:
            DataError: its shard is gone or was cut short since it was opened.
        """
        url, start, count = self._urls[self._shard_of[index]], int(self._starts[index]), int(self._sizes[index])
        try:
            data = self._files.of_this_process().read(url, start, start + count)
        except Exception as error:  # every kind of store fails in its own ways
            raise DataError(f"{url} cannot be read ({_said(error)}), although it was there at the start.") from error
        if len(data) != count:
            raise DataError(
                f"{url} was cut short: of {count:,} bytes from {start:,} on there are {len(data):,}. Copy it again."
            )
        return data, int(self._labels[index])

    def _read_index(self) -> dict[str, Any]:
        said = ""
        for place in self._places:
            url = f"{place}/{INDEX}"
            try:
                data = self._files.read(url)
            except Exception as error:  # as above
                said = said or _said(error)
                continue
            try:
                with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                    index = {name: arrays[name] for name in _FIELDS}
            except Exception as error:  # a damaged zip fails in many ways
                raise DataError(f"{url} ({len(data):,} bytes) was cut short or is no index of shards.") from error
            if int(index["version"]) != _VERSION:
                raise DataError(f"{url} is of version {int(index['version'])}, not {_VERSION}: write the shards again.")
            return index
        raise DataError(
            f"no {INDEX} in {', '.join(self._places)} ({said}). It is written last: if writing the shards was "
            "interrupted, write them again."
        )

    def _find(self, name: str, count: int) -> str:
        """Where the shard is, whole."""
        there: list[str] = []
        for place in self._places:
            with contextlib.suppress(Exception):
                found = self._files.size(f"{place}/{name}")
                if found == count:
                    return f"{place}/{name}"
                there.append(f"{place}/{name} has {found:,} bytes")
        what = f"cut short or another: {'; '.join(there)}" if there else f"in none of {', '.join(self._places)}"
        raise DataError(f"shard {name}, of {count:,} bytes, is {what}. Copy it again.")


@dataclass(slots=True)
class _Files:
    """Reads parts of files by URL; connections belong to one process."""

    process: int
    _systems: dict[str, Any] = field(default_factory=dict[str, Any])

    def of_this_process(self) -> _Files:
        if self.process != os.getpid():
            self.process, self._systems = os.getpid(), {}
        return self

    def read(self, url: str, start: int = 0, end: int | None = None) -> bytes:
        if "://" not in url:  # half the time that fsspec takes
            with open(url, "rb", buffering=0) as file:
                file.seek(start)
                return file.read(-1 if end is None else end - start)
        return self._system(url).cat_file(url, start=start, end=end)

    def size(self, url: str) -> int:
        return int(self._system(url).size(url))

    def _system(self, url: str) -> Any:
        kind = url.partition("://")[0] if "://" in url else "file"
        if kind not in self._systems:
            self._systems[kind] = fsspec.core.url_to_fs(url)[0]
        return self._systems[kind]


def shard_folders(places: Sequence[str | Path], *, size: int = 224) -> tuple[Shards, Shards]:
    """Open the shards in `train` and `val` below every place; as `image_folders`.

    Raises:
        DataError: as Shards, or the two have not the same classes.
        ConfigError: as Shards.
    """
    halves = [Shards([f"{str(place).rstrip('/')}/{half}" for place in places], size=size) for half in ("train", "val")]
    train, held_out = halves
    if differing := sorted(set(train.classes) ^ set(held_out.classes)):
        raise DataError(
            f"the shards in train and val have not the same classes: {', '.join(differing[:5])} are in one of them. "
            "Write both again from one data set."
        )
    return train, held_out


def write_shards(pictures: ImageFolder, folder: Path, *, shard_bytes: int = 2**28) -> None:
    """Pack a folder of pictures into tar shards, their bytes unchanged, and index them.

    Args:
        pictures: what is packed, in its order.
        folder: is made; `shard-00000.tar`, ... and last `index.npz` are written into it.
        shard_bytes: a shard is closed where the next picture would make it larger (it has one at least).

    Raises:
        ConfigError: the folder holds an index already, or a shard could hold nothing.
        DataError: a picture cannot be read.
        StorageError: the disk refuses a write; without an index nothing takes what is there for whole.
    """
    if shard_bytes < 1:
        raise ConfigError(f"a shard has at least 1 byte; got shard_bytes={shard_bytes}.")
    if (folder / INDEX).exists():
        raise ConfigError(f"{folder} holds shards already. Delete it, or choose another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = list(_pack(pictures, folder, shard_bytes))
        shard_of, starts, sizes, labels = np.array(rows, dtype=np.int64).T
        names = [_shard_name(number) for number in range(int(shard_of[-1]) + 1)]
        endings = np.array([_ending(pictures, index) for index in range(len(pictures))])
        arrays: dict[str, Any] = {
            "version": np.array(_VERSION), "classes": np.array(pictures.classes), "shards": np.array(names),
            "shard_bytes": np.array([(folder / name).stat().st_size for name in names]), "shard_of": shard_of,
            "starts": starts, "sizes": sizes, "labels": labels, "endings": endings,
        }  # fmt: skip
        unfinished = folder / f".{INDEX}"
        with unfinished.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / INDEX)
    except OSError as error:
        raise StorageError(
            f"shards cannot be written to {folder}: {error.strerror or error}. Make room, delete it and try again."
        ) from error


def write_shard_folders(data: Path, out: Path, *, shard_bytes: int = 2**28) -> None:
    """Pack `data/train` and `data/val` into `out/train` and `out/val`; Raises as image_folders and write_shards."""
    for half, pictures in zip(("train", "val"), image_folders(data), strict=True):
        write_shards(pictures, out / half, shard_bytes=shard_bytes)


def _pack(pictures: ImageFolder, folder: Path, shard_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Write the shards; gives (shard, start, size, label) of each picture."""
    number = -1
    tar: tarfile.TarFile | None = None
    try:
        for index in range(len(pictures)):
            data, label = pictures.read(index)
            if tar is None or (tar.offset > 0 and tar.offset + len(data) > shard_bytes):
                if tar is not None:
                    tar.close()
                number += 1
                tar = tarfile.open(folder / _shard_name(number), "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
            start = tar.offset + tarfile.BLOCKSIZE  # a short name's header is one block
            key = f"{index:08d}"
            _add(tar, f"{key}{_ending(pictures, index)}", data)
            _add(tar, f"{key}.cls", str(label).encode())
            yield number, start, len(data), label
    finally:
        if tar is not None:
            tar.close()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _ending(pictures: ImageFolder, index: int) -> str:
    return Path(pictures.name(index)).suffix.lower()


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.tar"


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
