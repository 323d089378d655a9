"""Which rank was lost? Those that live answer a roll call, and all agree on one verdict.

A rank that notices cannot know: it may wait for one that itself waits for the lost one. So it raises an alarm in the
job's store. A thread of every rank watches for it and answers with what its rank waits for. A rank that does not answer
is lost. If all answer, the waits are followed from rank to rank, to the one that waits for nobody: it hangs outside the
all-reduce. The first verdict in the store is everyone's.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.parallel.transport import PeerLostError, Pending, Transport

PATIENCE = 0.7
"""Share of the timeout that a rank waits for a message before it raises the alarm."""
GRACE = 0.2
"""Share of the timeout that ranks have to answer."""
_NEVER_SENT = 2**31 - 1
"""A tag."""
_ALARM, _VERDICT, _HERE = "largebatch/alarm", "largebatch/verdict", "largebatch/here"


class Store(Protocol):
    """What we need of torch's stores."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there; returns at once."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        ...

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Write `value` if the key holds `expected`, which "" is where there is none; what it holds then."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """What the first rank to notice saw."""

    by: int
    """That rank."""
    suspects: tuple[int, ...]
    """The rank it waited for; several where a collective does not tell; itself where it raised an error."""
    phase: str
    """What it was doing."""
    said: str
    """What its transport said."""
    is_gone: bool
    """Whether the connection ended, instead of staying silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """What one lane of a rank waits for."""

    ranks: tuple[int, ...]
    phase: str
    since: float
    """Of that rank's own clock."""


def judge(alarm: Alarm, answers: Mapping[int, Sequence[Wait]], ranks: Sequence[int]) -> tuple[int, str]:
    """The lost rank and the phase it was lost in, from what the ranks that live answered.

    Args:
        alarm: who noticed what.
        answers: of each rank that answered, its waits, the oldest first.
        ranks: all of them.

    >>> alarm = Alarm(by=0, suspects=(3,), phase="step 2", said="no message", is_gone=False)
    >>> waits = {0: [Wait(ranks=(3,), phase="step 2", since=0)], 3: [Wait(ranks=(2,), phase="step 1", since=0)], 1: []}
    >>> judge(alarm, waits, range(4))  # rank 3 only waits for rank 2, which is silent
    (2, 'step 1')
    """
    missing = [rank for rank in ranks if rank not in answers]
    if missing:
        lost = next((rank for rank in missing if rank in alarm.suspects), missing[0])
        return lost, _phase_of(lost, alarm, answers)
    if alarm.suspects == (alarm.by,):
        return alarm.by, alarm.phase
    lost, seen = alarm.suspects[0], set[int]()
    if len(alarm.suspects) > 1:
        lost = next((rank for rank in alarm.suspects if not answers[rank]), lost)
    while answers[lost] and lost not in seen:
        seen.add(lost)
        lost = answers[lost][0].ranks[0]
    return lost, _phase_of(lost, alarm, answers)


def _verdict(
    alarm: Alarm, answers: Mapping[int, Sequence[Wait]], ranks: Sequence[int], waited: float
) -> dict[str, object]:
    """What PeerLostError takes."""
    rank, phase = judge(alarm, answers, ranks)
    seen = f"rank {alarm.by} said: {alarm.said}"
    if rank not in answers:
        said = f"it did not answer within {waited:.2g} s; {seen}"
    else:
        said = alarm.said if rank == alarm.by else f"it lives, and takes no part; {seen}"
    return {"rank": rank, "phase": phase, "said": said}


def _phase_of(lost: int, alarm: Alarm, answers: Mapping[int, Sequence[Wait]]) -> str:
    if lost in alarm.suspects:
        return alarm.phase
    found = (wait.phase for waits in answers.values() for wait in waits if lost in wait.ranks)
    return next(found, alarm.phase)


