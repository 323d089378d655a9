"""How long is a gradient in the metric of an adaptive optimizer?

Adam moves by P g with P = 1 / (sqrt(v) + eps), not by g, so beside the plain moments there are those in its metric:
tr(P Sigma) and G' P G, with P from the optimizer's last step.

Source: McCandlish et al. 2018, sec. 2.2 and the noise scale of a preconditioned update: for P near the inverse
Hessian B_noise becomes tr(P Sigma) / (G' P G). Their own results with it are mixed (footnotes 7 and 10).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError

SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")
"""Where an optimizer's state keeps v, the first that is there: Adam with amsgrad, Adam(W) and kin, RMSprop."""


def metric_of(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter], Tensor | None]:
    """A function that gives P, in the shape of its parameter, or None before the optimizer's first step.

    Raises:
        ConfigError: (at the first gradient after the optimizer's first step) its state holds no second moment.

    >>> weight = nn.Parameter(torch.tensor([2.0]))
    >>> optimizer = torch.optim.Adam([weight], lr=0.0, eps=0.0)
    >>> metric_of(optimizer)(weight) is None
    True
    >>> weight.grad = torch.tensor([4.0]); optimizer.step(); round(metric_of(optimizer)(weight).item(), 6)
    0.25
    """
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def metric(parameter: nn.Parameter) -> Tensor | None:
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        if not state:
            return None
        second = next((state[name] for name in SECOND_MOMENTS if name in state), None)
        if second is None:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps no second moment of the gradients, so it has no metric: "
                "leave precondition_by out."
            )
        group = settings.get(id(parameter), {})
        if "betas" in group and "step" in state:  # RMSprop does not correct the bias of its average
            step = torch.as_tensor(state["step"])
            wide = step if step.device.type == "mps" else step.double()  # 1 - 0.999 has few digits in float32
            second = second / (1 - group["betas"][1] ** wide).to(second)
        return 1 / (second.sqrt() + group.get("eps", 0.0))

    return metric
