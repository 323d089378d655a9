"""How long is a DDP step whose backward is emulated, with the hook, DDP's own way, and no overlap? One job's measures.

Each layer sleeps in its backward, so that two cores stand for many hosts, and hands over a gradient of one bucket. All
ranks start each measure at a moment agreed on before, by the clock that they share; it ends when the last one is done.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.parallel.algorithms import find
from largebatch.parallel.group_transport import GroupTransport
from largebatch.parallel.hook import pipelined_allreduce
from largebatch.parallel.simulate.step import step_bound, step_time
from largebatch.parallel.topology import find_topology

OURS = ("ring", "halving_doubling")
BACKEND = "backend"
CONCURRENCY = 2
"""All-reduces at once: the hook's, and also gloo's own threads in a process group (ProcessGroupGloo, 2)."""
LEAD = 0.02
"""Seconds between the agreement on a start and the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The step to be emulated."""

    num_buckets: int
    bucket_bytes: int
    layer_s: float
    """Sleep in the backward of each bucket's layer."""
    repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Medians over the repeats, in seconds."""

    ready_s: list[float]
    """When each bucket was ready, in a step that sends nothing."""
    alone_s: dict[str, float]
    """One bucket's all-reduce by each algorithm, nothing else under way."""
    together_s: dict[str, float]
    """`CONCURRENCY` of them at once, until the last is done."""
    algorithm: str
    """What the hook takes: that of the shortest predicted step."""
    steps_s: dict[str, float]
    """Measured: "hook", "ddp", "no overlap", "compute alone"."""
    spread_s: dict[str, tuple[float, float]]
    """Quartiles of those."""

    @property
    def bound_s(self) -> float:
        """What no step is shorter than: its last bucket, and its wire, which no two all-reduces share for nothing."""
        alone, busy = self.alone_s[self.algorithm], busy_s(self.alone_s, self.together_s, self.algorithm)
        return max(self.ready_s[-1] + alone, step_bound(self.ready_s, [busy] * len(self.ready_s)))

    @property
    def one_at_a_time_s(self) -> float:
        """max over i of ready_i + sum of comm_j for j >= i, comm of all-reduces alone: several at once may beat it."""
        return step_bound(self.ready_s, [self.alone_s[self.algorithm]] * len(self.ready_s))

    @property
    def predicted_s(self) -> dict[str, float]:
        """The simulator's steps, from the table of all-reduces and the emulated backward's times."""
        at_the_end = [self.ready_s[-1]] * len(self.ready_s)
        return {
            "hook": predict(self.ready_s, self.alone_s, self.together_s, self.algorithm),
            "ddp": predict(self.ready_s, self.alone_s, self.together_s, BACKEND),
            "no overlap": predict(at_the_end, self.alone_s, self.together_s, BACKEND, concurrency=1),
        }

    def row(self) -> dict[str, Any]:
        """What a record keeps, in milliseconds and ratios."""
        predicted = self.predicted_s
        steps = {
            name: {
                "ms": _ms(seconds), "quartiles_ms": [_ms(each) for each in self.spread_s[name]],
                "over_bound": round(seconds / self.bound_s, 3),
                **({"predicted_over_measured": round(predicted[name] / seconds, 3)} if name in predicted else {}),
            }
            for name, seconds in self.steps_s.items()
        }  # fmt: skip
        return {
            "bound_ms": _ms(self.bound_s), "one_at_a_time_bound_ms": _ms(self.one_at_a_time_s),
            "algorithm": self.algorithm, "steps": steps,
            "allreduce_alone_ms": {name: _ms(seconds) for name, seconds in self.alone_s.items()},
            "allreduce_two_at_once_ms": {name: _ms(seconds) for name, seconds in self.together_s.items()},
        }  # fmt: skip


def busy_s(alone_s: dict[str, float], together_s: dict[str, float], algorithm: str) -> float:
    """The part of an all-reduce in which no other can use the wire: of c at once, each has a c-th of the time."""
    return min(alone_s[algorithm], together_s[algorithm] / CONCURRENCY)


def predict(
    ready_s: list[float],
    alone_s: dict[str, float],
    together_s: dict[str, float],
    algorithm: str,
    concurrency: int = CONCURRENCY,
) -> float:
    """The simulator's step."""
    alone, num = alone_s[algorithm], len(ready_s)
    return step_time(ready_s, [alone] * num, concurrency, [alone - busy_s(alone_s, together_s, algorithm)] * num)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


