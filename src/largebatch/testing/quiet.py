"""How is one suspect (clipping, batch norm, randomness) taken out of a user's own step, without touching its code?

All of it happens in a worker that exists for the experiment, around the user's `step`:

- clipping: backward starts from a gradient 2^-20 times as large, so that no norm reaches a limit. Every gradient is
  2^-20 times what it was, exactly but for underflow, and ratios between set-ups stay what they are.
- batch norm: every layer with running statistics normalises with those, whatever mode the step put it in.
- randomness: dropout passes its input on, and uniform, normal and Bernoulli draws are constants.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Suspect = Literal["clipping", "batch norm", "randomness"]
SUSPECTS: tuple[Suspect, ...] = ("clipping", "batch norm", "randomness")

_EACH_ALONE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_SHRINK = {torch.float16: 2.0**-8}
_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_, torch.alpha_dropout, torch.feature_dropout,
}  # fmt: skip
_CONSTANTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.rand: lambda *args, **kwargs: torch.full(_shape(args), 0.5, **_plain(kwargs)),
    torch.randn: lambda *args, **kwargs: torch.zeros(_shape(args), **_plain(kwargs)),
    torch.rand_like: lambda tensor, **kwargs: torch.full_like(tensor, 0.5, **kwargs),
    torch.randn_like: torch.zeros_like,
    torch.bernoulli: lambda tensor, *_, **__: torch.ones_like(tensor),
    Tensor.bernoulli_: lambda tensor, *_, **__: tensor.fill_(1.0),
    Tensor.uniform_: lambda tensor, *_, **__: tensor.fill_(0.5),
    Tensor.normal_: lambda tensor, *_, **__: tensor.fill_(0.0),
}
"""What each draw becomes: the same for every example, so that it does not matter which worker has it."""


@contextmanager
def without(suspects: frozenset[Suspect], model: nn.Module) -> Generator[None]:
    """Run what is inside without these suspects."""
    handles: list[Any] = []
    if "batch norm" in suspects:
        for module in batch_norms(model):
            handles += _hold_statistics(module)
    seen: AbstractContextManager[Any] = nullcontext()
    if suspects & {"clipping", "randomness"}:
        seen = _Quiet("clipping" in suspects, "randomness" in suspects)
    try:
        with seen:
            yield
    finally:
        for handle in handles:
            handle.remove()


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The layers whose output for one example depends on the others: those that keep running statistics."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "running_mean", None), Tensor)
        and isinstance(getattr(module, "running_var", None), Tensor)
        and not isinstance(module, _EACH_ALONE)
    ]


def _hold_statistics(module: nn.Module) -> list[Any]:
    modes: list[bool] = []

    def before(module: nn.Module, args: Any) -> None:
        modes.append(module.training)
        module.training = False

    def after(module: nn.Module, args: Any, output: Any) -> None:
        module.training = modes.pop()

    return [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]


class _Quiet(TorchFunctionMode):
    """Sees every call of torch's functions in the step, and changes the few that draw or start a backward."""

    def __init__(self, shrink: bool, no_draws: bool) -> None:
        super().__init__()
        self.shrink = shrink
        self.no_draws = no_draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.shrink and func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if self.no_draws:
            if func in _DROPOUTS:
                return args[0] if args else kwargs["input"]
            if func in _CONSTANTS:
                return _CONSTANTS[func](*args, **kwargs)
            if func is F.multi_head_attention_forward:
                bound = inspect.signature(func).bind(*args, **kwargs)
                bound.arguments["dropout_p"] = 0.0
                return func(*bound.args, **bound.kwargs)
            if func is F.scaled_dot_product_attention:
                args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
                kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)

    def _backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        start = torch.ones_like(loss) if gradient is None else gradient
        with self:  # a checkpointed layer runs forward again in here
            torch.autograd.backward(
                (loss,), (start * _SHRINK.get(loss.dtype, 2.0**-20),), retain_graph, create_graph, inputs=inputs
            )


def _shape(args: Any) -> Any:
    return args[0] if len(args) == 1 and not isinstance(args[0], int) else args


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "generator"}
