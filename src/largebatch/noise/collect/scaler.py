"""What has a gradient scaler done to the gradients?

Asked of torch.amp.GradScaler's own state: its public `get_scale` would make the host wait for an accelerator.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def loss_scale(scaler: Any) -> Tensor | float:
    """What it multiplied the loss by: a 0-dim tensor on its device, or a number; 1 without a scaler."""
    if scaler is None or not scaler.is_enabled():
        return 1.0
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) else float(scaler.get_scale())


def is_unscaled(scaler: Any) -> bool:
    """Whether it has unscaled an optimizer's gradients since its last update."""
    if scaler is None or not scaler.is_enabled():
        return False
    states = getattr(scaler, "_per_optimizer_states", {})
    return any(getattr(state["stage"], "name", "") == "UNSCALED" for state in states.values())
