"""Run a gloo job in which ranks are lost on purpose, and bring home what those that live say.

As `tests.workers`, but over a TCPStore that rank 0 keeps, as in a real job, and a rank may die or stop.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once here instead of in every worker
import torch.distributed as dist


def survivors(
    world_size: int, lost: Collection[int], body: Callable[..., Any], *args: Any, seconds: float = 60.0
) -> dict[int, Any]:
    """Call `body(rank, *args)` on each rank; what each that is not in `lost` returned, or the error it raised.

    Results travel pickled. A rank that says nothing within `seconds`, all together, fails the test.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    workers = [
        context.Process(target=_run, args=(rank, world_size, port, sender, body, args), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for worker, (_, sender) in zip(workers, pipes, strict=True):
        worker.start()
        sender.close()
    deadline = time.monotonic() + seconds
    found: dict[int, Any] = {}
    try:
        for rank, (receiver, _) in enumerate(pipes):
            if rank in lost:
                continue
            assert receiver.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} hangs"
            found[rank] = receiver.recv()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return found


def _run(rank: int, world_size: int, port: int, sender: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        result = body(rank, *args)
    except BaseException as error:
        result = error
    sender.send(result)
    sender.close()
    time.sleep(600)  # the test ends it: a rank that ended here would be one more that is lost
