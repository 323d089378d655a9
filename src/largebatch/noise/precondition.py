"""How long is a gradient in the metric of an adaptive optimizer?

Adam moves by P g with P = 1 / (sqrt(v) + eps), not by g, so beside the plain moments there are those in its metric:
tr(P Sigma) and G' P G, with P from the optimizer's state after its last step. RMSprop(centered=True) takes the square
of the mean gradient off v; Adadelta has P = sqrt(u + eps) / sqrt(v + eps), with u the mean square of its steps.

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

    Groups, settings and state are looked up when P is asked for; nothing makes the host wait for an accelerator.

    Raises:
        ConfigError: (at a gradient) no group of the optimizer holds its parameter, or, after the optimizer's first
            step, its state holds no second moment.

    >>> weight = nn.Parameter(torch.tensor([2.0]))
    >>> optimizer = torch.optim.Adam([weight], lr=0.0, eps=0.0)
    >>> metric_of(optimizer)(weight) is None
    True
    >>> weight.grad = torch.tensor([4.0]); optimizer.step(); round(metric_of(optimizer)(weight).item(), 6)
    0.25
    """
    listed: list[dict[str, Any]] = []
    num_listed = -1
    settings: dict[int, dict[str, Any]] = {}

    def group_of(parameter: nn.Parameter) -> dict[str, Any]:
        # add_param_group makes the list longer, load_state_dict puts another in its place.
        nonlocal listed, num_listed, settings
        groups = optimizer.param_groups
        if groups is not listed or len(groups) != num_listed or id(parameter) not in settings:
            listed, num_listed = groups, len(groups)
            settings = {id(p): group for group in groups for p in group["params"]}
        if id(parameter) not in settings:
            raise ConfigError(
                f"no group of the {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that "
                "is trained, so it has no metric: add it to the optimizer, freeze it, or leave precondition_by out."
            )
        return settings[id(parameter)]

    def metric(parameter: nn.Parameter) -> Tensor | None:
        group = group_of(parameter)
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        if not state:
            return None
        second = next((state[name] for name in SECOND_MOMENTS if name in state), None)
        if second is None:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps no second moment of the gradients, so it has no metric: "
                "leave precondition_by out."
            )
        eps = group.get("eps", 0.0)
        if "acc_delta" in state:
            return ((state["acc_delta"] + eps) / (second + eps)).sqrt()
        if "grad_avg" in state:
            second = second - state["grad_avg"].square()
        if "betas" in group and "step" in state:  # RMSprop does not correct the bias of its average
            step = torch.as_tensor(state["step"])
            wide = step if step.device.type == "mps" else step.double()  # 1 - 0.999 has few digits in float32
            # The count is mostly a CPU tensor: divided by where it is, since a copy would wait for the accelerator.
            second = second / (1 - group["betas"][1] ** wide).to(second.dtype)
        return 1 / (second.sqrt() + eps)

    return metric
