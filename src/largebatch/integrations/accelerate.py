"""Is my batch size right, in a loop with Accelerate?

monitor = make_monitor(accelerator, model, microbatch=8)
...
accelerator.backward(loss)
if accelerator.sync_gradients:
    monitor.step()
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from largebatch.errors import MissingExtraError
from largebatch.noise.monitor import NoiseScaleMonitor

try:
    from accelerate import Accelerator
except ImportError as error:
    raise MissingExtraError("accelerate", "hf", "the noise scale in an Accelerate loop") from error


def make_monitor(
    accelerator: Accelerator, model: nn.Module, *, microbatch: int | None = None, **options: Any
) -> NoiseScaleMonitor:
    """A monitor for `accelerator.backward(loss)` with the mean loss of a microbatch.

    Accelerate divides the loss by `gradient_accumulation_steps`, for the short last step of an epoch too, and so it
    is taken. The monitor's state is in what `accelerator.save_state` writes. Call `monitor.step()` where
    `accelerator.sync_gradients` is true, after the backward and before clipping; it counts optimizer steps, not
    processes. Wrap uneven backwards in `with monitor.microbatch(units):`.

    Args:
        accelerator: the one that prepared `model`.
        model: as `accelerator.prepare` returned it.
        microbatch: units in one backward of one process; left out with `per_example=True`.
        options: of NoiseScaleMonitor.

    Raises:
        ConfigError: `model` was not prepared in a job of several processes, or cannot be measured.
    """
    scaling: dict[str, Any] = {"loss_scaling": "microbatch_mean", "grad_scaler": accelerator.scaler}
    monitor = NoiseScaleMonitor(model, microbatch=microbatch, **(scaling | options))
    monitor.loss_factor = 1 / accelerator.gradient_accumulation_steps
    accelerator.register_for_checkpointing(monitor)
    return monitor
