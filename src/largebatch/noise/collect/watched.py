"""Which parameters are watched, and does anything stand between their gradients and us?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from largebatch.groups import share_out
from largebatch.noise.collect.backwards import weakly
from largebatch.noise.collect.layout import Layout, named_trainable


class Watched:
    """The parameters that are trained, each with a hook before its accumulation and one after it."""

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
        self.shares: list[int] = []
        """The worker that reads the sum of each."""
        self._model, self._layout, self._row_of = model, layout, row_of
        self._before, self._after = before, after
        self._known: dict[int, int] = {}
        self._handles: dict[int, tuple[Any, Any]] = {}
        self._attached = True

    def look(self, *, joining: bool = False) -> bool:
        """Watch parameters that are new; whether one of them has a gradient already (or, at first, any is)."""
        wanted = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if joining and all(self._known.get(id(parameter)) in self._handles for parameter in wanted):
            return False
        found = False
        for name, parameter in named_trainable(self._model, self._layout):
            index = self._known.setdefault(id(parameter), len(self.parameters))
            if index == len(self.parameters):
                self.parameters.append(parameter)
                self.rows.append(self._row_of(name))
            if self._attached and index not in self._handles:
                self._attach(index)
                found = found or not joining or parameter.grad is not None
        if len(self.shares) < len(self.parameters):
            self.shares = share_out([p.numel() for p in self.parameters], self._layout.world_size)
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
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def problem(self) -> str:
        """What is wrong if a gradient hook came after ours and may change what that has read; empty if none did."""
        if any(_comes_late(self.parameters[index], before) for index, (before, _) in self._handles.items()):
            return "a gradient hook was registered after the monitor's and may change what that has read: make it last."
        return ""

    def _attach(self, index: int) -> None:
        parameter = self.parameters[index]
        before = parameter.register_hook(weakly(self._before, index))
        after = parameter.register_post_accumulate_grad_hook(weakly(self._after, index))
        self._handles[index] = before, after


def _comes_late(parameter: Tensor, ours: Any) -> bool:
    """Whether a gradient hook, not one of ours, was registered after the one with the handle `ours`."""
    hooks: Any = parameter._backward_hooks or {}
    after = list(hooks)[list(hooks).index(ours.id) + 1 :] if ours.id in hooks else []
    functions = (getattr(hooks[key], "func", hooks[key]) for key in after)
    return any(not str(getattr(function, "__module__", "")).startswith("largebatch.") for function in functions)
