"""Is my batch size right, in a Lightning Trainer? `Trainer(callbacks=[NoiseScaleCallback()])` measures it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from largebatch.errors import ConfigError, MissingExtraError
from largebatch.integrations.loops import num_rows
from largebatch.integrations.metrics import as_metrics
from largebatch.noise.monitor import NoiseScaleMonitor

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingExtraError("lightning", "lightning", "the Lightning callback") from error


class NoiseScaleCallback(Callback):
    """Measures the steps of automatic optimization, before unscaling and clipping, on all workers together.

    Assumes that `training_step` returns the mean loss over its batch. Lightning divides that by
    `accumulate_grad_batches`, for uneven batches and an epoch's short last step too, and so it is taken. Each measured
    step goes to the loggers as `noise/...`; the state is in the checkpoint. A step whose last batch gave no loss
    (None) is neither measured nor counted.
    """

    def __init__(self, *, units_of: Callable[[Any], int] = num_rows, **options: Any) -> None:
        """`units_of` counts the units in a batch, as training_step gets it; `options` are NoiseScaleMonitor's."""
        self.monitor: NoiseScaleMonitor | None = None
        """Made at a fit's first batch; its numbers stay readable afterwards."""
        self._units_of, self._options = units_of, options
        self._state: dict[str, Any] = {}
        self._units = 0
        self._backward = ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what is not measured, and begin anew unless the trainer goes on."""
        if not pl_module.automatic_optimization or isinstance(trainer.optimizers[0], torch.optim.LBFGS):
            raise ConfigError(
                "manual optimization and LBFGS decide which backwards make a step, which a callback does not see: use "
                "largebatch.NoiseScaleMonitor in training_step."
            )
        self.monitor, self._state = None, self._state if trainer.global_step else {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch's units."""
        self._units = self._units_of(batch)
        if self.monitor is None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scaling = {"loss_scaling": "microbatch_mean", "grad_scaler": scaler}
            sinks = (*self._options.get("on_measured", ()), lambda step: self._log(trainer, step))
            options: dict[str, Any] = {"microbatch": self._units} | scaling | self._options | {"on_measured": sinks}
            self.monitor = NoiseScaleMonitor(trainer.strategy.model, **options)
            if self._state:
                self.monitor.load_state_dict(self._state)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Tell the monitor how many units the backward is over."""
        if self.monitor is not None:
            self._backward.enter_context(self.monitor.microbatch(self._units))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Measure after a step's last backward: gradients are averaged by then, neither unscaled nor clipped."""
        self._backward.close()
        if self.monitor is not None and not trainer.fit_loop._should_accumulate():
            self.monitor.loss_factor = 1 / trainer.accumulate_grad_batches
            self.monitor.step()

    def _log(self, trainer: Any, step: Any) -> None:
        found = as_metrics(step, None if self.monitor is None else self.monitor.noise_scale)
        for logger in trainer.loggers:
            logger.log_metrics(found, step=step.step - 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the hooks off the model."""
        if self.monitor is not None:
            self._state = self.monitor.state_dict()
            self.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """What Lightning saves with a checkpoint."""
        return self._state if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint at the next fit."""
        self._state = state_dict
