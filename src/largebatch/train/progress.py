"""Where does a run stand, and what has it crossed?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.records.schema import RunSpec
from largebatch.train.evaluate import crossing

EVALUATION_RATIO = 1.02
"""Goals are evaluated at least every 2 % of the steps taken so far (and at every step before the 50th)."""


@dataclass(kw_only=True)
class Progress:
    """Where a run stands; all of it goes into the checkpoint."""

    step: int = 0
    units: int = 0
    next_evaluation: int = 0
    last_evaluation: tuple[int, float] | None = None
    crossings: list[float | None] = field(default_factory=list[float | None])
    epochs: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    epoch_loss: float = 0.0
    epoch_units: int = 0

    def restore(self, saved: dict[str, Any]) -> None:
        """Stand where `saved` (see `saved`) stood."""
        self.__dict__.update(saved)
        if self.last_evaluation is not None:
            step, loss = self.last_evaluation
            self.last_evaluation = (step, loss)

    def saved(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    def judge(self, spec: RunSpec, loss: float) -> str | None:
        """Record what `loss` on the goal examples crosses; return a status when the run is over."""
        step = self.step
        if not math.isfinite(loss):
            return "diverged"
        for index, goal in enumerate(spec.goals):
            if self.crossings[index] is None and loss <= goal:
                before = self.last_evaluation
                self.crossings[index] = crossing(before, (step, loss), goal) if before else float(step)
        self.last_evaluation = (step, loss)
        self.next_evaluation = max(step + 1, math.floor(step * EVALUATION_RATIO))
        if self.crossings and all(found is not None for found in self.crossings):
            return "reached"
        if spec.stop_after and all(
            found is not None or step >= bound for found, bound in zip(self.crossings, spec.stop_after, strict=True)
        ):
            return "stopped"
        return None


StepCallback = Callable[[Progress, float, NoiseScaleMonitor | None], None]
"""Called after every step with the progress, the step's mean loss and the monitor."""
