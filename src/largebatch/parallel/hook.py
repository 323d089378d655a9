"""How do DistributedDataParallel's gradients travel while the backward still runs? By a hook, several buckets at once.

    handle = pipelined_allreduce(ddp_model, algorithm="halving_doubling")
    for batch in batches:
        loss(ddp_model(batch)).backward()  # PeerLostError names a rank that is gone or hangs
        optimizer.step()

Each bucket starts when it is ready, in one of a few lanes with process groups of their own (`lanes` has the order).
While one bucket is between hosts, the next is added up inside them.

The backward itself raises the typed error: the last bucket's hook queues a callback with the autograd engine, which
runs just before DDP's own, in the same graph task (a reentrant backward has one of its own), and waits for the lanes.
An exception there leaves `backward()` as it is, where one set on the hook's future arrives as a bare RuntimeError.
Nothing is patched.
"""

from __future__ import annotations

import math
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, ParamSpec, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from largebatch.errors import ConfigError
from largebatch.parallel.algorithms import NAMES
from largebatch.parallel.calibrate import calibrate
from largebatch.parallel.choose import BACKEND
from largebatch.parallel.group_transport import GroupTransport
from largebatch.parallel.lanes import Lanes
from largebatch.parallel.lost import PATIENCE, Observed, RollCall, break_off, said_by
from largebatch.parallel.routes import Route, UnreachedError
from largebatch.parallel.topology import Topology, find_topology
from largebatch.parallel.transport import PeerLostError

P = ParamSpec("P")
Choose = Callable[[int], str]
"""The algorithm's name for a bucket of so many bytes; the same on every rank."""


class Bucket(Protocol):
    """What we need of DDP's bucket."""

    def buffer(self) -> Tensor:
        """The gradients, flat."""
        ...

    def index(self) -> int:
        """Its number in this backward."""
        ...

    def is_last(self) -> bool:
        """Whether DDP ends the backward after it."""
        ...


CHUNK = 1 << 16
"""Elements whose squares are added up at a time: in float64 they stay in the cache."""


