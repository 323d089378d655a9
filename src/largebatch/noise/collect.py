"""How long was each microbatch's gradient, and how long is their sum?

Hooks on the parameters see every gradient in the moment it arrives; nothing but its squared norm is kept.
A tensor hook reads the norm, the hook after accumulation commits it: `torch.autograd.grad` fires the first and
not the second, so a probe leaves no trace. The norms stay on their device until `take`, which brings all of
a step to the host in one transfer per device.

A backward whose graph task runs backwards of its own (reentrant activation checkpointing), or several losses
with a backward each, are one microbatch only inside a `microbatch` context.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from largebatch.errors import ConfigError

CHUNK = 2**18
"""Elements in one dot product. A float32 dot of so many is right to about 1e-6; of 25 M to 1e-4 only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """The squared norms of one step, on the host, of gradients as they were accumulated."""

    units: tuple[int, ...]
    """Units of each microbatch, shape (K,)."""
    sq_norms: tuple[float, ...]
    """Squared norm of what each microbatch added to the gradients, shape (K,)."""
    sq_norm_step: float
    """Squared norm of the gradients: of the sum of what the microbatches added."""
    exact: bool
    """False where a microbatch had a second backward that was not expected; its norm is not known."""


@dataclass(kw_only=True, slots=True)
class _Arrival:
    """What a tensor hook read, until the accumulation commits it."""

    backward: int
    read: list[Tensor] | Tensor
    """Dot products of the gradient; its copy while buffering."""
    fresh: bool
    """Whether the parameter held no gradient before."""
    stale: list[Tensor]
    """Dot products of what it held though this step had not given it anything yet: to be 0."""


@dataclass(kw_only=True, slots=True)
class _Microbatch:
    units: int
    explicit: bool = False
    dots: list[Tensor] = field(default_factory=list)
    """Dot products whose sum is its squared norm."""
    seen: set[int] = field(default_factory=set)
    """Parameters (by index) that have a gradient in it."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Only while buffering: the sum of its gradients per parameter, freed when the context ends."""


