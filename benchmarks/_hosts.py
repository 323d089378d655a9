"""How do functions run on hosts that `hosts.sh` makes? Forked into their namespaces, one process a rank.

    with hosts(4, "1gbit") as network:
        results = network.run(2, body, "an argument")  # body(rank, "an argument") on ranks 0 to 7, two a host

Ranks are forked from a process that has torch imported, and moved into the host's network by setns(2): 32 of them start
in seconds, where 32 interpreters on two cores take a minute. A job is of gloo, and meets at a TCPStore on host 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once here instead of in every rank
import torch.distributed as dist

SCRIPT = Path(__file__).with_name("hosts.sh")
STORE = ("10.77.0.1", 29500)
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


class NoHostsError(RuntimeError):
    """This machine makes no network namespaces; the message says why."""


class RankError(AssertionError):
    """A rank raised, died or hung; the message has its traceback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Hosts that are up."""

    prefix: str
    num_hosts: int

    def run(
        self,
        ranks_per_host: int,
        body: Callable[..., Any],
        *args: Any,
        seconds: float = 120.0,
        num_hosts: int | None = None,
        timeout: float = 60.0,
    ) -> list[Any]:
        """Call `body(rank, *args)` on each rank of one job; return the results by rank.

        Args:
            ranks_per_host: ranks r * host to r * host + r - 1 are on a host.
            body: returns what pickle takes.
            args: after the rank.
            seconds: until all are to be done.
            num_hosts: the first so many take part; None for all.
            timeout: seconds of the gloo group.

        Raises:
            RankError: a rank raised, died or hung.
        """
        world_size = ranks_per_host * (num_hosts or self.num_hosts)
        found = self.survivors(ranks_per_host, body, *args, seconds=seconds, num_hosts=num_hosts, timeout=timeout)
        for rank in range(world_size):
            if isinstance(found[rank], BaseException):
                raise RankError(f"rank {rank} raised:\n{''.join(traceback.format_exception(found[rank]))}")
        return [found[rank] for rank in range(world_size)]

    def survivors(
        self,
        ranks_per_host: int,
        body: Callable[..., Any],
        *args: Any,
        lost: Collection[int] = (),
        seconds: float = 120.0,
        num_hosts: int | None = None,
        timeout: float = 60.0,
    ) -> dict[int, Any]:
        """As `run`, but ranks may die: what each that is not in `lost` returned, or the exception it raised."""
        hosts = num_hosts or self.num_hosts
        world_size = ranks_per_host * hosts
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        workers = [
            context.Process(
                target=_rank,
                args=(f"{self.prefix}{rank // ranks_per_host}", rank, world_size, timeout, sender, body, args),
                daemon=True,
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        deadline = time.monotonic() + seconds
        found: dict[int, Any] = {}
        try:
            for worker, (_, sender) in zip(workers, pipes, strict=True):
                worker.start()
                sender.close()
            for rank, (receiver, _) in enumerate(pipes):
                if rank in lost:
                    continue
                if not receiver.poll(max(0.0, deadline - time.monotonic())):
                    raise RankError(f"rank {rank} hangs")
                try:
                    found[rank] = receiver.recv()
                except EOFError:
                    raise RankError(f"rank {rank} died") from None
        finally:
            for worker in workers:
                if worker.pid is not None:
                    worker.kill()
                    worker.join()
        return found

    def link(self, host: int, state: str) -> None:
        """Pull a host's cable ("down") or put it back ("up"); a rank may do it too."""
        _script(self.prefix, "link", str(host), state)


@contextlib.contextmanager
def hosts(num_hosts: int, rate: str = "") -> Iterator[Network]:
    """Make hosts, with links of `rate` (such as "1gbit"; "" leaves them as fast as the machine), and remove them.

    Raises:
        NoHostsError: not on this machine.
    """
    _remove_leftovers()
    prefix = f"lb{os.getpid() % 10**7}x"
    _script(prefix, "up", str(num_hosts), *([rate] if rate else []))
    try:
        yield Network(prefix=prefix, num_hosts=num_hosts)
    finally:
        _script(prefix, "down")


def _remove_leftovers() -> None:
    """Remove the hosts of processes that were killed."""
    for switch in Path("/run/netns").glob("lb*xsw"):
        number = switch.name[2:-3]
        if number.isdecimal() and not Path(f"/proc/{number}").exists():
            _script(f"lb{number}x", "down")


def _script(prefix: str, *words: str) -> None:
    ended = subprocess.run([SCRIPT, *words], env=os.environ | {"PREFIX": prefix}, capture_output=True, text=True)
    if ended.returncode == 2:
        raise NoHostsError(ended.stderr.strip())
    if ended.returncode:
        raise RuntimeError(f"hosts.sh {' '.join(words)}: {ended.stderr.strip()}")


def _rank(
    host: str,
    rank: int,
    world_size: int,
    timeout: float,
    sender: Any,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    result: Any
    try:
        _move_to(host)
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "eth0"}
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(*STORE, world_size, is_master=rank == 0, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        result = body(rank, *args)
    except BaseException as error:
        result = error
        if (said := error.__traceback__) is not None:
            error.add_note("".join(traceback.format_tb(said)))
    sender.send(result)
    sender.close()
    time.sleep(600)  # the parent ends it: a rank that ended here would be one more that is lost


def _move_to(host: str) -> None:
    """Into the host's network, and under its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{host}").open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"no way into host {host}")
    socket.sethostname(host)
