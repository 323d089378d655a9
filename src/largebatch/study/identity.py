"""Whose folder is this? One study owns its --out, from its first file to its last."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Generator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from largebatch.errors import ConfigError, RecordError
from largebatch.records.files import plain, read_json, storage_error, write_json
from largebatch.records.schema import SCHEMA_VERSION
from largebatch.tasks.task import Task


def file_digest(task: str) -> str | None:
    """SHA-256 of a user's task file; None for a task that largebatch ships."""
    path = Path(task)
    return hashlib.sha256(path.read_bytes()).hexdigest() if task.endswith(".py") and path.exists() else None


def data_digest(task: Task) -> str:
    """SHA-256 of a few training and held-out examples and the sizes: enough to tell one data set from another."""
    digest = hashlib.sha256(f"{len(task.train)} {len(task.held_out)}".encode())
    for split in (task.train, task.held_out):
        rows = torch.linspace(0, len(split) - 1, min(len(split), 16)).long()
        for tensor in tensors_in(split.fetch(rows)):
            digest.update(str(tensor.shape).encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def model_digest(task: Task) -> str:
    """Shapes of the weights and the loss of fresh ones on a few examples: tells edited models and losses apart."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = task.model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"task {task.name!r}: `model` must return a torch module; it returned {type(model).__name__}."
            )
        model.eval()
        loss = float(task.loss(model, task.train.fetch(torch.arange(min(len(task.train), 16)))))
    shapes = " ".join("x".join(map(str, value.shape)) for value in model.state_dict().values())
    return f"{hashlib.sha256(shapes.encode()).hexdigest()[:16]} {loss:.4g}"


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Every tensor of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch.detach().cpu().reshape(-1)]
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def identity_of(kind: str, path: str, task: Task, **settings: Any) -> dict[str, Any]:
    """What a folder must agree on to be gone on with: code, data, recipe and settings."""
    return {
        "schema_version": SCHEMA_VERSION, "kind": kind, "task": task.name, "task_file_sha256": file_digest(path),
        "data_sha256": data_digest(task), "model": model_digest(task), "unit": task.unit, "goals": task.goals,
        "num_goal_examples": task.num_goal_examples, "recipe": asdict(task.recipe), "torch": torch.__version__,
        "largebatch": version("largebatch"), **settings,
    }  # fmt: skip


def claim_folder(out: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Make `out` the folder of this study or run, or find that it already is; return its identity.

    Raises:
        RecordError: it holds another one, or other files.
    """
    path = out / f"{identity['kind']}.json"
    if not path.exists():
        for torn in out.glob(".*.tmp"):  # a kill in the middle of a first write
            torn.unlink()
        strangers = sorted(entry.name for entry in out.iterdir() if entry.name != "lock")
        if strangers:
            raise RecordError(
                f"{out} is not empty and holds no {identity['kind']} (found {', '.join(strangers[:3])}). "
                "Choose another --out."
            )
        write_json(path, identity)
        return dict(identity)
    try:
        found, wanted = read_json(path), plain(identity)
    except RecordError as error:
        raise RecordError(
            f"{path} is damaged, so it cannot be told whose folder this is. Choose another --out, or delete {out}."
        ) from error
    differing = [key for key in wanted if found.get(key) != wanted[key]]
    if differing:
        kind = "training run" if identity["kind"] == "train" else "study"
        key, there, here = _difference(differing[0], found.get(differing[0]), wanted[differing[0]])
        raise RecordError(
            f"{out} holds another {kind}: its {key} is {_short(there)}, this one's is {_short(here)}. "
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


def _difference(key: str, there: Any, here: Any) -> tuple[str, Any, Any]:
    """Go down into settings that differ, to the first value that does."""
    while isinstance(there, dict) and isinstance(here, dict):
        inner = next(name for name in here if there.get(name) != here[name])
        key, there, here = inner, there.get(inner), here[inner]
    return key, there, here


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
