"""How do hooks neither keep alive what they report to, nor hide the time that they take?"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any
from weakref import WeakMethod


class Clock:
    """Host time spent in hooks; one inside another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, method: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
        """`method` with its first arguments, on the clock."""

        def hook(*rest: Any) -> Any:
            before, started = self.seconds, perf_counter()
            try:
                return method(*bound, *rest)
            finally:
                self.seconds = before + perf_counter() - started

        return hook

    def weakly(self, method: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
        """The same, without keeping the method's object alive; once that is gone, the hook returns at once.

        torch's hooks after accumulation are out of the garbage collector's sight: what they hold, and the model
        with it, would never be freed.
        """
        reference = WeakMethod(method)

        def hook(*rest: Any) -> Any:
            found = reference()
            if found is None:
                return None
            before, started = self.seconds, perf_counter()
            try:
                return found(*bound, *rest)
            finally:
                self.seconds = before + perf_counter() - started

        return hook
