"""How do several gloo workers run one function, so that none is left behind and an error says who and where?

Workers meet through a file in a temporary folder, so that no port is taken. Each leads a process group of its own: what
it starts (data loader workers) ends with it. When the process that asked for them dies, a thread in each worker sees
the end of its pipe and ends that group.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.reduction
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from largebatch.errors import ConfigError, LargebatchError

StartMethod = Literal["fork", "spawn"]
Say = Callable[[str], None]
"""Tells the parent what this worker does now: words that follow "in"."""

_PEER_WORDS = ("connection closed", "connection reset", "broken pipe", "gloo", "timed out", "peer")


class WorkerFailedError(LargebatchError, RuntimeError):
    """A worker raised, died or did not end in time."""


def pick_start_method(asked: StartMethod | None, *sent: Any) -> StartMethod:
    """Fork where that is safe, else spawn, for which what is sent must be picklable.

    Raises:
        ConfigError: the method is unknown or not to be had here, or something sent cannot be pickled for spawn.
    """
    known = multiprocessing.get_all_start_methods()
    if asked is not None and (asked not in ("fork", "spawn") or asked not in known):
        raise ConfigError(f"start_method={asked!r} is not to be had here. Use 'fork', 'spawn' or None.")
    reason = _why_not_fork()
    method = asked or ("spawn" if reason else "fork")
    if method == "spawn":
        try:
            multiprocessing.reduction.ForkingPickler.dumps(sent)
        except Exception as error:
            why = f"because {reason}" if reason and asked is None else "because start_method='spawn' asks for it"
            raise ConfigError(
                f"workers are spawned here, {why}, and what they are sent cannot be pickled: {error}. Define `make` "
                "(and a callable `batch`) at the top of a module, not inside a function; or check before that, in a "
                "fresh process, where workers are forked."
            ) from error
    return method


def _why_not_fork() -> str:
    if "fork" not in multiprocessing.get_all_start_methods():
        return "this system cannot fork"
    if torch.cuda.is_initialized():
        return "CUDA is initialised in this process, which a fork would break"
    if dist.is_available() and dist.is_initialized():
        return "this process is a worker of another job already"
    if (num := threading.active_count()) > 1:
        return f"this process runs {num} threads, whose locks a fork would leave closed"
    return ""


def run_workers(
    world_size: int,
    body: Callable[..., None],
    args: Sequence[Any],
    *,
    timeout: float,
    start_method: StartMethod,
) -> None:
    """Call `body(rank, world_size, say, *args)` on each worker of one gloo job, and wait until all have ended.

    Raises:
        WorkerFailedError: a worker raised, died, or was not done after `timeout` seconds.
        ConfigError: a worker raised one.
    """
    context = multiprocessing.get_context(start_method)
    with tempfile.TemporaryDirectory(prefix="largebatch-") as folder:
        crew = _Crew(context, world_size, Path(folder))
        try:
            crew.start(body, args, timeout)
            crew.wait(timeout)
        finally:
            crew.end()


class _Crew:
    """The workers of one job, seen from the process that started them."""

    def __init__(self, context: Any, world_size: int, folder: Path) -> None:
        self.context = context
        self.world_size = world_size
        self.folder = folder
        self.workers: list[Any] = []
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.doing = ["the start"] * world_size
        self.done: set[int] = set()
        self.errors: dict[int, BaseException] = {}

    def start(self, body: Callable[..., None], args: Sequence[Any], timeout: float) -> None:
        for rank in range(self.world_size):
            receiver, sender = self.context.Pipe(duplex=False)
            worker = self.context.Process(
                target=_work, args=(rank, self.world_size, str(self.folder), sender, timeout, body, tuple(args))
            )
            self.pipes.append(receiver)
            self.workers.append(worker)
            worker.start()
            sender.close()

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while len(self.done) < self.world_size:
            self._listen(end - time.monotonic())
            if self.errors:
                # A worker that lost its peer says so too: leave the peer a moment to say why it went.
                patience = min(end, time.monotonic() + 2.0)
                while all(_is_peers(error) for error in self.errors.values()) and len(self.errors) < self.world_size:
                    if not self._listen(patience - time.monotonic()):
                        break
                raise self._worst()
            if time.monotonic() >= end:
                raise WorkerFailedError(self._who_hangs(timeout))

    def _listen(self, seconds: float) -> bool:
        waiting = {
            self.pipes[rank]: rank
            for rank in range(self.world_size)
            if rank not in self.done and rank not in self.errors
        }
        ready = multiprocessing.connection.wait(list(waiting), max(seconds, 0.0)) if waiting else []
        for pipe in ready:
            rank = waiting[pipe]  # pyright: ignore[reportArgumentType]
            try:
                kind, text, notes = self.pipes[rank].recv()
            except (EOFError, OSError):
                self.workers[rank].join(1.0)
                self.errors[rank] = WorkerFailedError(self._how_it_died(rank))
                continue
            if kind == "doing":
                self.doing[rank] = text
            elif kind == "done":
                self.done.add(rank)
            elif kind == "config":
                self.errors[rank] = ConfigError(text)
            else:
                error = WorkerFailedError(f"{self.doing[rank]} on worker {rank} of {self.world_size} raised {text}")
                error.add_note(notes)
                self.errors[rank] = error
        return bool(ready)

    def _worst(self) -> BaseException:
        for rank in sorted(self.errors):
            if not _is_peers(self.errors[rank]):
                return self.errors[rank]
        return self.errors[min(self.errors)]

    def _how_it_died(self, rank: int) -> str:
        code = self.workers[rank].exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        if self.doing[rank] == "the start" and self.context.get_start_method() == "spawn":
            hint = ": a spawned worker imports your script again; put what it runs under `if __name__ == '__main__':`"
        return f"worker {rank} of {self.world_size} {how} in {self.doing[rank]}{hint}."

    def _who_hangs(self, timeout: float) -> str:
        late = [rank for rank in range(self.world_size) if rank not in self.done]
        where = {rank: self._where(rank) for rank in late}
        # Who waits inside torch for the others is not who keeps them waiting.
        guilty = [rank for rank in late if where[rank] and f"{os.sep}torch{os.sep}" not in where[rank]] or late
        stands = "; ".join(
            f"worker {rank} is in {self.doing[rank]}" + (f" at {where[rank]}" if where[rank] else "") for rank in late
        )
        who = "worker" if len(guilty) == 1 else "workers"
        names = ", ".join(str(rank) for rank in guilty)
        return (
            f"{who} {names} of {self.world_size} did not end {self.doing[guilty[0]]} within timeout={timeout:g} s: "
            f"{stands}. A worker that leaves out a collective (a backward, an all-reduce, a barrier) that others make "
            "keeps them waiting; or give a longer timeout."
        )

    def _where(self, rank: int) -> str:
        """The innermost Python line in which a worker stands now, asked for by a signal."""
        if not hasattr(signal, "SIGUSR1") or not self.workers[rank].is_alive():
            return ""
        path = self.folder / f"stack-{rank}"
        if not path.exists():
            return ""
        os.kill(self.workers[rank].pid, signal.SIGUSR1)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
            frames = [line for line in lines if line.startswith("File ")]
            if frames:
                return frames[0].removeprefix("File ").replace('"', "")
            self.workers[rank].join(0.02)
        return ""

    def end(self) -> None:
        self.workers = [worker for worker in self.workers if worker.pid is not None]
        for worker in self.workers:
            try:
                os.killpg(worker.pid, signal.SIGKILL)  # with whatever it started
            except (OSError, AttributeError):
                worker.kill()
        for worker in self.workers:
            worker.join()
            worker.close()
        for pipe in self.pipes:
            pipe.close()


def _is_peers(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, WorkerFailedError) and " raised " in text and any(word in text for word in _PEER_WORDS)


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - a user's step may draw from it
    torch.manual_seed(seed)


def _work(
    rank: int, world_size: int, folder: str, sender: Any, timeout: float, body: Callable[..., None], args: Any
) -> None:
    _end_with_the_parent()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # workers are all here: nothing goes over a network
    try:
        if hasattr(signal, "SIGUSR1"):
            stack = open(Path(folder) / f"stack-{rank}", "w")  # noqa: SIM115 - open as long as the process
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=10 * timeout + 60),  # ours ends first, and says who hangs
        )
        body(rank, world_size, lambda text: sender.send(("doing", text, "")), *args)
        sender.send(("doing", "the end", ""))
        dist.barrier()
        message = ("done", "", "")
    except ConfigError as error:
        message = ("config", str(error), "")
    except BaseException as error:
        message = ("raised", _in_a_line(error), traceback.format_exc())
    sender.send(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what the parent registered at exit is not the worker's to run


def _in_a_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
    at = ""
    if theirs:
        outside = [frame for frame in theirs if f"{os.sep}site-packages{os.sep}" not in frame.filename] or theirs
        at = f" ({outside[-1].filename}, line {outside[-1].lineno})"
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}{at}"


def _end_with_the_parent() -> None:
    os.setsid()
    parent = multiprocessing.process.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
