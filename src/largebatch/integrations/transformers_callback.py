"""Is my batch size right, in a Hugging Face Trainer that may have no other class, and does not clip?"""

from __future__ import annotations

from typing import Any, ClassVar

from torch.amp.grad_scaler import OptState

from largebatch.errors import ConfigError, MissingExtraError
from largebatch.noise.monitor import NoiseScaleMonitor

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError("transformers", "hf", "the noise scale in a Hugging Face Trainer") from error


class _InPlaceOfAScaler:
    """No gradient scaler, but the part of one that the monitor reads: "unscaled, by 1".

    Asked not to clip, transformers clips at infinity to log the norm: it multiplies the gradients by 1, in place and
    before any callback. The monitor refuses gradients that were touched after the last backward, unless a scaler has
    unscaled them; it has no other word for that. It then compares values, so that a true change is still found.
    """

    _per_optimizer_states: ClassVar[Any] = {0: {"stage": OptState.UNSCALED}}

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return 1.0


class NoiseScaleCallback(TrainerCallback):
    """Measures without clipping, in one process, where all microbatches are alike; else use NoiseScaleMixin.

    A callback comes after clipping, and does not see the microbatches. `microbatch` promises that every one has that
    many units, each counting the same in the loss.
    """

    monitor: NoiseScaleMonitor | None = None
    """Made when training begins; its numbers stay readable afterwards."""

    def __init__(self, *, microbatch: int, **options: Any) -> None:
        """Measure with a NoiseScaleMonitor of these `options`, with `microbatch` units in every backward."""
        self._options: dict[str, Any] = {"microbatch": microbatch, "grad_scaler": _InPlaceOfAScaler()} | options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what a callback would measure wrongly."""
        if args.max_grad_norm > 0:
            raise ConfigError(
                f"a callback sees gradients after clipping (max_grad_norm={args.max_grad_norm:g}), which would be "
                "measured as if they were the loss's: use NoiseScaleMixin, or max_grad_norm=0."
            )
        if args.fp16 or not args.dataloader_drop_last:
            raise ConfigError(
                "a callback knows neither a loss scale nor a short last batch: set fp16=False and "
                "dataloader_drop_last=True, or use NoiseScaleMixin."
            )
        self.monitor = NoiseScaleMonitor(kwargs["model"], **self._options)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the step."""
        if self.monitor is not None:
            self.monitor.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks off the model."""
        if self.monitor is not None:
            self.monitor.close()
