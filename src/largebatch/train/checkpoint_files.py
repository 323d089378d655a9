"""How do the files of one checkpoint reach the disk as one, and how is it known that they are whole?

torch.distributed.checkpoint writes a file a worker and an index; rank 0 adds what is no tensor and a manifest with the
SHA-256 of each file, and one rename makes it a checkpoint. Nothing that is read back can run code.

This module imports torch.distributed.checkpoint, which takes a second: import it where it is used.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Sequence
from concurrent.futures import Future as Flight
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from largebatch.errors import CheckpointError

LAYOUT = 2
"""The version of all this. 1 was a single file, `checkpoint.pt`."""

MANIFEST = "MANIFEST"
"""The SHA-256 of what follows, and then, in JSON, the layout and the size and SHA-256 of each other file.
Later layouts keep this much, so that theirs can be told from a damaged one of ours."""

PLAIN = "plain.pt"
_INDEX = ".metadata"

Fingerprint = tuple[int, str]
"""Bytes and SHA-256 of a file."""

Manifest = dict[str, Any]


def fingerprint(path: Path) -> Fingerprint:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def write(
    tensors: dict[str, Tensor], place: Path, plain: bytes, *, retire: Sequence[Path] = (),
    group: dist.ProcessGroup | None = None, background: bool = True,
) -> Flight[Any]:  # fmt: skip
    """Copy `tensors` and write the checkpoint `place`; every worker of `group` calls it.

    Args:
        tensors: tensors and DTensors by name. Of what several workers hold, rank 0's is written.
        place: the checkpoint's folder, which does not exist yet.
        plain: the content of `plain.pt`, from rank 0.
        retire: folders to delete once the new one stands, on rank 0.
        group: of gloo, used by nobody else while this is in flight; None for one worker.
        background: return when the copy is made, not when the checkpoint stands.

    Returns:
        Done when rank 0 has renamed the folder. What any worker's disk refuses, all workers raise.
    """
    _expect_one_process()
    options: dict[str, Any] = {
        "storage_writer": Writer(place, plain, retire),
        # Statistics of batch norm differ between workers, and rank 0's are those that go on.
        "planner": DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        ),
        "process_group": group,
        "no_dist": group is None,
    }
    if background:
        flight = async_save(tensors, **options)
        assert isinstance(flight, Flight), "only a stager of one's own makes it two"
        return flight
    flight = Flight[Any]()
    try:
        flight.set_result(save(tensors, **options))
    except BaseException as error:  # torch's CheckpointException is one; whoever waits gets it, as above
        flight.set_exception(error)
    return flight


class Writer(FileSystemWriter):
    """Writes a checkpoint beside its place and, when every worker has written its file, renames it there."""

    def __init__(self, place: Path, plain: bytes, retire: Sequence[Path]) -> None:
        super().__init__(place.with_name(f".{place.name}.writing"))
        self._place, self._plain, self._retire = place, plain, retire
        self._folder = Path(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the folder to rank 0, which clears it when all workers have come this far."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder (rank 0), free of what killed saves have left."""
        for remains in self._place.parent.glob(".*.writing"):
            shutil.rmtree(remains)
        is_first = not self._place.parent.exists()
        self._folder.mkdir(parents=True)
        if is_first:
            _sync_folder(self._place.parent.parent)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write and fsync this worker's file; the result goes to rank 0 with the file's fingerprint."""
        try:
            written: list[WriteResult] = super().write_data(plan, planner).value() if plan.items else []
        except RuntimeError as error:
            # After a failed write torch.save still ends its archive, and says only that this failed ("unexpected pos").
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from error
        names = {result.storage_data.relative_path for result in written}
        future: Future[Any] = Future()
        future.set_result((written, {name: fingerprint(self._folder / name) for name in names}))
        return future

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Add index, plain values and manifest, and rename (rank 0)."""
        super().finish(metadata, [written for written, _ in results])
        _write(self._folder / PLAIN, self._plain)
        files = {name: print_ for _, prints in results for name, print_ in prints.items()}
        files |= {name: fingerprint(self._folder / name) for name in (_INDEX, PLAIN)}
        text = json.dumps({"layout": LAYOUT, "world_size": len(results), "files": files}, indent=1).encode() + b"\n"
        digest = hashlib.sha256(text).hexdigest().encode() + b"\n"
        _write(self._folder / MANIFEST, digest + text)
        _sync_folder(self._folder)
        self._folder.rename(self._place)
        _sync_folder(self._place.parent)
        for folder in self._retire:
            shutil.rmtree(folder, ignore_errors=True)


def read_manifest(place: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError where it is damaged."""
    try:
        digest, _, text = (place / MANIFEST).read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise CheckpointError("it has no manifest") from None
    except OSError as error:
        raise CheckpointError(f"its manifest cannot be read: {error.strerror}") from error
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise CheckpointError("the checksum of its manifest does not match")
    return json.loads(text)


def find_damage(place: Path, manifest: Manifest, rank: int, world_size: int) -> str | None:
    """What is wrong with this worker's share of a checkpoint's files; None where nothing is.

    Args:
        place: the checkpoint's folder.
        manifest: what `read_manifest` found there.
        rank: this worker; each looks at every `world_size`-th file.
        world_size: workers that look.
    """
    for name in sorted(manifest["files"])[rank::world_size]:
        size, digest = manifest["files"][name]
        try:
            found, found_digest = fingerprint(place / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != size:
            return f"{name} has {found} bytes, not {size}"
        if found_digest != digest:
            return f"the checksum of {name} does not match its content"
    return None


def read_plain(place: Path) -> dict[str, Any]:
    """What is no tensor in a checkpoint; no code in it is run."""
    return torch.load(io.BytesIO((place / PLAIN).read_bytes()), map_location="cpu", weights_only=True)


def saved_shapes(place: Path) -> dict[str, tuple[int, ...]]:
    """Name and whole shape of each tensor in a checkpoint."""
    entries: dict[str, Any] = Reader(place).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in entries.items()}


def read_tensors(tensors: dict[str, Tensor], place: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill `tensors` in place, each worker its parts, whatever parts they were written in. Raises CheckpointError."""
    _expect_one_process()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        load(dict(tensors), storage_reader=Reader(place), planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(
            f"{place} cannot be read: {cause}. Run the same command again to try once more."
        ) from error


class Reader(FileSystemReader):
    """Reads a checkpoint's tensors; the index, a pickle, may name nothing but what an index is made of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the checkpoint."""
        with (Path(self.path) / _INDEX).open("rb") as file:
            return _IndexUnpickler(file).load()


class _IndexUnpickler(pickle.Unpickler):
    """Makes the classes of an index, types of numbers and paths; whatever else a file names is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        named = (module_name, global_name)
        if named in _NAMED_IN_AN_INDEX or _is_dtype(*named):
            return super().find_class(module_name, global_name)
        if module_name in _MODULES_OF_AN_INDEX and "." not in global_name:
            found = super().find_class(module_name, global_name)
            if isinstance(found, type) and found.__module__ == module_name:
                return found
        raise CheckpointError(
            f"the index of a checkpoint names {module_name}.{global_name}, which is no part of one: something "
            "else than largebatch wrote it, and it is not read."
        )


_NAMED_IN_AN_INDEX = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}
_MODULES_OF_AN_INDEX = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def _is_dtype(module_name: str, global_name: str) -> bool:
    return module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)


def _expect_one_process() -> None:
    """Say nothing about torch.distributed not being there: one worker alone is an ordinary case."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