class GradientCollector:
    """Reads squared gradient norms per microbatch, and of their sum, without touching either.

    One backward is one microbatch of `default_units`. Inside `microbatch(units)` all backwards together are
    one. Such a context costs nothing extra while each parameter gets one gradient in it. The first time one
    gets a second, that step is given up (`exact` is False), and from then on contexts add their gradients up
    in a buffer of their own, so that |g1 + g2|^2 is exact: one copy of the gradients, held while the context
    is open.

    Hooks that change gradients must be registered before this one. Parameters that are frozen now are not
    watched. A step is what came since the gradients were last set to None.
    """

    def __init__(self, parameters: Iterable[Tensor], *, default_units: int) -> None:
        """Hook into every parameter that requires a gradient; raises ConfigError if there is none."""
        self.enabled = True
        """While False, hooks return at once and nothing is read."""
        self.buffering = False
        """Whether contexts add up their gradients (a second backward inside one has been seen)."""
        self._default_units = default_units
        watched = list(parameters)
        self._parameters = [parameter for parameter in watched if parameter.requires_grad]
        self._frozen = [parameter for parameter in watched if not parameter.requires_grad]
        if not self._parameters:
            raise ConfigError("the model has no parameter that requires a gradient: there is nothing to measure.")
        if any(hasattr(parameter, "to_local") for parameter in self._parameters):
            raise ConfigError("sharded parameters (DTensor) are not supported yet: monitor an unsharded model.")
        self._context: _Microbatch | None = None
        self._pending: dict[int, _Arrival] = {}
        self._reset()
        self._handles = [
            handle
            for index, parameter in enumerate(self._parameters)
            for handle in (
                parameter.register_hook(lambda grad, index=index: self._on_gradient(index, grad)),
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._on_accumulated(index)),
            )
        ]

    @contextmanager
    def microbatch(self, units: int) -> Generator[None, None, None]:
        """All backwards inside are one microbatch of `units` units."""
        if not isinstance(units, int) or units < 1:
            raise ConfigError(f"a microbatch has a whole number of units, at least 1; got units={units!r}.")
        if self._context is not None:
            raise ConfigError("a microbatch context is already open: one microbatch cannot hold another.")
        self._context = current = _Microbatch(units=units, explicit=True)
        try:
            yield
        except BaseException:
            self._exact = False
            raise
        finally:
            self._context = None
            self._pending.clear()
        if not self.enabled:
            return
        if not current.seen:
            raise ConfigError(f"no backward reached the parameters inside this microbatch({units}) context.")
        for total in current.sums.values():
            current.dots += sq_norm_dots(total)
        current.sums.clear()
        self._microbatches.append(current)

    def take(self) -> Collected:
        """Return this step's squared norms and start the next step; call before the gradients are changed.

        Raises:
            ConfigError: no backward since the last step; gradients that are gone, or that held something
                before the step's first backward; backwards that look like parts of one microbatch.
        """
        microbatches, stale, exact = self._microbatches, self._stale, self._exact
        arrived, versions = sorted(self._arrived), self._versions
        if self._context is not None:
            raise ConfigError("step() was called inside a microbatch context: leave it first.")
        self._reset()
        if not microbatches:
            raise ConfigError("no backward has been seen since the last step: call step() once after each step's last.")
        implicit = [microbatch.seen for microbatch in microbatches if not microbatch.explicit]
        if len(implicit) > 1 and not set.intersection(*implicit):
            raise ConfigError(
                f"{len(implicit)} backwards reached no parameter in common, so they are parts of fewer microbatches "
                "(several losses, or reentrant checkpointing). Wrap each microbatch's backwards in "
                "`with monitor.microbatch(units=n):`."
            )
        if any(parameter.grad is not None for parameter in self._frozen):
            raise ConfigError(
                "a parameter that was frozen when the monitor was made has a gradient: make a monitor after unfreezing."
            )
        gradients = [self._parameters[index].grad for index in arrived]
        if any(gradient is None for gradient in gradients):
            raise ConfigError("gradients are gone: call step() after the last backward and before zero_grad().")
        held = zip(arrived, gradients, strict=True)
        if any(gradient is not None and gradient._version != versions[index] for index, gradient in held):
            raise ConfigError(
                "gradients were changed after the last backward: call step() before clipping, unscaling and "
                "optimizer.step()."
            )
        step = [dot for gradient in gradients if gradient is not None for dot in sq_norm_dots(gradient)]
        *norms, norm_step, norm_stale = _to_host([*(microbatch.dots for microbatch in microbatches), step, stale])
        if norm_stale != 0:
            raise ConfigError("gradients were not zero before this step's first backward: call zero_grad() each step.")
        return Collected(
            units=tuple(microbatch.units for microbatch in microbatches),
            sq_norms=tuple(norms),
            sq_norm_step=norm_step,
            exact=exact,
        )

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._pending.clear()
        self._reset()

    def _reset(self) -> None:
        self._microbatches: list[_Microbatch] = []
        self._by_backward: dict[int, _Microbatch] = {}
        self._arrived: set[int] = set()
        self._versions: dict[int, int] = {}
        self._stale: list[Tensor] = []
        self._exact = True

    def _on_gradient(self, index: int, grad: Tensor) -> None:
        """Read one gradient on its way to the parameter; whether it stays is not known yet."""
        if not self.enabled:
            return
        held = self._parameters[index].grad
        with torch.no_grad():
            self._pending[index] = _Arrival(
                backward=_backward_id(),
                read=grad.detach().clone() if self.buffering and self._context is not None else sq_norm_dots(grad),
                fresh=held is None or self._zeroed(index, held),
                stale=[] if held is None or index in self._arrived else sq_norm_dots(held),
            )

    def _zeroed(self, index: int, held: Tensor) -> bool:
        """Whether gradients that had arrived were set to 0 in place since: the step was given up and begins again."""
        if index not in self._arrived or held._version == self._versions[index]:
            return False
        if torch.count_nonzero(held):
            raise ConfigError("gradients were changed between two backwards of one step: clip and scale after step().")
        return True

    def _on_accumulated(self, index: int) -> None:
        """Commit what `_on_gradient` read, now that the parameter has taken the gradient."""
        arrival = self._pending.pop(index, None)
        if arrival is None or arrival.backward != _backward_id():
            return
        current = self._context or self._by_backward.get(arrival.backward)
        if current is None:
            current = self._by_backward[arrival.backward] = _Microbatch(units=self._default_units)
            self._microbatches.append(current)
        if arrival.fresh and index in self._arrived:
            self._forget_all_but(current, arrival.backward, index)
        self._stale += arrival.stale
        if isinstance(arrival.read, Tensor):
            with torch.no_grad():
                total = current.sums.get(index)
                current.sums[index] = arrival.read if total is None else total.add_(arrival.read)
        elif index in current.seen:
            self.buffering, self._exact = True, False
        else:
            current.dots += arrival.read
        current.seen.add(index)
        self._arrived.add(index)
        held = self._parameters[index].grad
        self._versions[index] = -1 if held is None else held._version

    def _forget_all_but(self, current: _Microbatch, backward: int, index: int) -> None:
        """The gradients were set to None since they came: the step begins with the microbatch that runs now."""
        if index in current.seen:
            raise ConfigError("gradients were set to None inside a microbatch context: zero them between steps only.")
        versions = self._versions
        self._reset()
        self._arrived = set(current.seen)
        self._versions = {seen: versions[seen] for seen in current.seen}
        if current is not self._context:
            self._microbatches.append(current)
            self._by_backward[backward] = current


def sq_norm_dots(tensor: Tensor) -> list[Tensor]:
    """Dot products, of at most CHUNK elements each, whose sum (in float64) is the squared norm of `tensor`.

    Args:
        tensor: any shape, dtype and device. A dense one is read in the order of its memory, whatever its
            strides, so channels-last is not copied; half precision is widened to float32 chunk by chunk.

    Returns:
        0-dim tensors on the device of `tensor`, float32 or wider; no host sync.

    >>> [dot.item() for dot in sq_norm_dots(torch.tensor([[1.0, 2.0], [2.0, 4.0]]))]
    [25.0]
    """
    chunks = flat_view(tensor.detach()).split(CHUNK)
    return [torch.dot(chunk, chunk) for chunk in map(_widen, chunks)]


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of `tensor` in one dim, in the order of memory: a view wherever its memory has no gaps."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return tensor.reshape(-1)
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def _widen(chunk: Tensor) -> Tensor:
    return chunk.float() if chunk.dtype in (torch.float16, torch.bfloat16) else chunk


def _backward_id() -> int:
    """The graph task that runs now: one per backward, never used twice.

    The number is what `torch.autograd.graph` itself tells backwards apart by; it has no public name.
    """
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]


def _to_host(groups: list[list[Tensor]]) -> list[float]:
    """The sum of each group of 0-dim tensors, in float64: one transfer for each device they are on."""
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    flat = [dot for group in groups for dot in group]
    sums = np.zeros(len(groups))
    for device in dict.fromkeys(dot.device for dot in flat):
        here = [position for position, dot in enumerate(flat) if dot.device == device]
        values = torch.stack([flat[position] for position in here]).cpu().double().numpy()
        np.add.at(sums, owners[here], values)
    return sums.tolist()
