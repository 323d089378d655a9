"""Where does a run stand, what has it crossed, and how much of its time does it wait for other workers' gradients?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

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


class Waiting:
    """The share of a worker's time between its last gradient of a step and the optimizer: what no backward hides.

    It is time of the host, so it says nothing where the host runs ahead of a GPU. It holds what is left of the
    all-reduces when the backward is done, also where that is waiting for a slower worker's backward, and the noise
    scale's own sums. The first step, which opens connections, does not count.
    """

    def __init__(self) -> None:
        self._last_gradient: float | None = None
        self._began: float | None = None
        self._until = self._waited = 0.0

    def watch(self, model: nn.Module) -> nn.Module:
        """Note when the gradients of `model` arrive; returns it."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
        return model

    def __enter__(self) -> Waiting:
        self._hook = register_optimizer_step_pre_hook(self._on_optimizer)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    @property
    def share(self) -> float | None:
        """Of the time from the first optimizer step to the last; None where there is no such time."""
        span = 0.0 if self._began is None else self._until - self._began
        return self._waited / span if span > 0 else None

    def _on_gradient(self, parameter: Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def _on_optimizer(self, *_: object) -> None:
        if self._last_gradient is None:  # another optimizer, or gradients that pass no hook (FSDP)
            return
        self._until = time.perf_counter()
        if self._began is None:
            self._began = self._until
        else:
            self._waited += self._until - self._last_gradient
        self._last_gradient = None
