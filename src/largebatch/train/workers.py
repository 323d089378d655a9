"""Which workers does this job have, and how do they agree?

torchrun starts one process a worker and tells each its place through the environment. Small numbers (how many units,
is anybody to stop) are added up on the host by gloo, on a CPU and on GPUs alike: nothing waits for a stream.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from largebatch.errors import ConfigError, LargebatchError
from largebatch.train.meeting import meet

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_BACKENDS = ("gloo", "Gloo", "NCCL", "TCPStore", "ProcessGroup")
"""One of these is in what a backend says when a peer is gone."""
_T = TypeVar("_T")
_E = TypeVar("_E", bound=Exception)


class WorkerLostError(LargebatchError, RuntimeError):
    """Another worker ended or cannot be reached, so that this one cannot go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """This worker's place in the job, and the sums all of them take part in."""

    rank: int = 0
    """This worker, 0 to world_size - 1."""
    world_size: int = 1
    """Workers of the job."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where this worker's model lives."""
    group: dist.ProcessGroup | None = None
    """All workers, for what is on the host; None where torch.distributed was not started."""

    @property
    def is_first(self) -> bool:
        """Whether this worker writes records and speaks for all."""
        return self.rank == 0

    def sums(self, *values: float) -> tuple[float, ...]:
        """Each value added up over the workers, in float64; every worker calls it."""
        if self.group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with reporting_loss():
            dist.all_reduce(total, group=self.group)
        return tuple(total.tolist())

    def agree(self, decide: Callable[[], _T]) -> _T:
        """What `decide` returns on rank 0, on every worker, and so what it raises.

        Raises:
            LargebatchError: what rank 0 raised; the others' copy is marked, so that it is said once.
        """
        if self.group is None:
            return decide()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = decide()
            except LargebatchError as error:
                outcome[1] = error
        with reporting_loss():
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if outcome[1] is not None:
            raise outcome[1] if self.is_first else already_said(outcome[1])
        return outcome[0]

    def all_or_none(self, prepare: Callable[[], _T]) -> _T:
        """Call `prepare` on every worker; where it fails on one, it fails on all, and nobody waits in vain.

        Raises:
            Exception: its own on the workers that failed.
            WorkerLostError: on the others, which one failed.
        """
        try:
            found = prepare()
        except Exception as error:
            self.fail_together(error)
        self.fail_together(None)
        return found

    @contextlib.contextmanager
    def alike(self) -> Generator[None]:
        """Around what raises the same on every worker: rank 0 says it."""
        try:
            yield
        except LargebatchError as error:
            if not self.is_first:
                already_said(error)
            raise

    @overload
    def fail_together(self, failure: Exception) -> NoReturn: ...
    @overload
    def fail_together(self, failure: None) -> None: ...
    def fail_together(self, failure: Exception | None) -> None:
        """Go on where no worker gives a failure; every worker calls it.

        Raises:
            Exception: its own on workers that failed.
            WorkerLostError: on the others, which one failed; marked, so that it is said once.
        """
        failed = self.gather(None if failure is None else str(failure))
        if failure is not None:
            # The same sentence on several workers is said by the first of them.
            raise failure if failed.index(str(failure)) == self.rank else already_said(failure)
        if any(each is not None for each in failed):
            lost = next(rank for rank, each in enumerate(failed) if each is not None)
            raise already_said(WorkerLostError(f"worker {lost} cannot go on: {failed[lost]}"))

    def gather(self, value: Any) -> list[Any]:
        """Each worker's value, by rank, on every worker."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with reporting_loss():
            dist.all_gather_object(values, value, group=self.group)
        return values


_SAID = "said by another worker"


def already_said(error: _E) -> _E:
    """Mark an error that another worker says."""
    error.add_note(_SAID)
    return error


def is_already_said(error: BaseException) -> bool:
    """Whether another worker says this error, or the one it was raised from."""
    cause = error.__cause__
    return _SAID in getattr(error, "__notes__", ()) or (cause is not None and is_already_said(cause))


@contextlib.contextmanager
def reporting_loss() -> Generator[None]:
    """Turn what a backend raises when a peer is gone into one sentence."""
    try:
        yield
    except LargebatchError:
        raise
    except RuntimeError as error:
        said = " ".join(str(error).split())
        if not isinstance(error, dist.DistError) and not any(word in said for word in _BACKENDS):
            raise
        raise WorkerLostError(
            f"another worker of this job ended or cannot be reached ({said[:200]}). Its own message says why; run the "
            "same command again to go on from the last checkpoint."
        ) from error


@contextlib.contextmanager
def joined(device: str | None = None) -> Generator[Workers]:
    """Join the job that torchrun describes in the environment, or be the only worker where there is none.

    Args:
        device: "cpu", "cuda" or another that torch knows; None takes a GPU where one is there for each local worker.

    Raises:
        ConfigError: the environment is half set, or there is no such device.
        WorkerLostError: the workers do not find each other.

    >>> with joined("cpu") as workers:
    ...     workers.rank, workers.world_size
    (0, 1)
    """
    # An address alone says nothing of a job: many a shell and many a library leaves MASTER_PORT behind.
    given = [name for name in _PLACE if name in os.environ]
    started = any(name in given for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if started and len(given) < len(_PLACE):
        missing = ", ".join(name for name in _PLACE if name not in os.environ)
        raise ConfigError(
            f"{', '.join(given)} is set in the environment and {missing} is not, so that this worker's place is not "
            "known. Start the job by torchrun, or unset them all for one worker."
        )
    if not started:
        yield Workers(device=_checked(device or ("cuda" if torch.cuda.is_available() else "cpu"), 0))
        return
    rank, world_size, local_rank, local_size = _place()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        with _ending_at_once():
            store, _, _ = next(rendezvous("env://", rank, world_size))
            dist.init_process_group(backend, store=meet(store, rank, world_size), rank=rank, world_size=world_size)
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        if "EADDRINUSE" in said or "already in use" in said:
            raise ConfigError(
                f"port {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']} is in use, so that the workers "
                "cannot meet there. Give torchrun another --master-port, or --rdzv-endpoint=localhost:0 for a free one."
            ) from error
        raise WorkerLostError(
            f"worker {rank} of {world_size} did not find the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({said[:200]}). Check that all were started and can reach that port."
        ) from error
    try:
        with reporting_loss():
            host = dist.new_group(backend="gloo") if torch.cuda.is_available() else dist.group.WORLD
        assert isinstance(host, dist.ProcessGroup)
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
        found = Workers(rank=rank, world_size=world_size, group=host)
        place = found.all_or_none(lambda: _checked(device or ("cuda" if enough else "cpu"), local_rank))
        if place.type == "cuda":
            torch.cuda.set_device(place)
        yield replace(found, device=place)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _ending_at_once() -> Generator[None]:
    """Let SIGINT and SIGTERM end the process: Python's handlers wait for a call that waits for the other workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _place() -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size, as the environment has them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = [os.environ.get(name, "1") for name in names]  # only the last may be missing
    said = ", ".join(f"{name}={value}" for name, value in zip(names, given, strict=True))
    if not all(value.isdecimal() for value in given) or not int(given[0]) < int(given[1]):
        raise ConfigError(
            f"the environment has {said}, which is no worker's place: whole numbers, with a rank below the world size. "
            "Start the job by torchrun, or unset them all for one worker."
        )
    rank, world_size, local_rank, local_size = map(int, given)
    return rank, world_size, local_rank, local_size


def _checked(device: str, local_rank: int) -> torch.device:
    try:
        place = torch.device(device)
        if place.type == "cuda":
            if ":" not in device:
                place = torch.device("cuda", local_rank)
            torch.cuda.get_device_properties(place)
        elif place.type != "cpu":
            torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # by kind of device, torch raises each
        said = " ".join(str(error).split())
        raise ConfigError(
            f"device {device!r} cannot be used: {said[:150]} Use --device cpu, or leave it out."
        ) from error
    return place
