"""How far may each layer move in one step, given how long its weights are?

A large batch wants a large learning rate, and the layer whose update is longest beside its weights limits it. LARS
and LAMB scale the update of each parameter to the norm of that parameter. Norm layers and biases are left out: their
parameters are few, start at 0 or 1, and a ratio of norms says nothing about them. A group leaves itself out by
`layerwise=False`; `largebatch.recipe.optimizer` makes the groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.errors import ConfigError
from largebatch.recipe.momentum import check_lr, check_momentum, check_weight_decay, loss_of
from largebatch.recipe.scaling import is_number

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class LARS(Optimizer):
    """Momentum SGD whose every layer has its own rate: layer-wise adaptive rate scaling.

    v <- m v + lr trust (g + lambda w), w <- w - v, where trust = trust_coefficient |w| / (|g| + lambda |w|), and 1
    where |w| or |g| is 0. The rate is inside the velocity, as published, and no momentum correction is made when it
    changes (Goyal 2017, remark 2): trust changes at every step anyway. Warm up gradually.

    Args:
        params: parameters or groups; a group with `layerwise=False` has trust = 1 throughout.
        lr: global learning rate, >= 0; published runs use 1 to 32, an order above SGD's.
        momentum: m, in [0, 1).
        nesterov: look ahead, w <- w - (m v + lr trust (g + lambda w)), our addition; needs momentum > 0.
        weight_decay: lambda, >= 0; published 5e-4.
        trust_coefficient: > 0; published 0.001, below 0.1 as a rule.

    Raises:
        ConfigError: a number is out of range, or a gradient is sparse.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([0.0, 2.0])
    >>> LARS([weight], lr=10.0, trust_coefficient=0.01).step()
    >>> weight  # moved by lr * trust_coefficient * |w| = 0.5 along the gradient
    Parameter containing:
    tensor([3.0000, 3.5000], requires_grad=True)

    Source: You 2017 (Large Batch Training of Convolutional Networks), Algorithm 1, with the weight decay in the ratio.
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "layerwise": True,
        }
        super().__init__(cast("Any", params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, its settings checked."""
        settings = {**self.defaults, **param_group}
        check_lr(settings["lr"])
        check_momentum(settings["momentum"], nesterov=settings["nesterov"])
        check_weight_decay(settings["weight_decay"])
        _check_above_0("trust_coefficient", settings["trust_coefficient"])
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; gradients are left as they are."""
        loss = loss_of(closure)
        for group in self.param_groups:
            check_lr(group["lr"])
            momentum, decay = group["momentum"], group["weight_decay"]
            for parameter in group["params"]:
                if (grad := _dense_grad(parameter, self)) is None:
                    continue
                update = (grad.add(parameter, alpha=decay) if decay else grad).mul(group["lr"])
                if group["layerwise"]:
                    length, slope = _norm(parameter), _norm(grad)
                    trust = group["trust_coefficient"] * length / (slope + decay * length)
                    update.mul_(_or_1(trust, where=(length > 0) & (slope > 0)))
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                velocity = state["velocity"].mul_(momentum).add_(update)
                parameter.sub_(update.add_(velocity, alpha=momentum) if group["nesterov"] else velocity)
        return loss


class LAMB(Optimizer):
    """Adam whose every layer moves in proportion to its weights: layer-wise adaptive moments.

    u = mhat / (sqrt(vhat) + eps) + lambda w, w <- w - lr (|w| / |u|) u, with Adam's bias-corrected moments mhat and
    vhat; the ratio is 1 where |w| or |u| is 0. The paper's phi is the identity here.

    Args:
        params: parameters or groups; a group with `layerwise=False` has a ratio of 1 throughout: AdamW's update.
        lr: learning rate, >= 0: the share of its length that a layer moves in a step; published 0.00044 to 0.01.
        betas: decay of the first and the second moment, each in [0, 1).
        eps: added to the root of the second moment, > 0.
        weight_decay: lambda, >= 0; published 0.01. Inside the ratio.

    Raises:
        ConfigError: a number is out of range, a gradient is sparse, or weights are complex.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([0.0, 2.0])
    >>> LAMB([weight], lr=0.1).step()
    >>> weight  # moved by lr * |w| = 0.5
    Parameter containing:
    tensor([3.0000, 3.5000], requires_grad=True)

    Source: You 2019 (Large Batch Optimization for Deep Learning), Algorithm 2.
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "layerwise": True}
        super().__init__(cast("Any", params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, its settings checked."""
        settings = {**self.defaults, **param_group}
        check_lr(settings["lr"])
        check_betas(settings["betas"])
        check_weight_decay(settings["weight_decay"])
        _check_above_0("eps", settings["eps"])
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; gradients are left as they are."""
        loss = loss_of(closure)
        for group in self.param_groups:
            check_lr(group["lr"])
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                if (grad := _dense_grad(parameter, self)) is None:
                    continue
                _check_squares(parameter)
                state = self.state[parameter]
                if not state:
                    state["num_steps"] = 0
                    for moment in ("first_moment", "second_moment"):
                        state[moment] = torch.zeros_like(
                            parameter, dtype=_wide(parameter), memory_format=torch.preserve_format
                        )
                grad = grad.to(_wide(parameter))
                state["num_steps"] += 1
                first, second = state["first_moment"], state["second_moment"]
                first.mul_(beta1).add_(grad, alpha=1 - beta1)
                second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = second.div(1 - beta2 ** state["num_steps"]).sqrt_().add_(group["eps"])
                update = first.div(1 - beta1 ** state["num_steps"]).div_(root)
                if decay:
                    update.add_(parameter, alpha=decay)
                if group["layerwise"]:
                    length, stride = _norm(parameter), _norm(update)
                    update.mul_(_or_1(length / stride, where=(length > 0) & (stride > 0)))
                parameter.sub_(update, alpha=group["lr"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; the moments of half-precision weights keep their float32."""
        super().load_state_dict(state_dict)  # which casts them to the dtype of the weights
        saved_ids = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved_ids, parameters, strict=True):
            saved = state_dict["state"].get(key, {})
            for moment in ("first_moment", "second_moment"):
                if moment in saved and parameter.dtype != _wide(parameter):
                    wide = saved[moment].to(device=parameter.device, dtype=_wide(parameter), copy=True)
                    self.state[parameter][moment] = wide


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ConfigError unless `betas` is two numbers in [0, 1)."""
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas are two numbers, each in [0, 1); got {betas!r}.")


def _check_above_0(name: str, value: float) -> None:
    if not (is_number(value) and value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} is a finite number above 0; got {value!r}.")


def _dense_grad(parameter: Tensor, optimizer: Optimizer) -> Tensor | None:
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise ConfigError(
            f"{type(optimizer).__name__} takes dense gradients; got one of layout {parameter.grad.layout}, for a "
            f"parameter of shape {tuple(parameter.shape)}. Use an embedding with sparse=False."
        )
    return parameter.grad


def _check_squares(parameter: Tensor) -> None:
    if parameter.is_complex():  # its square is no size: (1 + i) (1 + i) = 2i
        raise ConfigError(
            f"LAMB takes real weights; got {parameter.dtype}, for a parameter of shape {tuple(parameter.shape)}. "
            "Train torch.view_as_real of it, or use LARS."
        )


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=_wide(tensor))  # of a sharded parameter, the norm of the whole


def _wide(tensor: Tensor) -> torch.dtype:
    """At least float32: squares of half precision overflow above 256."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _or_1(ratio: Tensor, *, where: Tensor) -> Tensor:
    return torch.where(where, ratio, torch.ones_like(ratio))
