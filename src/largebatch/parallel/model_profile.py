"""When is each layer's gradient ready, and how large is it? Measured on a real model, which stays as it was."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from largebatch.errors import ConfigError

_ROOT = "(root)"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """A module that owns parameters."""

    name: str
    """As in `model.named_modules()`; "(root)" for the model itself."""
    num_bytes: int
    """Of its gradients."""
    seconds: float
    """From the layer before it in the backward until its own gradients are ready."""

    def __post_init__(self) -> None:
        if self.num_bytes < 0 or not (self.seconds >= 0 and math.isfinite(self.seconds)):
            raise ConfigError(
                f"a layer has bytes and seconds, 0 or more; got num_bytes={self.num_bytes}, seconds={self.seconds!r} "
                f"for {self.name!r}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """Layers in the order in which the backward reaches them."""

    name: str
    """Of the model."""
    layers: tuple[LayerProfile, ...]
    """The first is the one whose gradients are ready first: the model's last."""
    measured: bool
    """Whether seconds were measured; otherwise they are shares of one second, by arithmetic operations."""
    forward_seconds: float | None = None
    """Of the forward, where it was measured."""

    def __post_init__(self) -> None:
        if not self.layers or self.backward_seconds <= 0:
            raise ConfigError(f"the profile of {self.name!r} needs a layer whose backward takes time; it has none.")

    @property
    def num_bytes(self) -> int:
        """Of all gradients."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def backward_seconds(self) -> float:
        """Of the whole backward."""
        return math.fsum(layer.seconds for layer in self.layers)

    def scaled(self, backward_seconds: float) -> ModelProfile:
        """The same with a backward of so many seconds: another GPU, another microbatch.

        Raises:
            ConfigError: it is not a number above 0.
        """
        if not (backward_seconds > 0 and math.isfinite(backward_seconds)):
            raise ConfigError(f"a backward takes seconds, more than 0; got {backward_seconds!r}.")
        factor = backward_seconds / self.backward_seconds
        layers = tuple(replace(layer, seconds=layer.seconds * factor) for layer in self.layers)
        forward = None if self.forward_seconds is None else self.forward_seconds * factor
        return replace(self, layers=layers, forward_seconds=forward)


def profile(
    model: nn.Module, sample: Any, *, loss: Callable[[Any], Tensor] | None = None, repeats: int = 5
) -> ModelProfile:
    """Measure a model's backward layer by layer, on the device and in the mode it is in.

    Parameters and buffers are stood in for by copies while it runs: weights, gradients, running statistics, mode and
    torch's random numbers stay as they are. The model's own forward hooks do run.

    Args:
        model: any module; of a DistributedDataParallel the module inside is measured.
        sample: what `model` is called with: a tensor, a tuple of arguments, or a dict of keyword arguments. Its size is
            that of the microbatch whose step is meant.
        loss: from the model's output to a scalar; None adds up all floating-point tensors in it.
        repeats: measurements after one that warms up; each layer gets the median of its own.

    Returns:
        The layers in the order in which their gradients were ready, first to last. Parameters that got no gradient
        come last with 0 seconds, as they are known to be unused only then; frozen ones have no gradients to send.

    Raises:
        ConfigError: no parameter requires a gradient, or the output holds nothing to differentiate.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> measured = profile(model, torch.zeros(3, 4))
    >>> [(layer.name, layer.num_bytes) for layer in measured.layers]
    [('1', 72), ('0', 160)]

    Source: Goyal et al. 2017, section 4 (gradients are aggregated as soon as they are computed).
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if repeats < 1:
        raise ConfigError(f"repeats is 1 or more; got {repeats}.")
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    if not names:
        raise ConfigError(
            "no parameter of the model requires a gradient, so none would travel. Unfreeze what is trained."
        )
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        runs = [_measure(model, sample, loss or _total, device) for _ in range(repeats + 1)][1:]
    order = list(runs[0].ready)
    order += [name for name in names if name not in runs[0].ready]
    sizes = {name: value.numel() * value.element_size() for name, value in model.named_parameters()}
    layers: dict[str, int] = {}
    ends: dict[str, str] = {}
    for name in order:
        owner = name.rpartition(".")[0] or _ROOT
        layers[owner] = layers.get(owner, 0) + sizes[name]
        ends[owner] = name
    ready = {owner: statistics.median(run.at(name) for run in runs) for owner, name in ends.items()}
    found: list[LayerProfile] = []
    before = 0.0
    for owner in sorted(layers, key=ready.__getitem__):
        seconds = max(0.0, ready[owner] - before)
        before += seconds
        found.append(LayerProfile(name=owner, num_bytes=layers[owner], seconds=seconds))
    forward = statistics.median(run.forward for run in runs)
    return ModelProfile(name=type(model).__name__, layers=tuple(found), measured=True, forward_seconds=forward)


@dataclass(frozen=True, slots=True)
class _Run:
    forward: float
    backward: float
    ready: dict[str, float]

    def at(self, name: str) -> float:
        return self.ready.get(name, self.backward)


def _measure(model: nn.Module, sample: Any, loss: Callable[[Any], Tensor], device: torch.device) -> _Run:
    state: dict[str, Tensor] = {name: value.clone() for name, value in model.named_buffers()}
    leaves = {
        name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in model.named_parameters()
    }
    clock = _Clock(device)
    marks: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(lambda _, name=name: marks.update({name: clock.mark()}))
    arguments, keywords = _call_with(sample)
    begin = clock.mark()
    value = loss(functional_call(model, {**state, **leaves}, arguments, keywords))
    if not value.requires_grad:
        raise ConfigError("the model's output does not depend on a parameter that requires a gradient; pass loss=.")
    middle = clock.mark()
    value.backward()
    end = clock.mark()
    clock.finish()
    ready = {name: clock.between(middle, mark) for name, mark in marks.items()}
    return _Run(clock.between(begin, middle), clock.between(middle, end), ready)


class _Clock:
    """Marks on the device's own time line: nothing waits for a GPU until `finish`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def mark(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def between(self, first: Any, second: Any) -> float:
        return second - first if self._device is None else first.elapsed_time(second) / 1e3


def _call_with(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), {str(name): value for name, value in sample.items()}
    return (tuple(sample), {}) if isinstance(sample, (tuple, list)) else ((sample,), {})


def _total(output: Any) -> Tensor:
    found = list(_tensors(output))
    if not found:
        raise ConfigError("the model's output holds no floating-point tensor to differentiate; pass loss=.")
    return torch.stack([value.float().sum() for value in found]).sum()


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [value for part in parts for value in _tensors(part)]
