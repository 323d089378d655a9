"""What do the loops of others have in common? Batches of any type, an end, and a place to log to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.noise.estimate import NoiseScale
from largebatch.noise.monitor import NoiseScaleMonitor


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


def num_labels(inputs: Mapping[str, Any], *, shifts: bool) -> int:
    """Labels that a Hugging Face Trainer counts in a microbatch; rows, if there are none."""
    if "labels" not in inputs:
        return num_rows(inputs)
    labels = inputs.get("shift_labels", inputs["labels"])
    return int(labels[..., 1 if shifts and "shift_labels" not in inputs else 0 :].ne(-100).sum())


def private(owner: Any, name: str) -> Any:
    """A private attribute of another library, which a release may take away."""
    found = getattr(owner, name, None)
    if found is None:
        raise ConfigError(
            f"this release of {type(owner).__module__.partition('.')[0]} has no {type(owner).__name__}.{name}, which "
            "tells when a step is complete: install one that has it, or use NoiseScaleMonitor in a loop of your own."
        )
    return found


def finish(monitor: NoiseScaleMonitor | None) -> dict[str, Any]:
    """Take the hooks off, even if the last step's numbers are refused; the state, or nothing without a monitor."""
    if monitor is None:
        return {}
    try:
        return monitor.state_dict()
    finally:
        monitor.close()


def numbers(noise_scale: NoiseScale) -> dict[str, float]:
    """What a Trainer logs: the mean moments over the run, and the noise scale with its interval where it is known."""
    low, high = noise_scale.interval
    found = {"trace_cov": noise_scale.trace_cov, "grad_sq_norm": noise_scale.grad_sq_norm, "low": low, "high": high}
    found = {f"noise_scale_{name}": value for name, value in found.items()}
    found |= {"noise_scale": noise_scale.b_simple if noise_scale.resolved else None}
    return {name: value for name, value in found.items() if value is not None}


def refuse_cut(count: int, known: int) -> None:
    """Refuse a step whose loss was divided by another number of backwards than it has."""
    if count != known:
        raise ConfigError(
            f"a step has {count} backwards, of {known} that the Trainer knows: the data ended inside an accumulation. "
            "Give the data set a length."
        )
