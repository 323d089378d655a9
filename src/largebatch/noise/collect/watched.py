"""Which parameters are watched, and does anything stand between their gradients and us?"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.groups import share_out
from largebatch.noise.collect.backwards import weakly, weakly_at
from largebatch.noise.collect.layout import Layout, named_trainable
from largebatch.noise.collect.norms import SMALL


class Watched:
    """The parameters that are trained, each with a hook before its accumulation and some with one after it."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        row_of: Callable[[str], int],
        before: Callable[[int, Tensor], None],
        after: Callable[[int, nn.Parameter], None],
    ) -> None:
        """Watch nothing yet; `before` and `after` are methods, called with a parameter's index."""
        self.parameters: list[nn.Parameter] = []
        """In the order in which they were found."""
        self.rows: list[int] = []
        """The row of the norms that each counts in."""
        self.small: list[bool] = []
        """Whether the gradient of each is kept until the backward's end."""
        self.shares: list[int] = []
        """The worker that reads the sum of each."""
        self._model, self._layout, self._row_of = model, layout, row_of
        self._before, self._after = before, after
        self._known: dict[int, int] = {}
        self._handles: dict[int, Any] = {}
        self._witnesses: dict[int, Any] = {}
        self._attached = True
        self._modules: list[nn.Module] = []
        self._members: list[object] = []
        self._frozen: list[nn.Parameter] = []

    def look(self, *, joining: bool = False) -> bool:
        """Watch parameters that are new; whether one of them has a gradient already (or, at first, any is)."""
        if joining and self._is_as_before():
            return False
        found = False
        for name, parameter in named_trainable(self._model, self._layout):
            index = self._known.setdefault(id(parameter), len(self.parameters))
            if index == len(self.parameters):
                self.parameters.append(parameter)
                self.rows.append(self._row_of(name))
                self.small.append(parameter.dtype is torch.float32 and parameter.numel() <= SMALL)
            if self._attached and index not in self._handles:
                self._attach(index)
                found = found or not joining or parameter.grad is not None
        if len(self.shares) < len(self.parameters):
            self.shares = share_out([p.numel() for p in self.parameters], self._layout.world_size)
        self._modules = list(self._model.modules())
        self._members = self._find_members()
        self._frozen = [parameter for parameter in self._model.parameters() if not parameter.requires_grad]
        return found

    def _is_as_before(self) -> bool:
        """Whether the model has the modules and parameters of the last look; `parameters()` would take longer."""
        members = self._find_members()
        return (
            len(members) == len(self._members)
            and all(map(is_, members, self._members))
            and len(self._handles) == len(self.parameters)
            and not any(parameter.requires_grad for parameter in self._frozen)
        )

    def _find_members(self) -> list[object]:
        found: list[object] = []
        for module in self._modules:
            found += module._parameters.values()  # pyright: ignore[reportPrivateUsage]
            found += module._modules.values()  # pyright: ignore[reportPrivateUsage]
        return found

    def attach(self) -> None:
        """Put the hooks on."""
        self._attached = True
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                self._attach(index)

    def detach(self) -> None:
        """Take the hooks off."""
        self._attached = False
        for handle in (*self._handles.values(), *self._witnesses.values()):
            handle.remove()
        self._handles.clear()
        self._witnesses.clear()

    def witness(self, index: int) -> None:
        """Have the parameter call `after` from now on, this time included, when it has taken its gradient."""
        if index not in self._witnesses:
            hook = weakly(self._after, index)
            self._witnesses[index] = self.parameters[index].register_post_accumulate_grad_hook(hook)

    def problem(self) -> str:
        """What is wrong if a gradient hook came after ours and may change what that has read; empty if none did."""
        if any(_comes_late(self.parameters[index], handle) for index, handle in self._handles.items()):
            return "a gradient hook was registered after the monitor's and may change what that has read: make it last."
        return ""

    def _attach(self, index: int) -> None:
        self._handles[index] = self.parameters[index].register_hook(weakly_at(self._before, index))


def _comes_late(parameter: Tensor, ours: Any) -> bool:
    """Whether a gradient hook, not one of ours, was registered after the one with the handle `ours`."""
    hooks: Any = parameter._backward_hooks or {}
    if len(hooks) == 1:
        return False
    after = list(hooks)[list(hooks).index(ours.id) + 1 :] if ours.id in hooks else []
    functions = (getattr(hooks[key], "func", hooks[key]) for key in after)
    return any(not str(getattr(function, "__module__", "")).startswith("largebatch.") for function in functions)
