"""How are the cells of a study run: which are finished, which run side by side, and what if the study is killed?

A cell is one training run. It is identified by its spec, leaves `run.json` when it has ended, and is never run
twice. Cells run one thread each, in this process or in `jobs` processes, with the same bits either way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from largebatch.errors import CheckpointError, LargebatchError, RecordError
from largebatch.records.files import JsonLines, read_json, read_lines, write_json
from largebatch.records.schema import RunRecord, RunSpec
from largebatch.tasks.catalog import load_task
from largebatch.train.checkpoint import Checkpoints
from largebatch.train.loop import Run
from largebatch.train.progress import StepCallback

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.01

cached_task = functools.cache(load_task)
"""The task of a name and a data folder, loaded once in a process (children inherit it)."""


@dataclass(kw_only=True)
class Launcher:
    """Runs cells of one study and remembers the finished ones on disk."""

    task: str
    """Name or path, as `load_task` takes it."""
    data: Path | None
    out: Path
    jobs: int = 1
    device: str = "cpu"
    on_update: Callable[[Sequence[RunSpec], Sequence[RunSpec], int], None] | None = None
    """Called with (running cells, finished cells, number of cells of this round) as they change."""
    checkpoint_seconds: float = 20.0
    finished: dict[str, RunRecord] = field(default_factory=dict[str, RunRecord])

    def folder(self, spec: RunSpec) -> Path:
        """Where a cell keeps its files."""
        return self.out / "cells" / spec.key

    def run(self, specs: Sequence[RunSpec], on_step: StepCallback | None = None) -> list[RunRecord]:
        """Return the records of `specs`, in their order, training those that have not finished yet.

        Args:
            specs: the cells of one round; none may depend on another.
            on_step: called after every step; only for a round of one cell, which then runs in this process.

        Raises:
            LargebatchError: what a cell raised; the other finished cells are kept.
        """
        unique = list(dict.fromkeys(specs))
        missing = [spec for spec in unique if not self._load(spec)]
        if on_step is not None or self.jobs == 1 or len(missing) == 1:
            for spec in missing:
                self._notify([spec], unique)
                self._run_here(spec, on_step)
                self._load(spec)
        elif missing:
            self._run_side_by_side(missing, unique)
        self._notify([], unique)
        return [self.finished[spec.key] for spec in specs]

    def _load(self, spec: RunSpec) -> bool:
        if spec.key not in self.finished:
            path = self.folder(spec) / "run.json"
            if not path.exists():
                return False
            record = RunRecord.from_json(read_json(path))
            for name, expected in (("steps", record.num_step_lines), ("evaluations", record.num_evaluation_lines)):
                if len(read_lines(path.with_name(f"{name}.jsonl"))) != expected:
                    raise RecordError(
                        f"{path.with_name(name)}.jsonl has lost lines: the run wrote {expected}. "
                        f"Delete the folder {path.parent} to have it trained again."
                    )
            if record.spec != spec:
                raise RecordError(
                    f"{path} is not the record of {spec.key}. Delete that folder, or choose another --out."
                )
            self.finished[spec.key] = record
        return True

    def _notify(self, running: Sequence[RunSpec], round_specs: Sequence[RunSpec]) -> None:
        if self.on_update is not None:
            done = [spec for spec in round_specs if spec.key in self.finished]
            self.on_update(running, done, len(round_specs))

    def _run_here(self, spec: RunSpec, on_step: StepCallback | None) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with blame(self.task):
                run_cell(self.task, self.data, spec, self.folder(spec), self.device, self.checkpoint_seconds, on_step)
        finally:
            torch.set_num_threads(threads)

    def _run_side_by_side(self, missing: Sequence[RunSpec], unique: Sequence[RunSpec]) -> None:
        # A forked child of a parent that has run multi-threaded operations hangs.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        cached_task(self.task, self.data)
        fork = sys.platform == "linux" and self.device == "cpu"
        start = multiprocessing.get_context("fork").Process if fork else multiprocessing.get_context("spawn").Process
        waiting = sorted(missing, key=lambda spec: (-spec.max_steps * spec.batch, spec.key))
        running: dict[str, tuple[RunSpec, BaseProcess]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    spec = waiting.pop(0)
                    process = start(
                        target=_child,
                        args=(
                            os.getpid(), self.task, self.data, spec, self.folder(spec), self.device,
                            self.checkpoint_seconds,
                        ),
                        daemon=True,
                    )  # fmt: skip
                    process.start()
                    running[spec.key] = (spec, process)
                    self._notify([cell for cell, _ in running.values()], unique)
                time.sleep(_POLL_SECONDS)
                for key, (spec, process) in list(running.items()):
                    if not process.is_alive():
                        process.join()
                        del running[key]
                        self._collect(spec, process.exitcode)
                        self._notify([cell for cell, _ in running.values()], unique)
        finally:
            for _, process in running.values():
                process.kill()
                process.join()
            torch.set_num_threads(threads)

    def _collect(self, spec: RunSpec, exit_code: int | None) -> None:
        if self._load(spec):
            return
        failure = self.folder(spec) / "error.json"
        if failure.exists():
            document = read_json(failure)
            failure.unlink()
            raise LargebatchError(str(document["message"]))
        raise LargebatchError(
            f"the process that trained {spec.key} ended with exit code {exit_code} and left no record (killed, or out "
            "of memory?). Run the same command again to go on; --jobs 1 needs the least memory."
        )


def run_cell(
    task: str, data: Path | None, spec: RunSpec, folder: Path, device: str, checkpoint_seconds: float,
    on_step: StepCallback | None = None,
) -> RunRecord:  # fmt: skip
    """Train one cell in this process; when no checkpoint of it is whole it starts again, and says so."""
    run = Run(
        cached_task(task, data), spec, folder, device=device, checkpoint_seconds=checkpoint_seconds, on_step=on_step
    )
    with JsonLines(folder / "attempts.jsonl") as attempts:
        attempts.append({"pid": os.getpid(), "event": "started"})
        try:
            record = run.run()
        except CheckpointError as error:
            logger.warning("%s: %s It starts again from its beginning.", spec.key, error)
            Checkpoints(folder).delete()
            record = run.run()
        attempts.append({"pid": os.getpid(), "event": "finished"})
    return record


def _child(
    parent: int, task: str, data: Path | None, spec: RunSpec, folder: Path, device: str, checkpoint_seconds: float
) -> None:
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children itself
    torch.set_num_threads(1)
    try:
        with blame(task):
            run_cell(task, data, spec, folder, device, checkpoint_seconds)
    except LargebatchError as error:
        with contextlib.suppress(LargebatchError):
            write_json(folder / "error.json", {"message": str(error)})
        sys.exit(1)


@contextlib.contextmanager
def blame(task: str) -> Generator[None]:
    """Turn what a task's own code raises into one sentence that names its line."""
    try:
        yield
    except LargebatchError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).name == Path(task).name] or frames
        raise LargebatchError(
            f"training {task} failed: {type(error).__name__}: {error} ({own[-1].filename}, line {own[-1].lineno}). "
            "Mend it and run the same command again."
        ) from error


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent is killed, so that no orphan writes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)