class PipelinedAllreduce:
    """The hook of one model; made by `pipelined_allreduce`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        choose: Choose,
        *,
        concurrency: int,
        topology: Topology,
        uses_backend: bool,
        inside: str | None,
        wire: torch.dtype | None,
        timeout: float,
        on_local_sq_norm: Callable[[int, Tensor], None] | None,
    ) -> None:
        """As `pipelined_allreduce` says."""
        group: Any = model.process_group
        self._model_group = group
        ranks = dist.get_process_group_ranks(group)
        self.choose = choose
        """The algorithm's name for a bucket of so many bytes; `Choices` where "auto" has measured it."""
        self._world_size, self._on_local_sq_norm = len(ranks), on_local_sq_norm
        self._roll: RollCall | None = None
        self._lanes = Lanes(concurrency, _weakly(self._on_error))
        try:
            self._join(model, ranks, concurrency, topology, uses_backend, inside, wire, timeout)
        except BaseException:
            _end_threads(self._roll, self._lanes)
            raise
        # A thread of ours that is inside torch when the interpreter ends would abort the process.
        weakref.finalize(self, _end_threads, self._roll, self._lanes)

    def _join(
        self, model: DistributedDataParallel, ranks: list[int], concurrency: int, topology: Topology,
        uses_backend: bool, inside: str | None, wire: torch.dtype | None, timeout: float,
    ) -> None:  # fmt: skip
        """Make the groups, the roll call and the routes, and hang on DDP's buckets."""
        patience = PATIENCE * timeout
        messages = [_new_group(ranks, "gloo", patience) for _ in range(concurrency)]
        backend = dist.get_backend_config(self._model_group)
        wholes = [_new_group(ranks, backend, patience) for _ in range(concurrency)] if uses_backend else []
        place = ranks.index(dist.get_rank())
        local = [ranks[other] for other in topology.ranks_of(topology.hosts[place])]
        insides = [_new_group(local, inside, patience) for _ in range(concurrency)] if inside else []
        self._groups = [*messages, *wholes, *insides]
        # A name of its own, since the group's comes again after destroy_process_group; and a client of its own, since
        # a thread that waits for a key keeps all others of its client waiting.
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, group=messages[0], group_src=0)
        store = PrefixStore(name[0], _own_client(messages[0].get_group_store()))
        roll = RollCall(store, rank=dist.get_rank(), ranks=ranks, timeout=timeout, on_lost=_weakly(self._on_lost))
        self._roll = roll
        self._routes = [
            Route(
                lane=lane, roll=roll, topology=topology, wire=wire,
                whole=wholes[lane] if wholes else None, inside=insides[lane] if insides else None,
                transport=Observed(
                    GroupTransport(messages[lane], timeout=roll.patience), roll, lane, ranks
                ),
            )
            for lane in range(concurrency)
        ]  # fmt: skip
        self._streams: dict[int, torch.cuda.Stream] = {}
        hook: Any = lambda _, bucket: self._start(bucket)  # noqa: E731  (DDP refuses annotations that are strings)
        hook.__name__ = "allreduce_hook"  # as torch calls what leaves the mean gradient; the noise scale monitor asks
        try:
            model.register_comm_hook(None, hook)
        except RuntimeError as error:
            raise ConfigError(
                f"DDP does not take this hook ({said_by(error)}). Wrap the model anew, and give it one hook."
            ) from error

    def check(self) -> None:
        """Raise PeerLostError if a rank was lost, as the next backward would."""
        if self._lanes.error is not None:
            raise self._lanes.error

    def close(self) -> None:
        """End the threads and the process groups; the model can take no further backward with gradient sync."""
        if not self._groups:
            return
        if self._roll is not None:
            self._roll.close()
        self._lanes.close()
        if self._lanes.error is None:  # a group with a lost peer may not end by itself: its process does
            for group in self._groups:
                dist.destroy_process_group(group)
        self._groups = []
        self._lanes.stop(ConfigError("the communication hook is closed. Wrap the model in a new DDP to go on."))

    def __enter__(self) -> PipelinedAllreduce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error from inside is told to the other ranks, and one that a lost rank has caused is named."""
        is_end = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)
        if error is not None and not is_end and self._lanes.error is None and self._roll is not None:
            self._roll.confess("outside of the all-reduces", error)
        lost = self._lanes.error
        self.close()
        if isinstance(error, RuntimeError) and isinstance(lost, PeerLostError) and lost.rank != dist.get_rank():
            raise lost from (None if lost is error else error)  # such as gloo's, out of DDP's broadcast of buffers

    def _start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        values, number = bucket.buffer(), bucket.index()
        if bucket.is_last():  # DDP queues its own callback when this returns
            Variable._execution_engine.queue_callback(self._lanes.drain)  # pyright: ignore
        on_device = values.device.type == "cuda"
        done = torch.futures.Future[Tensor](devices=[values.device]) if on_device else torch.futures.Future[Tensor]()
        ready = torch.cuda.current_stream(values.device).record_event() if on_device else None

        def work(lane: int) -> None:
            if ready is None:
                self._reduce(lane, number, values)
                done.set_result(values)
                return
            with torch.cuda.stream(self._stream(lane, values.device)) as _:
                ready.wait()
                self._reduce(lane, number, values)
                done.set_result(values)

        self._lanes.submit(number, work)
        return done

    def _reduce(self, lane: int, number: int, values: Tensor) -> None:
        if self._on_local_sq_norm is not None:
            self._on_local_sq_norm(number, _sq_norm(values))
        values.div_(self._world_size)
        self._routes[lane].sum(values, self.choose(values.numel() * values.element_size()))

    def _stream(self, lane: int, device: torch.device) -> torch.cuda.Stream:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(device)
        return self._streams[lane]

    def _on_lost(self, error: PeerLostError) -> None:
        """End every wait, also of DDP's own collectives outside of the backward."""
        self._lanes.stop(error)
        for group in (*self._groups, self._model_group):
            break_off(group)

    def _on_error(self, lane: int, error: BaseException) -> None:
        """In a lane's thread: find out with the others who was lost, or tell them that it is this rank."""
        assert self._roll is not None, "lanes have work once the hook is registered"
        if isinstance(error, PeerLostError):
            is_gone = self._roll.waited(lane) < 0.9 * self._roll.patience
            self._roll.alarm((error.rank,), error.phase, said_by(error), is_gone=is_gone)
        elif isinstance(error, UnreachedError):
            self._roll.alarm(error.suspects, error.phase, error.said, is_gone=error.is_gone)
        else:
            self._lanes.stop(error)
            self._roll.confess("its own part", error)


