"""Is my batch size right, in a Lightning Trainer? `Trainer(callbacks=[NoiseScaleCallback()])` measures it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from largebatch.errors import ConfigError, MissingExtraError
from largebatch.integrations.loops import finish, num_rows, private
from largebatch.integrations.metrics import as_metrics
from largebatch.noise.monitor import NoiseScaleMonitor

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingExtraError("lightning", "lightning", "the Lightning callback") from error
UNSEEN = "manual optimization and LBFGS hide which backwards make a step: use NoiseScaleMonitor in training_step."


class NoiseScaleCallback(Callback):
    """Measures the steps of automatic optimization, before unscaling and clipping, on all workers together.

    Assumes that `training_step` returns the mean over its batch. Lightning divides it by `accumulate_grad_batches`, for
    uneven batches and an epoch's short last step too. Each measured step goes to the loggers as `noise/...`; the state
    is in the checkpoint. A step whose last batch gave no loss (None) is neither measured nor counted.
    """

    def __init__(self, *, units_of: Callable[[Any], int] = num_rows, **options: Any) -> None:
        """`units_of` counts the units in a batch, as training_step gets it; `options` are NoiseScaleMonitor's."""
        self.monitor: NoiseScaleMonitor | None = None  # made at a fit's first batch; readable afterwards
        self._units_of = None if options.get("per_example") else units_of  # the monitor counts examples itself
        self._options, self._state, self._backward = options, dict[str, Any](), ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what is not measured, and begin anew unless the trainer goes on."""
        if not pl_module.automatic_optimization or isinstance(trainer.optimizers[0], torch.optim.LBFGS):
            raise ConfigError(UNSEEN)
        self._accumulates = private(trainer.fit_loop, "_should_accumulate")  # False in a step's last backward
        finish(self.monitor)
        self.monitor, self._backward, self._state = None, ExitStack(), self._state if trainer.global_step else {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch's units."""
        self._units = self._units_of(batch) if self._units_of is not None else None
        if self.monitor is None:
            options: dict[str, Any] = {"microbatch": self._units, "loss_scaling": "microbatch_mean"} | self._options
            options.setdefault("grad_scaler", getattr(trainer.precision_plugin, "scaler", None))
            options["on_measured"] = (*options.get("on_measured", ()), partial(self._log, trainer))
            self.monitor = NoiseScaleMonitor(trainer.strategy.model, **options)
            if self._state:
                self.monitor.load_state_dict(self._state)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Tell the monitor how many units the backward is over."""
        if self.monitor is not None and self._units is not None:
            self._backward.enter_context(self.monitor.microbatch(self._units))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Measure after a step's last backward: gradients are averaged by then, neither unscaled nor clipped."""
        self._backward.close()
        if self.monitor is not None and not self._accumulates():
            self.monitor.loss_factor = 1 / trainer.accumulate_grad_batches
            self.monitor.step()

    def _log(self, trainer: Any, step: Any) -> None:
        found = as_metrics(step, None if self.monitor is None else self.monitor.noise_scale)
        for logger in trainer.loggers:
            logger.log_metrics(found, step=step.step - 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the hooks off the model."""
        self._state = finish(self.monitor) or self._state

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave a backward that did not end, and take the hooks off the model."""
        self._backward.__exit__(type(exception), exception, exception.__traceback__)
        self._state = finish(self.monitor) or self._state

    def state_dict(self) -> dict[str, Any]:
        """What Lightning saves with a checkpoint."""
        return self._state if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint at the next fit."""
        self._state = state_dict
