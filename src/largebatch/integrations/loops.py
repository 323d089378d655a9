"""What do the loops of others have in common? They divide each microbatch's mean loss by the accumulation.

They do so whatever the sizes are, and however few microbatches the last step of an epoch has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.noise.estimate import NoiseScale
from largebatch.noise.moments import StepMoments
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.noise.scaler import loss_scale


class DividedLoss:
    """What a loop multiplies the loss by, in the form of the monitor's `grad_scaler`: scale / accumulation.

    It never says that gradients are unscaled: a step is measured before a loop gets to that.
    """

    def __init__(self, accumulation: Callable[[], int], scaler: Any = None) -> None:
        """Ask `accumulation` at each step for the divisor, and `scaler`, a GradScaler or None, for its scale."""
        self._accumulation, self._scaler = accumulation, scaler

    def is_enabled(self) -> bool:
        """Whether the loss is multiplied by something: always."""
        return True

    @property
    def _scale(self) -> Tensor | None:
        """On the scaler's device, so that the host never waits for it; None where it is a number."""
        scale = loss_scale(self._scaler)
        return scale / self._accumulation() if isinstance(scale, Tensor) else None

    def get_scale(self) -> float:
        """The scale as a number."""
        return float(loss_scale(self._scaler)) / self._accumulation()


def divided_loss(accumulation: Callable[[], int], scaler: Any) -> dict[str, Any]:
    """What to tell the monitor about backwards of mean loss / accumulation."""
    return {"loss_scaling": "microbatch_mean", "grad_scaler": DividedLoss(accumulation, scaler)}


class _GivenUp(Exception):
    pass


def give_up(monitor: NoiseScaleMonitor) -> AbstractContextManager[None]:
    """Have the monitor skip this step, on all workers: for a microbatch without a unit, in place of its context."""
    with suppress(_GivenUp), monitor.microbatch(1):
        raise _GivenUp
    return nullcontext()


def num_rows(batch: Any) -> int:
    """Rows of the first tensor in a batch: the examples in it, if dim 0 counts them.

    >>> import torch
    >>> num_rows({"x": [torch.zeros(3, 2), torch.zeros(5)]})
    3
    """
    if isinstance(batch, Tensor) and batch.dim():
        return len(batch)
    for part in batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ():
        with suppress(ConfigError):
            return num_rows(part)
    raise ConfigError(
        f"a batch of type {type(batch).__name__} holds no tensor with rows: say how many units a batch has (units_of=)."
    )


def numbers(noise_scale: NoiseScale, moments: StepMoments | None = None) -> dict[str, float]:
    """What to log: moments, of the step or averaged over the run, and B_simple with its interval where it is known."""
    of = moments or noise_scale
    b_simple, (low, high) = noise_scale.b_simple, noise_scale.interval
    found = {"trace_cov": of.trace_cov, "grad_sq_norm": of.grad_sq_norm}
    found |= {"b_simple": b_simple, "low": low, "high": high} if noise_scale.resolved else {}
    return {name: value for name, value in found.items() if value is not None}