def pipelined_allreduce(
    model: DistributedDataParallel,
    *,
    algorithm: str | Choose = "auto",
    concurrency: int = 2,
    topology: Topology | None = None,
    inside: Literal["nccl", "gloo"] | None = None,
    wire: torch.dtype | None = None,
    timeout: float = 30.0,
    on_local_sq_norm: Callable[[int, Tensor], None] | None = None,
) -> PipelinedAllreduce:
    """Average the gradients of a DDP model by our own all-reduces, several buckets at once, during the backward.

    The mean is over the ranks of the model's process group, as DDP's own. Works with gradient_as_bucket_view,
    find_unused_parameters, static_graph, `no_sync` and the noise scale monitor. What DDP itself sends (buffers before
    a forward, the first order of the buckets) still goes by its own group and within that one's timeout.

    With a power of two of ranks and "halving_doubling", gradients are the same to the bit whatever the buckets, so a
    resumed run repeats one that was not stopped; torch's own all-reduce adds in an order that depends on the buckets.

    NCCL has not been run: GPU buckets by NCCL inside a host are written, and tested with gloo at both levels only.

    Args:
        model: in DistributedDataParallel, without another communication hook; every rank calls this alike.
        algorithm: a name ("ring", "halving_doubling", "hierarchical", "hierarchical_sharded", "backend" for the process
            group's own), a function of a bucket's bytes that gives one and is the same on all ranks, or "auto": the
            fastest for each size of those timed here and now, in a few seconds (`calibrate`: in float32, one at a time,
            with no backward beside it; on GPUs, where nothing has been measured, the backend's own). To repeat a run to
            the bit, keep the handle's `choose` and pass it.
        concurrency: all-reduces that run at once, each with process groups of its own.
        topology: which ranks share a host; None finds out by the hosts' names.
        inside: backend for the reduce and the broadcast inside a host of the hierarchical ones; None is "nccl" for a
            model on GPUs, and messages of our own for one on the CPU.
        wire: dtype that our own messages are sent in, summed in float32; None sends the gradients' own. What goes by
            the backend travels in the gradients' own dtype.
        timeout: seconds within which a rank that is gone or hangs is named on all others. One that is as late as 0.7 of
            it, by whatever cause, counts as hanging.
        on_local_sq_norm: called in a thread of ours with a bucket's number and the squared norm (0-dim, float64) of
            this rank's own gradient in it, before it is averaged: the buffer is in the cache anyway.

    Returns:
        PipelinedAllreduce: to be closed at the end, or used as a context; a backward raises PeerLostError by itself.

    Raises:
        ConfigError: a value that is none of these.

    Source: Goyal et al. 2017, section 4. They ran NCCL and gloo from Caffe2's graph; we hang on DDP's buckets.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"the hook is for a model in DistributedDataParallel; got {type(model).__name__}. Wrap it first."
        )
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ConfigError(f"timeout is a positive number of seconds; got {timeout!r}.")
    if isinstance(algorithm, str) and algorithm not in (*NAMES, BACKEND, "auto"):
        raise ConfigError(
            f"there is no all-reduce called {algorithm!r}; there are {', '.join(NAMES)}, {BACKEND} and auto."
        )
    group: Any = model.process_group
    if topology is None:
        topology = find_topology(group)
    if topology.world_size != dist.get_world_size(group):
        raise ConfigError(
            f"the topology is of {topology.world_size} ranks, and the model has {dist.get_world_size(group)}."
        )
    on_gpus = any(parameter.is_cuda for parameter in model.parameters())
    if algorithm == "auto":
        algorithm = BACKEND if on_gpus else calibrate(group, topology)
    if inside is None and on_gpus and algorithm != BACKEND:
        inside = "nccl"
    choose = _always(algorithm) if isinstance(algorithm, str) else algorithm
    return PipelinedAllreduce(
        model, choose, concurrency=concurrency, topology=topology, inside=inside, wire=wire, timeout=timeout,
        uses_backend=algorithm not in NAMES, on_local_sq_norm=on_local_sq_norm,
    )  # fmt: skip


def _always(name: str) -> Choose:
    return lambda _: name


def _weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Calls the method while its object lives: threads that know it must not keep it alive."""
    known = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (found := known()) is not None:
            found(*args, **kwargs)

    return call


def _own_client(store: Store) -> Store:
    try:
        return store.clone()
    except RuntimeError:  # a store of files or of one process has no connection to share
        return store


def _end_threads(roll: RollCall | None, lanes: Lanes) -> None:
    if roll is not None:
        roll.close()
    lanes.stop(ConfigError("the process ends."))
    lanes.close()


def _new_group(ranks: list[int], backend: str, timeout: float) -> dist.ProcessGroup:
    made = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=timeout), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is among them"
    return made


def _sq_norm(values: Tensor) -> Tensor:
    """In float64: torch.dot of a million float32 is 5e-4 off where all are alike."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for chunk in values.split(CHUNK):
        wide = chunk.double()
        total += torch.dot(wide, wide)
    return total
