"""What must happen to a velocity that has the learning rate inside, when the rate changes?

Form (9) keeps the rate outside: u <- m u + g, w <- w - lr u. Form (10) has it inside: v <- m v + lr g, w <- w - v.
They are one optimizer as long as the rate stays, v = lr u. When it goes from lr to lr' the history in v is in units
of lr, and form (10) is form (9) again once it is put into units of lr': v <- m (lr'/lr) v + lr' g.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.errors import ConfigError
from largebatch.recipe.scaling import is_number

_kernels: Any = torch  # its foreach kernels, which it documents, are private names to a type checker


class VelocitySGD(Optimizer):
    """Momentum SGD with the learning rate inside the velocity: form (10), with momentum correction.

    With the correction every step equals that of `torch.optim.SGD` (form 9) under any learning rates, to rounding;
    without it the two part at the first change of the rate: after going from lr to lr' the weights differ by
    m (lr'/lr - 1) v. All parameters are updated by torch's foreach kernels, a few launches a step.

    A step at a learning rate of 0 moves no weight. No factor takes a history out of units of 0, so with the correction
    the velocity stays in units of the last rate above 0 and still takes the gradient in, as form (9) does; what
    follows equals form (9). Without the correction eq. (10) is taken at its word: the gradient is lost, and the old
    velocity goes on moving the weights.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, >= 0 and finite, a number; a schedule may replace it at every step.
        momentum: m, in [0, 1).
        nesterov: look ahead, w <- w - (m v + lr g) with the new v; needs momentum > 0.
        weight_decay: lambda of the loss term (lambda/2)|w|^2, >= 0; added to the gradient, as torch's SGD does.
        momentum_correction: scale the velocity by lr'/lr when the rate changes. False is for showing what it is
            worth.

    Raises:
        ConfigError: a number is out of range, or a gradient is sparse.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = VelocitySGD([weight], lr=0.1, momentum=0.5)
    >>> for lr in (0.1, 1.0):
    ...     optimizer.param_groups[0]["lr"] = lr
    ...     weight.grad = torch.tensor([1.0])
    ...     optimizer.step()
    >>> weight  # 1 - 0.1 - (0.5 * 10 * 0.1 + 1)
    Parameter containing:
    tensor([-0.6000], requires_grad=True)

    Source: Goyal 2017, eq. (10) and remark 2. Nesterov's form is torch's, with lr taken inside; eq. (10) has none.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        momentum_correction: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "momentum_correction": momentum_correction,
        }
        super().__init__(cast("Any", params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, its settings checked."""
        settings = {**self.defaults, **param_group}
        check_lr(settings["lr"])
        check_momentum(settings["momentum"], nesterov=settings["nesterov"])
        check_weight_decay(settings["weight_decay"])
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; gradients are left as they are.

        Args:
            closure: computes the loss again, and its gradients; None takes those that are there.

        Returns:
            The closure's loss, or None.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            check_lr(group["lr"])
            for (lr_inside, keep, _), params in self._by_factor(group).items():
                _update(params, [self.state[p]["velocity"] for p in params], group, lr_inside, keep)
        return loss

    def _by_factor(self, group: dict[str, Any]) -> dict[tuple[float, float, type], list[Tensor]]:
        """Parameters by (the rate that their velocity is in from now on, the factor that their old one takes, kind).

        Almost always one entry. A parameter without a gradient sits the step out, as in torch's SGD, and its velocity
        stays in the units of the rate of its own last step.
        """
        lr, correct = group["lr"], group["momentum_correction"]
        buckets = defaultdict[tuple[float, float, type], list[Tensor]](list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise ConfigError(
                    f"VelocitySGD takes dense gradients; got one of layout {parameter.grad.layout}, for a parameter of "
                    f"shape {tuple(parameter.shape)}. Use torch.optim.SGD, or an embedding with sparse=False."
                )
            state = self.state[parameter]
            if not state:
                state["velocity"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["velocity_lr"] = 0.0  # in units of no rate yet
            before = state["velocity_lr"]
            lr_inside, factor = lr, 1.0
            if correct:
                lr_inside = lr or before or 1.0
                factor = lr_inside / before if before else 1.0
            state["velocity_lr"] = lr_inside
            buckets[lr_inside, group["momentum"] * factor, type(parameter.data)].append(parameter)
        return buckets


def _update(
    params: list[Tensor], velocities: list[Tensor], group: dict[str, Any], lr_inside: float, keep: float
) -> None:
    """V <- keep v + lr_inside d, then w <- w - v, or w - (m v + lr_inside d); d is the decayed gradient."""
    grads = [cast(Tensor, parameter.grad) for parameter in params]
    if group["weight_decay"]:
        grads = _kernels._foreach_add(grads, params, alpha=group["weight_decay"])
    _kernels._foreach_mul_(velocities, keep)
    _kernels._foreach_add_(velocities, grads, alpha=lr_inside)
    if lr_inside != group["lr"]:
        return  # the rate is 0 and the velocity waits in units of another
    if group["nesterov"]:
        _kernels._foreach_add_(params, velocities, alpha=-group["momentum"])
        _kernels._foreach_add_(params, grads, alpha=-lr_inside)
    else:
        _kernels._foreach_sub_(params, velocities)


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Call an optimizer's closure, which needs gradients; None is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_lr(lr: float) -> None:
    """Raise ConfigError unless `lr` is a finite number of at least 0."""
    if not (is_number(lr) and lr >= 0 and math.isfinite(lr)):
        raise ConfigError(f"lr is a finite number of at least 0, not a tensor; got {lr!r}.")


def check_momentum(momentum: float, *, nesterov: bool) -> None:
    """Raise ConfigError unless `momentum` is in [0, 1), and above 0 for Nesterov's form."""
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise ConfigError(f"momentum is in [0, 1); got {momentum!r}.")
    if nesterov and momentum == 0:
        raise ConfigError("nesterov=True needs a momentum above 0; got momentum=0. Set nesterov=False.")


def check_weight_decay(weight_decay: float) -> None:
    """Raise ConfigError unless `weight_decay` is a finite number of at least 0."""
    if not (is_number(weight_decay) and weight_decay >= 0 and math.isfinite(weight_decay)):
        raise ConfigError(f"weight_decay is a finite number of at least 0; got {weight_decay!r}.")
