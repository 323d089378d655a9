"""How often may a step be measured, so that nobody notices?

The cost is the time that the host spends in hooks and in `step()` on measured steps; the share is that cost over
the time of a step without it. On an accelerator the host's time is the larger part of both.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

WARMUP = 3
"""Measured steps at first, before anything is decided: the first ones are slow for other reasons."""
MEMORY = 9
"""Steps that the medians look back on."""
SLOWEST = 1000
"""Measure at least one step in so many, whatever it costs."""


class Cadence:
    """Chooses every how many steps to measure, from what measuring has cost so far.

    >>> cadence = Cadence(overhead=0.01)
    >>> for _ in range(9):
    ...     cadence.note(step_seconds=1.02, cost_seconds=0.02)
    >>> cadence.every()
    2
    """

    def __init__(self, *, overhead: float) -> None:
        """Keep cost over step time at most `overhead`."""
        self._overhead = overhead
        self._costs: deque[float] = deque(maxlen=MEMORY)
        self._steps: deque[float] = deque(maxlen=MEMORY)
        self._seen = 0

    def note(self, *, step_seconds: float, cost_seconds: float) -> None:
        """Take in one measured step: its whole time, and what of it measuring took."""
        self._seen += 1
        self._costs.append(cost_seconds)
        self._steps.append(max(step_seconds - cost_seconds, 1e-9))

    def every(self) -> int:
        """Every how many steps to measure."""
        if self._seen < WARMUP:
            return 1
        share = statistics.median(self._costs) / statistics.median(self._steps)
        return min(SLOWEST, max(1, math.ceil(share / self._overhead - 1e-9)))
