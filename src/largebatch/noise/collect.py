"""How long was each microbatch's gradient, and how long is their sum?

Hooks on the parameters see every gradient in the moment it arrives; nothing but its squared norm is kept.
A tensor hook reads the norm, the hook after accumulation commits it: `torch.autograd.grad` fires the first and
not the second, so a probe leaves no trace. The norms stay on their device: `take` hands them over there.

Under DistributedDataParallel the tensor hook still sees this worker's own gradient, before it is averaged.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable

from largebatch.errors import ConfigError
from largebatch.noise.layout import Layout, check_hooks, named_trainable
from largebatch.noise.norms import Tally, sq_norm_dots

MARK = 2**16
"""Elements of the largest gradient whose norm is read twice, to see whether gradients were changed."""

Weigh = Callable[[nn.Parameter], Tensor | None]
"""Weights of a parameter's elements in a second metric; None where there are none yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNorms:
    """One worker's share of a step's squared norms, on its device, of gradients as they were accumulated."""

    units: tuple[int, ...]
    """Units behind each norm, shape (K,)."""
    together: tuple[int, ...]
    """Units in the backward that each norm comes from, shape (K,): its loss was one mean, if it was a mean."""
    sq_norms: Tensor
    """Squared norm of what each microbatch added to the gradients, shape (num_rows, K)."""
    sq_norm_step: Tensor
    """Shape (num_rows,). Added up over the workers: the squared norm of the gradients as they are now."""
    sq_norm_stale: Tensor
    """0-dim. Squared norm of what the gradients held before the step: to be 0."""
    skip: str = ""
    """Why this step's norms cannot be used; empty if they can."""
    mark_before: Tensor
    """0-dim. Squared norm of one parameter's gradient at the last backward's end."""
    mark_now: Tensor
    """0-dim. The same now: another value means that gradients were changed in between."""
    weighed: bool = False
    """Whether the second half of the rows holds the norms in the second metric."""


@dataclass(kw_only=True, slots=True)
class _Arrival:
    """What a tensor hook read, until the accumulation commits it."""

    backward: int
    dots: list[Tensor]
    weighed: list[Tensor]
    copy: Tensor | None
    """The gradient itself, only while buffering."""
    fresh: bool
    """Whether the parameter held no gradient before."""
    stale: list[Tensor]
    """Dot products of what it held though this step had not given it anything yet: to be 0."""


@dataclass(kw_only=True, slots=True)
class _Microbatch:
    units: int
    explicit: bool = False
    nested: bool = False
    """Whether its backward was called inside another one."""
    dots: list[Tensor] = field(default_factory=list)
    """Dot products, each of one row of the result."""
    rows: list[int] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    """Parameters (by index) that have a gradient in it."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Only while buffering: the sum of its gradients per parameter, freed when the context ends."""

    def add(self, dots: Sequence[Tensor], row: int) -> None:
        self.dots += dots
        self.rows += [row] * len(dots)


