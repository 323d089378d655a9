"""Can a monitor be made with these options?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch

from largebatch.errors import ConfigError
from largebatch.noise.collect.reduce import LossScaling
from largebatch.units import Duration

MOST = 2**53
"""Counts above this are not exact in float64."""


def check_options(
    *,
    microbatch: Any,
    per_example: Any,
    loss_scaling: Any,
    unit: str,
    every: Any,
    overhead: Any,
    dataset_size: Any,
    half_life: Any,
    grad_scaler: Any,
    precondition_by: Any,
) -> None:
    """Raise ConfigError, in one sentence with the value, for an option of NoiseScaleMonitor that cannot be used."""
    if loss_scaling not in get_args(LossScaling):
        options = ", ".join(map(repr, get_args(LossScaling)))
        raise ConfigError(f"loss_scaling {loss_scaling!r} is not known. Use one of: {options}.")
    if not (isinstance(per_example, bool) or (isinstance(per_example, str) and per_example == "fast")):
        raise ConfigError(f"per_example is False, True or 'fast'; got {per_example!r}.")
    if per_example and unit == "tokens":
        raise ConfigError(
            "the tokens of a sequence are not independent, so per_example counts rows: use unit='sequences' (times "
            "the tokens in a sequence it is a noise scale in tokens)."
        )
    if per_example and microbatch is not None:
        raise ConfigError(f"per_example counts the examples itself: leave microbatch={microbatch!r} out.")
    if per_example and precondition_by is not None:
        raise ConfigError("per_example does not know an optimizer's metric: leave precondition_by out.")
    if not per_example and microbatch is None:
        raise ConfigError("say how many units a backward has, as microbatch=32, or use per_example=True.")
    if isinstance(every, str) and every != "auto":
        raise ConfigError(f"every is 'auto' or a whole number of at least 1; got {every!r}.")
    counts = {"microbatch": microbatch, "every": 1 if every == "auto" else every, "dataset_size": dataset_size}
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST):
            raise ConfigError(f"{name} is a whole number of at least 1; got {str(value)[:40]}.")
    if isinstance(overhead, bool) or not isinstance(overhead, float | int) or not 0 < overhead < 1:
        raise ConfigError(f"overhead is a share between 0 and 1; got {overhead!r}.")
    if isinstance(half_life, bool) or not isinstance(half_life, float | int | Duration | None):
        raise ConfigError(f"half_life is a number of measured steps or a Duration; got {half_life!r}.")
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise ConfigError(f"grad_scaler is a torch.amp.GradScaler; got {type(grad_scaler).__name__}.")
    if precondition_by is not None and not isinstance(precondition_by, torch.optim.Optimizer):
        raise ConfigError(f"precondition_by is an optimizer; got {type(precondition_by).__name__}.")


def as_sinks(on_measured: Any) -> tuple[Callable[[Any], Any], ...]:
    """One function or several as a tuple; raises ConfigError if one cannot be called."""
    sinks: Sequence[Any] = (on_measured,) if callable(on_measured) else on_measured
    if not isinstance(sinks, list | tuple) or not all(map(callable, sinks)):
        raise ConfigError(f"on_measured is a function of a MeasuredStep, or a list of such; got {on_measured!r}.")
    return tuple(sinks)