class RollCall:
    """A thread that answers for this rank, and hears of the verdict."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        on_lost: Callable[[PeerLostError], None],
    ) -> None:
        """Start to watch.

        Args:
            store: of the job, under a prefix that no other roll call uses.
            rank: this rank.
            ranks: all that take part, in the numbering of the whole job.
            timeout: seconds in which all of it is to be decided, the waiting for a message included.
            on_lost: called once, with the verdict, in a thread of ours.
        """
        self.patience = PATIENCE * timeout
        """Seconds a message may take."""
        self._store, self._rank, self._ranks, self._on_lost = store, rank, tuple(ranks), on_lost
        self._grace, self._pause = GRACE * timeout, min(0.25, timeout / 50)
        self._waits: dict[int, Wait] = {}
        self._own: Alarm | None = None
        self._closed, self._decided, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="largebatch-roll-call", daemon=True)
        self._thread.start()

    def waits(self, lane: int, ranks: tuple[int, ...], phase: str) -> None:
        """Note that a lane begins to wait."""
        self._waits[lane] = Wait(ranks=ranks, phase=phase, since=time.monotonic())

    def waited(self, lane: int) -> float:
        """Seconds that a lane's wait under way has lasted; 0 where it waits for nothing."""
        wait = self._waits.get(lane)
        return 0.0 if wait is None else time.monotonic() - wait.since

    def goes_on(self, lane: int) -> None:
        """Note that it waits no more."""
        self._waits.pop(lane, None)

    def alarm(self, suspects: tuple[int, ...], phase: str, said: str, *, is_gone: bool) -> None:
        """Have all ranks find out who was lost; returns when they have, or when the store is silent too."""
        self._own = Alarm(by=self._rank, suspects=suspects, phase=phase, said=said, is_gone=is_gone)
        self._woken.set()
        if not self._decided.wait(1.4 * self._grace):
            self._decide(self._without_store("does not answer"))

    def confess(self, phase: str, error: BaseException) -> None:
        """Tell the others that this rank raised an error and takes part no more; it may be by a rank that is lost."""
        self.alarm((self._rank,), phase, f"it raised {type(error).__name__}: {error}", is_gone=True)

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        self._woken.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._grace)

    def _watch(self) -> None:
        try:
            while not self._closed.is_set():
                if self._own is not None:
                    self._store.compare_set(_ALARM, "", json.dumps(asdict(self._own)))
                if self._store.check([_ALARM]):
                    self._decide(self._call_roll())
                    return
                self._woken.wait(self._pause)
                if self._own is None:
                    self._woken.clear()
            if not self._decided.is_set():  # one that has left is not one that is lost: it waits for nobody
                self._store.set(f"{_HERE}/{self._rank}", "[]")
        except (RuntimeError, OSError) as error:  # torch's DistError: the store's host is gone
            if not self._closed.is_set():
                self._decide(self._without_store(f"said {str(error).splitlines()[0][:200]!r}"))

    def _call_roll(self) -> PeerLostError:
        waits = sorted(self._waits.copy().values(), key=lambda wait: wait.since)
        self._store.set(f"{_HERE}/{self._rank}", json.dumps([asdict(wait) for wait in waits]))
        alarm = _alarm(self._store.get(_ALARM))
        started = time.monotonic()
        keys = {rank: f"{_HERE}/{rank}" for rank in self._ranks}
        while not self._store.check([_VERDICT]):
            waited = time.monotonic() - started
            if self._store.check(list(keys.values())) or waited > self._grace / 3:
                here = [rank for rank, key in keys.items() if self._store.check([key])]
                missing = [rank for rank in self._ranks if rank not in here]
                is_plain = alarm.is_gone and set(missing) <= set(alarm.suspects)
                if is_plain or not missing or waited > self._grace:
                    answers = {rank: _waits(self._store.get(keys[rank])) for rank in here}
                    self._store.compare_set(_VERDICT, "", json.dumps(_verdict(alarm, answers, self._ranks, waited)))
            time.sleep(self._pause / 4)
        return PeerLostError(**json.loads(self._store.get(_VERDICT)))

    def _without_store(self, what: str) -> PeerLostError:
        """The verdict of this rank alone: a store that is gone says that its host, that of rank 0, is."""
        own, waits = self._own, list(self._waits.copy().values())
        phase = own.phase if own is not None else waits[0].phase if waits else "none was under way here"
        suspect = 0
        if own is not None and own.suspects != (self._rank,) and (self._rank == 0 or own.is_gone):
            suspect = own.suspects[0]
        return PeerLostError(suspect, phase, f"the job's store, which the host of rank 0 keeps, {what}")

    def _decide(self, error: PeerLostError) -> None:
        with self._lock:
            if self._decided.is_set():
                return
            self._decided.set()
        self._on_lost(error)


def _alarm(text: bytes) -> Alarm:
    found: dict[str, Any] = json.loads(text)
    found["suspects"] = tuple(found["suspects"])
    return Alarm(**found)


def _waits(text: bytes) -> list[Wait]:
    waits: list[dict[str, Any]] = json.loads(text)
    return [Wait(ranks=tuple(wait["ranks"]), phase=wait["phase"], since=wait["since"]) for wait in waits]


def break_off(group: Any) -> None:
    """Have everything that waits in a process group end in an error, in whatever thread.

    gloo's own `abort` leaves what waits waiting (torch 2.14). But a receive that times out closes all connections of
    its group, so one is started that nobody sends to.
    """
    if group.size() == 1:
        return
    try:
        group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _NEVER_SENT).wait(timedelta(milliseconds=10))
    except RuntimeError:  # as it was to be; NCCL does not take a tensor on the CPU
        if "nccl" in str(dist.get_backend_config(group)):
            group.abort()


def said_by(error: RuntimeError) -> str:
    """What torch said, without the place in gloo's source and its guesses.

    >>> said_by(RuntimeError("[/gloo/pair.cc:5] Read error [::1]:6: Connection reset. This is typically caused by"))
    'Read error [::1]:6: Connection reset'
    """
    said = " ".join(str(error).split())
    if isinstance(error, PeerLostError):
        said = said.split(" of an all-reduce (", 1)[-1].split("). Its own message", 1)[0]
    return re.sub(r"\[\S*\.\w+:\d+\] ", "", said).split(". This is typically", 1)[0][:200]


class Observed:
    """A transport that tells the roll call what it waits for."""

    def __init__(self, transport: Transport, roll: RollCall, lane: int, ranks: Sequence[int]) -> None:
        """Of `transport`, in lane `lane`; `ranks` are its ranks in the numbering of the whole job."""
        self._transport, self._roll, self._lane, self._ranks = transport, roll, lane, tuple(ranks)

    @property
    def rank(self) -> int:
        """As the transport's."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """As the transport's."""
        return self._transport.world_size

    def send(self, values: Tensor, to: int, phase: str) -> Pending:
        """As the transport does."""
        return _ObservedPending(self._transport.send(values, to, phase), self._roll, self._lane, self._ranks[to], phase)

    def receive(self, values: Tensor, source: int, phase: str) -> Pending:
        """As the transport does."""
        pending = self._transport.receive(values, source, phase)
        return _ObservedPending(pending, self._roll, self._lane, self._ranks[source], phase)


@dataclass(frozen=True, slots=True)
class _ObservedPending:
    pending: Pending
    roll: RollCall
    lane: int
    rank: int
    phase: str

    def wait(self) -> None:
        self.roll.waits(self.lane, (self.rank,), self.phase)
        self.pending.wait()
        self.roll.goes_on(self.lane)  # not after an error: what this rank waits for is its answer to the roll call
