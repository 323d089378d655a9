"""How does a run survive a kill, a full disk, a damaged file, and another number of workers?

A checkpoint is a folder of files that torch.distributed.checkpoint writes (`checkpoint_files`), made under another name
and renamed when it is whole; the one before it is kept. Every file's SHA-256 is in its manifest, so damage is noticed
before a single weight is loaded, and the last good one is used. Final weights are one file of the same care.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import shutil
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.errors import CheckpointError, StorageError
from largebatch.records.files import storage_error, write_atomic
from largebatch.train.workers import WorkerLostError

logger = logging.getLogger(__name__)

_SHOWN = 3
_SINGLE_FILES = ("checkpoint.pt", "checkpoint.pt.previous", "checkpoint.pt.fresh")
"""What layout 1 called its files."""
_NAME = re.compile(r"step-\d+(\.\d+)?")


class Checkpoints:
    """The checkpoints of one run: written in the background, whole or not used, readable by other numbers of workers.

    A kill at any moment costs the steps since the last one. The newest and the one before it are kept, in folders
    `checkpoints/step-N`. All workers see the same folder, and each method is called by all of them at the same point.

    Args:
        folder: of the run.
        group: all workers of the job; None for one alone. Its traffic is not disturbed: checkpoints have a gloo group
            of their own, made here.
        asynchronous: write in the background; otherwise `save` returns when the checkpoint stands.
    """

    def __init__(self, folder: Path, *, group: dist.ProcessGroup | None = None, asynchronous: bool = True) -> None:
        self.folder = folder / "checkpoints"
        self._run_folder, self._asynchronous = folder, asynchronous
        self._group: dist.ProcessGroup | None = None
        self._rank, self._world_size = 0, 1
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
            own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            assert not isinstance(own, int), "only a worker outside of the group gets a number"
            self._group = own
            self._rank, self._world_size = dist.get_rank(group), len(ranks)
        self._in_flight: tuple[Path, Future[Any]] | None = None
        self._damaged: set[Path] = set()

    def save(self, step: int, state: dict[str, Any], facts: dict[str, Any]) -> None:
        """Copy `state` and write it in the background, after what was in flight is committed.

        Args:
            step: optimizer steps taken; what is there for later ones is of a course the run has left, and goes.
            state: nested dicts and lists of tensors, DTensors and plain values, as `get_state_dict` of
                torch.distributed.checkpoint.state_dict gives. What workers hold alike is taken from rank 0.
            facts: small values and tensors, from rank 0: what `torch.load(weights_only=True)` can read.

        Raises:
            StorageError: the disk refused this checkpoint (or, in the background, the one before it).
        """
        from largebatch.train.checkpoint_files import write

        self.wait()
        leaves = {name: leaf for name, (_, _, leaf) in _leaves(state).items()}
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
        plain = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, Tensor)}
        content = _packed({"facts": facts, "plain": plain}) if self._rank == 0 else b""
        place, retire = self._agreed(lambda: self._place_of(step))
        flight = write(tensors, place, content, retire=retire, group=self._group, background=self._asynchronous)
        self._in_flight = place, flight
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Return when what is in flight is committed.

        Raises:
            StorageError: the disk refused it; the last good checkpoint is whole, and the half-written one is gone.
            WorkerLostError: another worker ended in the middle of it; the last good checkpoint is whole.
        """
        if self._in_flight is None:
            return
        place, future = self._in_flight
        self._in_flight = None
        try:
            future.result()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is one
            if self._rank == 0:
                for remains in self.folder.glob(".*.writing"):
                    shutil.rmtree(remains, ignore_errors=True)
            raise _failure(place, error) from error

    def settle(self, seconds: float = 30.0) -> None:
        """Give what is in flight up to `seconds` to end: a run that fails should leave nothing on its way behind it."""
        if self._in_flight is None or not futures.wait([self._in_flight[1]], timeout=seconds).done:
            return
        try:
            self.wait()
        except StorageError as error:  # what ends the run is said by whoever raised it; this, beside it
            if self._rank == 0:
                logger.warning("%s", error)
        except RuntimeError as error:  # a worker that is lost ends the run itself
            logger.debug("%s", error)

    def load(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Fill `state` from the newest whole checkpoint, whatever workers and sharding wrote it.

        Args:
            state: of the same names and shapes as the one that was saved; tensors are filled in place.

        Returns:
            The facts; None where there never was a checkpoint.

        Raises:
            CheckpointError: none is whole, or the one there is of another layout or does not fit.
        """
        self.wait()
        if not (found := self._agreed(self._list)):
            return None
        from largebatch.train.checkpoint_files import LAYOUT, find_damage

        complaints: list[str] = []
        for place, manifest in found:
            complaint = manifest if isinstance(manifest, str) else None
            if not isinstance(manifest, str):
                if manifest["layout"] != LAYOUT:
                    raise CheckpointError(
                        f"{place} has layout {manifest['layout']}, and this version of largebatch reads {LAYOUT}. Use "
                        f"the version that wrote it, or delete {self.folder} to start the run from its beginning."
                    )
                share = find_damage(place, manifest, self._rank, self._world_size)
                complaint = next(filter(None, self._gathered(share)), None)
            if complaint is None:
                return self._fill(state, place)
            self._damaged.add(place)
            complaints.append(f"{place} ({complaint})")
            if self._rank == 0:
                logger.warning("checkpoint %s is damaged (%s); looking for the one before it", place, complaint)
        raise CheckpointError(
            f"no checkpoint is whole: {'; '.join(complaints)}. Delete {self.folder} to start the run from its "
            "beginning."
        )

    def delete(self) -> None:
        """Remove all checkpoints, once the run has ended."""
        self.wait()
        if self._rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            for name in _SINGLE_FILES:
                (self._run_folder / name).unlink(missing_ok=True)

    def _place_of(self, step: int) -> tuple[Path, list[Path]]:
        """Where the checkpoint of `step` goes, and what goes then: all but the last good one before it."""
        there = _newest_first(self.folder)
        # One of the same step stays until the new one stands, so that a kill between never leaves neither.
        again = 1 + max((_number(other)[1] for other in there if _number(other)[0] == step), default=-1)
        place = self.folder / (f"step-{step:09d}.{again}" if again else f"step-{step:09d}")
        before = (other for other in there if _number(other) < (step, again) and other not in self._damaged)
        kept = next(before, None)
        return place, [other for other in there if other != kept]

    def _list(self) -> list[tuple[Path, Any]]:
        """Checkpoints from the newest on, each with its manifest or what is wrong with it (rank 0)."""
        if not (places := _newest_first(self.folder)):
            old = self._run_folder / _SINGLE_FILES[0]
            if not old.exists():
                return []
            raise CheckpointError(
                f"{old} is a checkpoint of layout 1, which this version of largebatch does not read. Finish the run "
                "with largebatch 0.1, or delete the file to start from the beginning."
            )
        from largebatch.train.checkpoint_files import read_manifest

        found: list[tuple[Path, Any]] = []
        for place in places:
            try:
                found.append((place, read_manifest(place)))
            except CheckpointError as error:
                found.append((place, str(error)))
        return found

    def _fill(self, state: dict[str, Any], place: Path) -> dict[str, Any]:
        from largebatch.train.checkpoint_files import read_plain, read_tensors, saved_shapes

        leaves = _leaves(state)
        tensors = {name: leaf for name, (_, _, leaf) in leaves.items() if isinstance(leaf, Tensor)}
        misfits = _misfits({name: tuple(tensor.shape) for name, tensor in tensors.items()}, saved_shapes(place))
        if misfits:
            more = f" and {len(misfits) - _SHOWN} more" if len(misfits) > _SHOWN else ""
            raise CheckpointError(
                f"{place} was saved by another model or optimizer: {'; '.join(misfits[:_SHOWN])}{more}. Choose another "
                f"--out, or delete {self.folder} to start from the beginning."
            )
        plain = read_plain(place)
        read_tensors(tensors, place, self._group)
        for name, value in plain["plain"].items():
            if name in leaves:
                container, key, _ = leaves[name]
                container[key] = value
        return plain["facts"]

    def _agreed(self, look: Callable[[], Any]) -> Any:
        """What rank 0 sees, on all ranks; its CheckpointError too."""
        outcome: list[Any] = [None]
        if self._rank == 0:
            try:
                outcome = [look()]
            except CheckpointError as error:
                outcome = [error]
        if self._group is not None:
            dist.broadcast_object_list(outcome, group=self._group, group_src=0)
        if isinstance(outcome[0], CheckpointError):
            raise outcome[0]
        return outcome[0]

    def _gathered(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value, group=self._group)
        return values


def _newest_first(folder: Path) -> list[Path]:
    return sorted((place for place in folder.glob("step-*") if _NAME.fullmatch(place.name)), key=_number, reverse=True)


def _number(place: Path) -> tuple[int, int]:
    """The step of a checkpoint, and how many of the same step came before it."""
    step, again = re.findall(r"\d+", place.name + ".0")[:2]
    return int(step), int(again)


def _leaves(tree: Any, path: str = "") -> dict[str, tuple[Any, Any, Any]]:
    """Each leaf of nested dicts and lists by its path, with the container and the key it stands under."""
    found: dict[str, tuple[Any, Any, Any]] = {}
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        name = f"{path}/{key}" if path else str(key)
        inner = _leaves(value, name) if isinstance(value, dict | list) else {name: (tree, key, value)}
        assert not inner.keys() & found.keys(), f"two values are called {name}"
        found |= inner
    return found


def _packed(plain: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)  # what could not be read back is a bug, and is found now
    return buffer.getvalue()


def _misfits(ours: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> list[str]:
    """How the tensors to fill and the saved ones differ."""
    return [
        f"{name} has no place here" if name not in ours
        else f"{name} is not in it" if name not in theirs
        else f"{name} is {theirs[name]} in it and {ours[name]} here"
        for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)
    ]  # fmt: skip


def _failure(place: Path, error: BaseException) -> Exception:
    """What torch raised while it saved, in one sentence that is the same on all workers."""
    said = " ".join(str(error).split())
    if not hasattr(error, "failures"):  # what the workers tell each other did not arrive
        return WorkerLostError(
            f"{place} was not saved, since another worker ended or cannot be reached ({said[:200]}). The checkpoint "
            "before it is whole; run the same command again to go on from it."
        )
    causes: list[BaseException] = [cause for _, (cause, _) in sorted(error.failures.items())]  # pyright: ignore
    refused = next((cause for cause in causes if isinstance(cause, OSError)), None)
    return storage_error(place, refused) if refused else RuntimeError(f"{place} was not saved: {causes[0]!r}")


MAGIC = b"largebatch checkpoint 1\n"
_DIGEST_BYTES = 32


def save_weights(path: Path, task: str, weights: dict[str, Tensor]) -> None:
    """Write the final weights of `task` as one file, whole or not at all. Raises StorageError."""
    buffer = io.BytesIO()
    torch.save({"task": task, "model": weights}, buffer)
    payload = buffer.getvalue()
    write_atomic(path, lambda file: file.write(MAGIC + hashlib.sha256(payload).digest() + payload))


def load_weights(path: Path, map_location: str = "cpu") -> dict[str, Tensor]:
    """Read what `save_weights` wrote.

    Raises:
        CheckpointError: the file is missing, damaged, or something else.
    """
    try:
        return _read(path, map_location)["model"]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used: {error}. Train again, or take another file.") from error


def _read(path: Path, map_location: str) -> dict[str, Any]:
    data = path.read_bytes()
    start = len(MAGIC) + _DIGEST_BYTES
    if len(data) < start or not data.startswith(MAGIC):
        raise CheckpointError("it is cut short or is no largebatch checkpoint")
    payload = data[start:]
    if hashlib.sha256(payload).digest() != data[len(MAGIC) : start]:
        raise CheckpointError("its checksum does not match its content")
    return torch.load(io.BytesIO(payload), map_location=map_location, weights_only=True)