class GradientCollector:
    """Reads squared gradient norms per microbatch, and of their sum, without touching either.

    One backward is one microbatch of `default_units`. Inside `microbatch(units)` all backwards together are
    one. Such a context costs nothing extra while each parameter gets one gradient in it. The first time one
    gets a second, that step is given up (`skip` says so), and from then on contexts add their gradients up
    in a buffer of their own, so that |g1 + g2|^2 is exact: one copy of the gradients, held while the context
    is open.

    Hooks that change gradients must be registered before this one. A step is what came since the gradients
    were last set to None or to 0. Parameters that join later are watched from the step after on.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        default_units: int,
        layout: Layout | None = None,
        row_of: Callable[[str], int] = lambda _: 0,
        num_rows: int = 1,
        weigh: Weigh | None = None,
        read_microbatches: bool = True,
    ) -> None:
        """Hook into every parameter that requires a gradient.

        Args:
            model: as `find_layout` took it.
            default_units: units of a backward outside `microbatch`.
            layout: what `find_layout` said; None is one worker.
            row_of: row of the norms that a parameter, by its name, counts in.
            num_rows: rows there are.
            weigh: a second metric; its norms follow in as many rows again.
            read_microbatches: whether microbatches are read at all (else only their sum is).

        Raises:
            ConfigError: no parameter requires a gradient.
        """
        self.enabled = True
        """While False, hooks return at once and nothing is read."""
        self.buffering = False
        """Whether contexts add up their gradients (a second backward inside one has been seen)."""
        self.seconds = 0.0
        """Host time spent in hooks since the last `take`."""
        self._model, self._layout = model, layout or Layout()
        self._default_units, self._weigh, self._read = default_units, weigh, read_microbatches
        self._row_of, self._num_plain = row_of, num_rows
        self.num_rows = num_rows * (2 if weigh is not None else 1)
        """Rows of what `take` gives."""
        self._parameters: list[nn.Parameter] = []
        self._rows: list[int] = []
        self._known: set[int] = set()
        self._handles: list[Any] = []
        self._tallies = Tally(), Tally()
        self._context: _Microbatch | None = None
        self._pending: dict[int, _Arrival] = {}
        self._synced = True
        self._begun = self._noted = -1
        self._zeroed: set[int] = set()
        self._marked: tuple[int, Tensor] = (0, torch.zeros(()))
        self._reset()
        if not self._watch():
            raise ConfigError("the model has no parameter that requires a gradient: there is nothing to measure.")
        if self._layout.ddp is not None:
            self._handles.append(self._layout.ddp.register_forward_pre_hook(self._on_forward))

    @contextmanager
    def microbatch(self, units: int) -> Generator[None, None, None]:
        """All backwards inside are one microbatch of `units` units."""
        if isinstance(units, bool) or not isinstance(units, int) or units < 1:
            raise ConfigError(f"a microbatch has a whole number of units, at least 1; got units={units!r}.")
        if self._context is not None:
            raise ConfigError("a microbatch context is already open: one microbatch cannot hold another.")
        self._context = current = _Microbatch(units=units, explicit=True)
        try:
            yield
        except BaseException:
            self._skip = self._skip or "a microbatch ended in an error"
            raise
        finally:
            self._context = None
            self._pending.clear()
        if not self.enabled:
            return
        if not current.seen:
            raise ConfigError(f"no backward reached the parameters inside this microbatch({units}) context.")
        for index, total in current.sums.items():
            current.add(sq_norm_dots(total), self._rows[index])
            current.add(self._weighed(index, total), self._rows[index] + self._num_plain)
        current.sums.clear()
        self._microbatches.append(current)

    def take(self, *, may_be_unscaled: bool = False) -> StepNorms:
        """Return this step's squared norms and start the next step; call before the gradients are changed.

        Args:
            may_be_unscaled: whether a gradient scaler may have divided them since the last backward; then only
                `mark_before` and `mark_now` tell whether something else did.

        Raises:
            ConfigError: no backward since the last step; gradients that are gone, that were changed, or that were
                never averaged over the workers; backwards that look like parts of one microbatch.
        """
        microbatches, arrived, versions, skip = self._microbatches, self._arrived, self._versions, self._skip
        mark = self._marked
        stale, before, weighed = self._stale, self._before, self._weigh is not None and not self._unweighed
        if self._context is not None:
            raise ConfigError("step() was called inside a microbatch context: leave it first.")
        self._reset()
        if self._watch(joining=True):
            skip = skip or "a parameter joined after the monitor was made; it is watched from the next step on"
        if not microbatches:
            raise ConfigError("no backward has been seen since the last step: call step() once after each step's last.")
        self._check_parts(microbatches)
        gradients = {index: self._parameters[index].grad for index in sorted(arrived)}
        if any(gradient is None for gradient in gradients.values()):
            raise ConfigError(
                "gradients are gone: call step() after the last backward and before zero_grad(); an optimizer that "
                "steps inside the backward cannot be measured."
            )
        changed = any(_version(gradient) != versions[index] for index, gradient in gradients.items())
        if changed and not may_be_unscaled:
            raise ConfigError(
                "gradients were changed after the last backward: call step() before clipping, unscaling and "
                "optimizer.step(); with a GradScaler give it to the monitor as grad_scaler."
            )
        if self._layout.ddp is not None:
            if not self._synced:
                raise ConfigError(
                    "the step's last forward was under no_sync(), so its gradients were not averaged over the workers: "
                    "leave the last microbatch of every step outside it."
                )
            check_hooks(self._layout.ddp)
            gradients |= self._given_by_others(arrived, before)
        device = next(g.device for g in gradients.values() if g is not None)
        sq_norm_step = self._sum_step(gradients, device)
        self._unweighed = False
        return StepNorms(
            units=tuple(microbatch.units for microbatch in microbatches),
            together=tuple(microbatch.units for microbatch in microbatches),
            sq_norms=self._sum_microbatches(microbatches, device),
            sq_norm_step=sq_norm_step,
            sq_norm_stale=Tally().sums(stale, [0] * len(stale), 1, device)[0],
            mark_before=mark[1],
            mark_now=_mark(self._parameters[mark[0]].grad),
            skip=skip,
            weighed=weighed,
        )

    def discard(self) -> None:
        """Forget what has arrived since the last step."""
        self._pending.clear()
        self._reset()

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.discard()

    def _watch(self, *, joining: bool = False) -> bool:
        """Hook into parameters that are new; whether one of them has a gradient already (or, at first, any is)."""
        found = False
        for name, parameter in named_trainable(self._model, self._layout):
            if id(parameter) in self._known:
                continue
            index = len(self._parameters)
            self._parameters.append(parameter)
            self._rows.append(self._row_of(name))
            self._known.add(id(parameter))
            self._handles += (
                parameter.register_hook(lambda grad, index=index: self._on_gradient(index, grad)),
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._on_accumulated(index)),
            )
            found = found or not joining or parameter.grad is not None
        return found

    def _reset(self) -> None:
        self._microbatches: list[_Microbatch] = []
        self._by_backward: dict[int, _Microbatch] = {}
        self._arrived: set[int] = set()
        self._versions: dict[int, tuple[int, int]] = {}
        self._before: dict[int, tuple[int, int]] = {}
        self._stale: list[Tensor] = []
        self._skip = ""
        self._unweighed = False
        self.seconds = 0.0

    def _on_forward(self, ddp: Any, _: Any) -> None:
        if torch.is_grad_enabled():
            self._synced = ddp.require_backward_grad_sync

    def _on_gradient(self, index: int, grad: Tensor) -> None:
        """Read one gradient on its way to the parameter; whether it stays is not known yet."""
        if not self.enabled:
            return
        started = time.perf_counter()
        held = self._parameters[index].grad
        backward = _backward_id()
        with torch.no_grad():
            if backward != self._begun:
                self._begun = backward
                self._zeroed = self._changed_to_zero()
            if grad.is_sparse:
                raise ConfigError(
                    "a sparse gradient arrived, which is not measured: make the layer with sparse=False, or close() "
                    "the monitor."
                )
            buffered = self.buffering and self._context is not None
            read = self._read and not buffered
            self._pending[index] = _Arrival(
                backward=backward,
                dots=sq_norm_dots(grad) if read else [],
                weighed=self._weighed(index, grad) if read else [],
                copy=grad.detach().clone() if buffered and self._read else None,
                fresh=held is None or index in self._zeroed,
                stale=[] if held is None or index in self._arrived else sq_norm_dots(held),
            )
        self.seconds += time.perf_counter() - started

    def _changed_to_zero(self) -> set[int]:
        """Gradients that had arrived and were set to 0 in place since: the step was given up and begins again.

        Asked at a backward's start: in DDP's bucket views all gradients of a bucket share one version.
        """
        changed: set[int] = set()
        for index in self._arrived:
            held = self._parameters[index].grad
            noted, version = self._versions[index]
            if self._layout.ddp is not None and held is not None and held.data_ptr() != noted:
                continue  # DDP has rebuilt its buckets and moved the gradient
            if held is not None and held._version != version:
                changed.add(index)
                if torch.count_nonzero(held):
                    raise ConfigError(
                        "gradients were changed between two backwards of one step: clip and scale after step()."
                    )
        return changed

    def _on_accumulated(self, index: int) -> None:
        """Commit what `_on_gradient` read, now that the parameter has taken the gradient."""
        arrival = self._pending.pop(index, None)
        if arrival is None or arrival.backward != _backward_id():
            return
        started = time.perf_counter()
        current = self._context or self._by_backward.get(arrival.backward)
        if current is None:
            current = self._by_backward[arrival.backward] = _Microbatch(units=self._default_units, nested=_is_nested())
            self._microbatches.append(current)
        if arrival.fresh and index in self._arrived:
            self._forget_all_but(current, arrival.backward, index)
        self._stale += arrival.stale
        if arrival.copy is not None:
            with torch.no_grad():
                total = current.sums.get(index)
                current.sums[index] = arrival.copy if total is None else total.add_(arrival.copy)
        elif index in current.seen and self._read:
            self.buffering = True
            self._skip = self._skip or "a microbatch had an unforeseen second backward"
        else:
            current.add(arrival.dots, self._rows[index])
            current.add(arrival.weighed, self._rows[index] + self._num_plain)
        current.seen.add(index)
        if not self._arrived and self._layout.ddp is not None:
            self._before = {i: _version(p.grad) for i, p in enumerate(self._parameters) if i != index}
        self._arrived.add(index)
        self._versions[index] = _version(self._parameters[index].grad)
        if arrival.backward != self._noted:
            # DDP writes the averages in a callback at the backward's end; one queued from there comes after it.
            self._noted = arrival.backward
            _at_end(self._note if self._layout.ddp is None else lambda: _at_end(self._note))
        self.seconds += time.perf_counter() - started

    def _note(self) -> None:
        """At a backward's end: how the gradients are now, to see later whether somebody has changed them."""
        for index in self._arrived:
            self._versions[index] = _version(self._parameters[index].grad)
        if self._arrived:
            # Neither `.data` nor a gradient scaler on a CPU counts versions up: one gradient's norm shows them.
            sizes = {index: self._parameters[index].numel() for index in sorted(self._arrived)}
            small = [index for index, size in sizes.items() if size <= MARK]
            index = max(small, key=sizes.__getitem__) if small else min(sizes, key=sizes.__getitem__)
            self._marked = (index, _mark(self._parameters[index].grad))

    def _forget_all_but(self, current: _Microbatch, backward: int, index: int) -> None:
        """The gradients were set to None since they came: the step begins with the microbatch that runs now."""
        if index in current.seen:
            raise ConfigError("gradients were set to None inside a microbatch context: zero them between steps only.")
        versions, seconds = self._versions, self.seconds
        self._reset()
        self.seconds = seconds
        self._arrived = set(current.seen)
        self._versions = {seen: versions[seen] for seen in current.seen}
        if current is not self._context:
            self._microbatches.append(current)
            self._by_backward[backward] = current

    def _weighed(self, index: int, grad: Tensor) -> list[Tensor]:
        if self._weigh is None:
            return []
        weights = self._weigh(self._parameters[index])
        if weights is None:
            self._unweighed = True
            return []
        return sq_norm_dots(grad, weights)

    def _check_parts(self, microbatches: list[_Microbatch]) -> None:
        if any(microbatch.nested for microbatch in microbatches):
            raise ConfigError(
                "a backward ran inside another one, as reentrant activation checkpointing does, so one microbatch "
                "comes in parts. Use checkpoint(..., use_reentrant=False), or wrap each microbatch in `with "
                "monitor.microbatch(units=n):`."
            )
        implicit = [microbatch.seen for microbatch in microbatches if not microbatch.explicit]
        if len(implicit) > 1 and not set.intersection(*implicit):
            raise ConfigError(
                f"{len(implicit)} backwards reached no parameter in common, so they are parts of fewer microbatches "
                "(several losses?). Wrap each microbatch in `with monitor.microbatch(units=n):`."
            )

    def _given_by_others(self, arrived: set[int], before: dict[int, tuple[int, int]]) -> dict[int, Tensor | None]:
        """Gradients of parameters that only other workers used in this step: DDP has written them."""
        return {
            index: parameter.grad
            for index, parameter in enumerate(self._parameters)
            if index not in arrived and parameter.grad is not None and _version(parameter.grad) != before.get(index)
        }

    def _sum_microbatches(self, microbatches: list[_Microbatch], device: torch.device) -> Tensor:
        num = len(microbatches)
        owners = [row * num + k for k, microbatch in enumerate(microbatches) for row in microbatch.rows]
        dots = [dot for microbatch in microbatches for dot in microbatch.dots]
        return self._tallies[0].sums(dots, owners, self.num_rows * num, device).view(self.num_rows, num)

    def _sum_step(self, gradients: dict[int, Tensor | None], device: torch.device) -> Tensor:
        """Squared norm of the gradients as they are: under DDP, where all hold the same, this worker's share of it."""
        dots: list[Tensor] = []
        owners: list[int] = []
        for index, grad in gradients.items():
            if grad is None or index % self._layout.world_size != self._layout.rank:
                continue
            for part, row in ((sq_norm_dots(grad), 0), (self._weighed(index, grad), self._num_plain)):
                dots += part
                owners += [self._rows[index] + row] * len(part)
        return self._tallies[1].sums(dots, owners, self.num_rows, device)


def _mark(grad: Tensor | None) -> Tensor:
    return torch.zeros(()) if grad is None else torch.stack(sq_norm_dots(grad)).sum()


def _version(grad: Tensor | None) -> tuple[int, int]:
    """Where a gradient is, and how often it was changed in place."""
    return (0, 0) if grad is None else (grad.data_ptr(), grad._version)


def _backward_id() -> int:
    """The graph task that runs now: one per backward, never used twice.

    The number is what `torch.autograd.graph` itself tells backwards apart by; it has no public name.
    """
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]


def _is_nested() -> bool:
    """Whether the backward that runs now was called from the backward of a `torch.autograd.Function`."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename.endswith("autograd/function.py"):
            return True
        frame = frame.f_back
    return False


def _at_end(callback: Callable[[], None]) -> None:
    """Call at the end of the backward that runs now, after what was queued before."""
    Variable._execution_engine.queue_callback(callback)  # pyright: ignore