class Sleeping(torch.autograd.Function):
    """A layer whose backward takes its time."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.like = seconds, weight
        return values + 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, ctx.like.detach(), None


class Net(nn.Module):
    """Layers of one bucket each; the last one's gradient is ready first."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._seconds = work.layer_s
        self._weights = nn.ParameterList(
            nn.Parameter(torch.ones(work.bucket_bytes // 4)) for _ in range(work.num_buckets)
        )

    def forward(self, values: Tensor) -> Tensor:
        for weight in self._weights:
            values = Sleeping.apply(values, weight, self._seconds)
        return values


def measure(rank: int, work: Work) -> Measured:
    """On each rank of a job; all return the same."""
    ready: list[list[float]] = []
    noted: list[tuple[float, Tensor]] = []

    def note(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        noted.append((time.monotonic(), bucket.buffer()))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    note.__annotations__ = {}  # DDP refuses those that are strings
    silent, plain, hooked = _wrapped(work), _wrapped(work), _wrapped(work)
    silent.register_comm_hook(None, note)
    table = _Table(work)
    alone: dict[str, list[float]] = {name: [] for name in (*OURS, BACKEND)}
    together: dict[str, list[float]] = {name: [] for name in (*OURS, BACKEND)}

    def measure_table(names: Collection[str]) -> None:
        for name in names:
            alone[name].append(_timed(lambda name=name: table.one(name))[0])
            together[name].append(_timed(lambda name=name: table.several(name))[0])

    def measure_compute() -> float:
        noted.clear()
        seconds, start = _timed(lambda: _backward(silent))
        ready.append(_latest([at - start for at, _ in noted]))
        return seconds

    for _ in range(3):
        measure_table(alone)
        measure_compute()
    # The first round opens connections.
    first = {name: _median(found[1:]) for name, found in alone.items()}
    first_together = {name: _median(found[1:]) for name, found in together.items()}
    algorithm = min(first, key=lambda name: predict(ready[-1], first, first_together, name))
    handle = pipelined_allreduce(hooked, algorithm=algorithm, concurrency=CONCURRENCY)

    def without_overlap() -> None:
        noted.clear()
        _backward(silent)
        for _, buffer in noted:
            buffer.div_(dist.get_world_size())
            dist.all_reduce(buffer)

    steps: dict[str, Callable[[], float]] = {
        "compute alone": measure_compute,
        "hook": lambda: _timed(lambda: _backward(hooked))[0],
        "ddp": lambda: _timed(lambda: _backward(plain))[0],
        "no overlap": lambda: _timed(without_overlap)[0],
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(1 + work.repeats):
        for name, step in steps.items():
            seconds = step()
            if turn:  # DDP arranges its buckets anew after the first
                times[name].append(seconds)
        measure_table(dict.fromkeys((algorithm, BACKEND)))
    handle.close()
    # DDP arranges its buckets anew after the first backward.
    assert {len(moments) for moments in ready[1:]} == {work.num_buckets}, "each layer is one bucket"
    rows = zip(*ready[1:], strict=True)
    return Measured(
        ready_s=[_median(list(moments)) for moments in rows],
        alone_s={name: _median(found[1:]) for name, found in alone.items()},
        together_s={name: _median(found[1:]) for name, found in together.items()},
        algorithm=algorithm,
        steps_s={name: _median(found) for name, found in times.items()},
        spread_s={name: _quartiles(found) for name, found in times.items()},
    )


class _Table:
    """All-reduces of one bucket, by each algorithm."""

    def __init__(self, work: Work) -> None:
        groups: list[Any] = [dist.new_group() for _ in range(CONCURRENCY)]
        self._transports = [GroupTransport(group) for group in groups]
        self._topology = find_topology()
        self._buffers = [torch.ones(work.bucket_bytes // 4) for _ in range(CONCURRENCY)]

    def one(self, name: str, lane: int = 0) -> None:
        """One all-reduce, and the division that makes a mean of it."""
        buffer = self._buffers[lane]
        buffer.div_(dist.get_world_size())
        if name == BACKEND:
            dist.all_reduce(buffer)
        else:
            find(name, self._topology)(buffer, self._transports[lane])

    def several(self, name: str) -> None:
        """As many as the hook runs at once: ours in threads, gloo's in its own."""
        if name == BACKEND:
            for buffer in self._buffers:
                buffer.div_(dist.get_world_size())
            for pending in [dist.all_reduce(buffer, async_op=True) for buffer in self._buffers]:
                pending.wait()
            return
        threads = [threading.Thread(target=self.one, args=(name, lane)) for lane in range(CONCURRENCY)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _wrapped(work: Work) -> DistributedDataParallel:
    mib = work.bucket_bytes / 2**20
    return DistributedDataParallel(Net(work), bucket_cap_mb=mib, gradient_as_bucket_view=True)


def _backward(model: DistributedDataParallel) -> None:
    model(torch.zeros(1, requires_grad=True)).sum().backward()


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds until the last rank is done, and when all began."""
    start = _latest([time.monotonic()])[0] + LEAD
    time.sleep(max(0.0, start - time.monotonic()))
    work()
    return _latest([time.monotonic()])[0] - start, start


def _latest(moments: list[float]) -> list[float]:
    """Of each moment the latest of all ranks."""
    values = torch.tensor(moments, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def _median(found: list[float]) -> float:
    return statistics.median(found)


def _quartiles(found: list[float]) -> tuple[float, float]:
    if len(found) < 2:
        return found[0], found[0]
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return low, high
