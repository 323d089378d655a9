"""In which order do the all-reduces of a step run, when several run at once? The n-th frees the (n + c)-th.

Lane l of c runs the all-reduces l, l + c, l + 2c, ... one after the other, in a thread of its own and over process
groups of its own. The order is one of numbers, not of arrival: ranks whose buckets become ready in different orders
still pair the same all-reduces, so none can wait for another that waits for it.

Source: Goyal et al. 2017, section 4 (the cyclical control input: completion of all-reduce n unblocks n + c).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from largebatch.errors import ConfigError

Work = Callable[[int], None]
"""One all-reduce, called with the number of its lane."""


class Lanes:
    """Threads that run numbered pieces of work, at most `concurrency` at once, in the cyclical order.

    The lanes of all ranks are to be given the same numbers, 0, 1, 2, ..., in each step, in any order.
    """

    def __init__(self, concurrency: int, on_error: Callable[[int, BaseException], None]) -> None:
        """Start the threads.

        Args:
            concurrency: lanes, at least 1.
            on_error: called in the lane's thread with its number and what its work raised; the lane ends then, and
                `stop` is to be called sooner or later.

        Raises:
            ConfigError: `concurrency` is not a positive integer.
        """
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise ConfigError(f"concurrency is how many all-reduces run at once, at least 1; got {concurrency!r}.")
        self._on_error = on_error
        self._changed = threading.Condition()
        self._waiting: dict[int, Work] = {}
        self._next = list(range(concurrency))
        self._running = 0
        self._closed = False
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"largebatch-lane-{lane}", daemon=True)
            for lane in range(concurrency)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def error(self) -> BaseException | None:
        """What the lanes were stopped with; None while they run."""
        return self._error

    def submit(self, number: int, work: Work) -> None:
        """Run `work` when the all-reduces before it in its lane are done; returns at once."""
        with self._changed:
            self._waiting[number] = work
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait for all that was submitted, and begin the next step with number 0.

        Raises:
            BaseException: what the lanes were stopped with.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._is_idle())
            if self._error is not None:
                raise self._error
            missing = min(self._next, default=0)
            assert not self._waiting, f"all-reduce {missing} was never submitted, {sorted(self._waiting)} wait for it"
            self._next = list(range(len(self._next)))

    def stop(self, error: BaseException) -> None:
        """Have `drain` raise `error`, now and ever after; the first call decides."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads, once what they have begun is done; after `stop`, without waiting for long."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(None if self._error is None else 1.0)

    def _is_idle(self) -> bool:
        return not self._running and not any(number in self._waiting for number in self._next)

    def _run(self, lane: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next[lane] in self._waiting)
                if self._closed:
                    return
                work = self._waiting.pop(self._next[lane])
                self._running += 1
            try:
                work(lane)
            except BaseException as error:  # whatever it was: the other ranks are to learn of it
                self._on_error(lane, error)
                return
            with self._changed:
                self._running -= 1
                self._next[lane] += len(self._next)
                self._changed.notify_all()
