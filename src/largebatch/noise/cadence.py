"""How often may a step be measured, so that nobody notices?

The cost is the time that the host spends in hooks and in `step()` on measured steps; the share is that cost over
the time of a step without it. Where an accelerator does the work the host's time is the larger part of both: a dot
product takes longer to launch than to run. The calls of the hooks themselves, and what they push out of the caches, are
not timed; `MARGIN` stands for them.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence

logger = logging.getLogger(__name__)

WARMUP = 10
"""Measured steps before anything is decided: the first ones are slow for other reasons, and an interval needs 8."""
MEMORY = 9
"""Measured steps that are looked back on."""
SPIKE = 3.0
"""Times the median at which a time is cut: a pause of the machine says nothing of the next steps."""
MARGIN = 1.25
"""Times what is timed: a small CNN's steps took 16 % longer where 13 % was timed."""
SELDOM = 20
"""Intervals above this are logged: the noise scale then takes over sqrt(20) times as many steps to be as sure."""
SLOWEST = 1000
"""Measure at least one step in so many, whatever it costs."""


class Cadence:
    """Chooses every how many steps to measure, from what measuring has cost so far.

    The share is a ratio of means, as it is for the whole run, with each time cut at `SPIKE` times the median: four
    spikes in nine, however large, cannot double it, and `MEMORY` measured steps later they are forgotten. Where
    measuring costs a sixth of a step or less, at least one step in 20 is measured at an `overhead` of 0.01.

    >>> cadence = Cadence(overhead=0.01)
    >>> for _ in range(10):
    ...     cadence.note(step_seconds=1.02, cost_seconds=0.02)
    >>> cadence.every()
    3
    """

    def __init__(self, *, overhead: float) -> None:
        """Keep cost over step time at most `overhead`."""
        self._overhead = overhead
        self._costs: deque[float] = deque(maxlen=MEMORY)
        self._steps: deque[float] = deque(maxlen=MEMORY)
        self._seen = 0
        self._logged = False

    def note(self, *, step_seconds: float, cost_seconds: float) -> None:
        """Take in one measured step: its whole time, and what of it measuring took."""
        self._seen += 1
        self._costs.append(cost_seconds)
        self._steps.append(max(step_seconds - cost_seconds, 1e-9))

    def share(self) -> float:
        """Cost of a measured step over the time of a step without it; NaN before the first."""
        if not self._costs:
            return math.nan
        return _mean_without_spikes(self._costs) / _mean_without_spikes(self._steps)

    def every(self) -> int:
        """Every how many steps to measure."""
        if self._seen < WARMUP:
            return 1
        share = self.share()
        every = min(SLOWEST, max(1, math.ceil(share * MARGIN / self._overhead - 1e-9)))
        if every > SELDOM and not self._logged:
            self._logged = True
            logger.info(
                "measuring takes %.0f %% of a step, so one step in %d is measured to stay under overhead=%g; larger "
                "microbatches or a larger overhead measure more often.", 100 * share, every, self._overhead,
            )  # fmt: skip
        return every


def _mean_without_spikes(seconds: Sequence[float]) -> float:
    limit = SPIKE * statistics.median(seconds)
    return statistics.fmean(min(value, limit) for value in seconds)
