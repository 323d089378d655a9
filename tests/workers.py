"""Run a function on several real gloo workers, and bring home what each returned.

Workers are forked from the test's process (torch is imported there already, so a pair starts in a third of a second)
and meet through a file. A worker's exception is raised in the test, with its traceback; a hang ends after `seconds`.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once here instead of in every worker
import torch.distributed as dist


class WorkerError(AssertionError):
    """A worker raised; the message is its traceback."""


def on_workers(world_size: int, body: Callable[..., Any], *args: Any, seconds: float = 120.0) -> list[Any]:
    """Call `body(rank, *args)` on each of `world_size` workers of one gloo job; return the results by rank.

    Results travel pickled: return plain numbers, strings and dataclasses.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        workers = [
            context.Process(
                target=_run, args=(rank, world_size, str(Path(folder) / "meet"), sender, body, args), daemon=True
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for worker, (_, sender) in zip(workers, pipes, strict=True):
            worker.start()
            sender.close()
        try:
            return [_receive(rank, receiver, seconds) for rank, (receiver, _) in enumerate(pipes)]
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _receive(rank: int, receiver: Any, seconds: float) -> Any:
    if not receiver.poll(seconds):
        raise WorkerError(f"worker {rank} did not end within {seconds} s")
    try:
        fine, value = receiver.recv()
    except EOFError:
        raise WorkerError(f"worker {rank} died") from None
    if not fine:
        raise WorkerError(f"worker {rank} raised:\n{value}")
    return value


def _run(rank: int, world_size: int, meet: str, sender: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        result = (True, body(rank, *args))
        dist.barrier()
    except BaseException:
        result = (False, traceback.format_exc())
    sender.send(result)
    sender.close()
    os._exit(0)  # what the parent registered at exit is not the worker's to run
