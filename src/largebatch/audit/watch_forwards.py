"""Does the model evaluate as it trains: with a batch's own statistics, or with dropout?

Told by torch's hooks on all modules, which leave no trace in a model that is copied or saved meanwhile.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from largebatch.audit.findings import Finding


class ForwardRecorder:
    """Takes down the layers of a model that train in a forward without gradients."""

    def __init__(self, model: nn.Module) -> None:
        """Look at the layers of `model` while `looking` is open."""
        self.names: dict[str, int] = {}
        """Layer by name -> its forwards in training mode without gradients, in an evaluation."""
        self._named = {id(module): name for name, module in model.named_modules()}
        self._entered: list[nn.Module] = []
        self._is_evaluation = False

    @contextmanager
    def looking(self) -> Generator[None]:
        """Look while the context is open."""

        def enter(module: nn.Module, _args: Any) -> None:
            if torch.compiler.is_compiling() or id(module) not in self._named:
                return
            if not self._entered:
                self._is_evaluation = not torch.is_grad_enabled() and _is_evaluated(module)
            self._entered.append(module)
            if self._is_evaluation:
                # Inside a compiled module no hook is called.
                for layer in module.modules() if hasattr(module, "_orig_mod") else (module,):
                    self._note(layer)

        def leave(module: nn.Module, _args: Any, _output: Any) -> None:
            if not torch.compiler.is_compiling() and self._entered and self._entered[-1] is module:
                self._entered.pop()

        # torch.compile warns of hooks on all modules; a warning may be an error in the user's run.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        ignored = warnings.filters[0]
        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if ignored in warnings.filters:
                warnings.filters.remove(ignored)  # pyright: ignore[reportAttributeAccessIssue]

    def _note(self, layer: nn.Module) -> None:
        if _is_in_training(layer, self._entered[0].training):
            name = self._named.get(id(layer), "") or type(layer).__name__
            self.names[name] = self.names.get(name, 0) + 1

    def new_step(self) -> None:
        """Forget forwards that were left in an unforeseen way."""
        self._entered.clear()

    def findings(self) -> list[Finding]:
        """LB203, if a layer was seen."""
        if not self.names:
            return []
        (name, count), num = next(iter(self.names.items())), len(self.names)
        others = f" and {num - 1} more" if num > 1 else ""
        seen = f"Layer {name!r}{others} ran {count} forward(s) without gradients in training mode."
        return [Finding(code="LB203", seen=seen)]


def _is_evaluated(module: nn.Module) -> bool:
    """Whether a forward without gradients, begun in `module`, evaluates it."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return False  # a momentum teacher, a frozen copy, trains on purpose
    # momentum=None averages over all batches: that recomputes the statistics, as swa_utils.update_bn does
    recomputes = any(_has_statistics(layer) and layer.momentum is None for layer in module.modules())
    return not recomputes and not _is_checkpointed()


def _has_statistics(layer: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(layer, _BatchNorm) and layer.training and layer.track_running_stats


def _is_checkpointed() -> bool:
    """Whether activation checkpointing runs this forward, whose gradient it will take later."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


def _is_in_training(layer: nn.Module, model_trains: bool) -> bool:
    if isinstance(layer, _DropoutNd):  # dropout alone in an evaluated model is meant: Monte Carlo dropout
        return layer.training and layer.p > 0 and model_trains
    return _has_statistics(layer)
