"""What do the loops of others have in common? Batches of any type, and a place to log to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.noise.estimate import NoiseScale


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


def numbers(noise_scale: NoiseScale) -> dict[str, float]:
    """What a Trainer logs: the mean moments over the run, and the noise scale with its interval where it is known."""
    low, high = noise_scale.interval
    found = {"trace_cov": noise_scale.trace_cov, "grad_sq_norm": noise_scale.grad_sq_norm, "low": low, "high": high}
    found = {f"noise_scale_{name}": value for name, value in found.items()}
    found |= {"noise_scale": noise_scale.b_simple if noise_scale.resolved else None}
    return {name: value for name, value in found.items() if value is not None}
