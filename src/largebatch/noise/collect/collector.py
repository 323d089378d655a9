"""How long was each microbatch's gradient, and how long is their sum?

Hooks on the parameters see every gradient in the moment it arrives; nothing but its squared norm is kept.
A tensor hook reads the norm, the hook after accumulation commits it: `torch.autograd.grad` fires the first and
not the second, so a probe leaves no trace. The norms stay on their device: `take` hands them over there.

Under DistributedDataParallel the tensor hook still sees this worker's own gradient, before it is averaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.noise.collect.backwards import at_end, backward_id, check_parts, check_units, is_nested, weakly
from largebatch.noise.collect.changes import Gradients
from largebatch.noise.collect.fsdp import is_fsdp_module
from largebatch.noise.collect.layout import Layout, check_averaged
from largebatch.noise.collect.norms import Tally, sq_norm_dots, total
from largebatch.noise.collect.step_norms import Microbatch, StepNorms, sum_microbatches
from largebatch.noise.collect.watched import Watched

NEVER = 10**9
"""More microbatches than any step has."""
NOTHING: Sequence[Tensor] = ()
Weigh = Callable[[nn.Parameter], Tensor | None]
"""Weights of a parameter's elements in a second metric; None where there are none yet."""


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
        num_marks: int = 1,
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
            num_marks: gradients whose norms are read twice, to see whether something has changed them.

        Raises:
            ConfigError: no parameter requires a gradient.
        """
        self.wide = False
        """Whether squares are taken in float64: those of very long or short gradients leave float32's range."""
        self.buffering = False
        """Whether contexts add up their gradients (a second backward inside one has been seen)."""
        self.seconds = 0.0
        """Host time spent in hooks since the last `take`."""
        self._model, self._layout = model, layout or Layout()
        self._default_units, self._weigh, self._read = default_units, weigh, read_microbatches
        self._num_plain = num_rows
        self.num_rows = num_rows * (2 if weigh is not None else 1)
        """Rows of what `take` gives."""
        self._watched = Watched(model, self._layout, row_of, self._on_gradient, self._on_accumulated)
        self._parameters, self._rows = self._watched.parameters, self._watched.rows
        self._enabled, self._closed = True, False
        self._forward_handle: Any = None
        self._tallies = Tally(), Tally()
        self._context: Microbatch | None = None
        self._pending: dict[int, tuple[int, Sequence[Tensor], Sequence[Tensor], Tensor | None, Sequence[Tensor]]] = {}
        self._synced: bool | None = None
        self._begun = self._running = -1
        self._current = Microbatch(units=default_units)
        self._gone: set[int] = set()
        self._marks, self._expected, self._num_marks, self._lock = (), NEVER, num_marks, threading.Lock()
        self._reset()
        if not self._watched.look():
            raise ConfigError("the model has no parameter that requires a gradient: there is nothing to measure.")
        if self._layout.ddp is not None:
            self._forward_handle = self._layout.ddp.register_forward_pre_hook(weakly(self._on_forward))

    @property
    def enabled(self) -> bool:
        """Whether gradients are read; while not, the parameters have no hooks. To be set between steps."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if enabled == self._enabled or self._closed:
            return
        started = perf_counter()
        self._enabled = enabled
        if enabled:
            self._watched.attach()
        else:
            self._watched.detach()
            self._pending.clear()
        self.seconds += perf_counter() - started

    @contextmanager
    def microbatch(self, units: int) -> Generator[None, None, None]:
        """All backwards inside are one microbatch of `units` units."""
        check_units(units, inside=self._context is not None)
        self._context = current = Microbatch(units=units, explicit=True, last=self._is_last())
        try:
            yield
        except BaseException:
            self.give_up("a microbatch ended in an error")
            raise
        finally:
            self._context = None
            self._pending.clear()
        if not self.enabled:
            return
        if not current.seen:
            raise ConfigError(f"no backward reached the parameters inside this microbatch({units}) context.")
        for index, summed in current.sums.items():
            current.parts.append((self._rows[index], sq_norm_dots(summed, wide=self.wide)))
            current.parts.append((self._rows[index] + self._num_plain, self._weighed(index, summed)))
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
        microbatches, arrived, hot, skip = self._microbatches, self._gradients, self._hot, self._skip
        problem, synced = self._problem or self._watched.problem(), self._synced
        stale, weighed = self._stale, self._weigh is not None and not self._unweighed
        if self._context is not None:
            raise ConfigError("step() was called inside a microbatch context: leave it first.")
        self._reset()
        if problem:
            raise ConfigError(problem)
        if self._watched.look(joining=True):
            skip = skip or "a parameter joined after the monitor was made; it is watched from the next step on"
        if not microbatches:
            if any(map(is_fsdp_module, self._model.modules())):
                raise ConfigError("fully_shard was applied after the monitor was made: make the monitor after it.")
            raise ConfigError("no backward has been seen since the last step: call step() once after each step's last.")
        check_parts((m.nested for m in microbatches), [m.seen for m in microbatches if not m.explicit])
        gradients = arrived.of_step()
        if not may_be_unscaled and arrived.are_changed():
            raise ConfigError(
                "gradients were changed after the last backward: call step() before clipping, unscaling and "
                "optimizer.step(); with a GradScaler give it to the monitor as grad_scaler."
            )
        if self._layout.ddp is not None:
            check_averaged(self._layout.ddp, synced=synced)
            gradients |= arrived.given_by_others()
        self._marks, self._expected = arrived.marks, len(microbatches)
        device = next(grad.device for grad in gradients.values())
        before, now = arrived.sq_norms_of_marks()
        sq_norm_step = self._sum_step(gradients, {} if may_be_unscaled else hot, device)
        self._unweighed = False
        return StepNorms(
            units=tuple(microbatch.units for microbatch in microbatches),
            together=tuple(microbatch.units for microbatch in microbatches),
            sq_norms=sum_microbatches(microbatches, self.num_rows, self._tallies[0], device),
            sq_norm_step=sq_norm_step,
            sq_norm_stale=total(stale, device),
            mark_before=before,
            mark_now=now,
            skip=skip,
            weighed=weighed,
        )

    def give_up(self, reason: str) -> None:
        """Have this step skipped because of `reason`, if it is one that is measured."""
        if self.enabled:
            self._skip = self._skip or reason

    def discard(self) -> None:
        """Forget what has arrived since the last step."""
        self._pending.clear()
        self._reset()

    def close(self) -> None:
        """Remove every hook."""
        self._closed = True
        self._watched.detach()
        if self._forward_handle is not None:
            self._forward_handle.remove()
        self.discard()

    def _reset(self) -> None:
        self._microbatches: list[Microbatch] = []
        self._by_backward: dict[int, Microbatch] = {}
        is_ddp = self._layout.ddp is not None
        self._gradients = Gradients(self._parameters, is_ddp=is_ddp, marks=self._marks, num_marks=self._num_marks)
        self._stale: list[Tensor] = []
        self._hot: dict[int, Sequence[Tensor]] = {}
        self._skip = self._problem = ""
        self._synced, self._open = None, False
        self._unweighed = False
        self.seconds = 0.0

    def _on_forward(self, ddp: Any, _: Any) -> None:
        if torch.is_grad_enabled():
            self._synced = ddp.require_backward_grad_sync

    def _on_gradient(self, index: int, grad: Tensor) -> None:
        """Read one gradient on its way to the parameter; whether it stays is not known yet."""
        started = perf_counter()
        backward = backward_id()
        if backward != self._begun:
            self._begun, self._gone = backward, self._gradients.given_up()
            if self._gradients.problem:
                self._fail(self._gradients.problem)
        if grad.is_sparse:
            self._fail("a sparse gradient is not measured: make the layer with sparse=False.")
            return
        dots = weighed = stale = NOTHING
        copy = None
        if self._read:
            if self.buffering and self._context is not None:
                copy = grad.detach().clone()
            else:
                dots = sq_norm_dots(grad, wide=self.wide)
                if self._weigh is not None:
                    weighed = self._weighed(index, grad)
        if index not in self._gradients.arrived:
            held = self._parameters[index].grad
            if held is not None:
                stale = sq_norm_dots(held)
        self._pending[index] = (backward, dots, weighed, copy, stale)
        self.seconds += perf_counter() - started

    def _on_accumulated(self, index: int, parameter: nn.Parameter) -> None:
        """Commit what `_on_gradient` read, now that the parameter has taken the gradient."""
        arrival = self._pending.pop(index, None)
        if arrival is None:
            return
        started = perf_counter()
        backward, dots, weighed, copy, stale = arrival
        if backward != self._running:
            if backward != backward_id():
                return
            self._begin_backward(backward)
        current = self._current
        if self._gone and index in self._gone and index in self._gradients.arrived:
            self._forget_all_but(current, backward, index)
        if stale:
            self._stale += stale
        if copy is not None:
            held = current.sums.get(index)
            current.sums[index] = copy if held is None else held.add_(copy)
        elif index in current.seen and self._read:
            self.buffering = True
            self._skip = self._skip or "a microbatch had an unforeseen second backward"
        else:
            current.parts.append((self._rows[index], dots))
            if weighed:
                current.parts.append((self._rows[index] + self._num_plain, weighed))
        current.seen.add(index)
        gradients = self._gradients
        if index not in gradients.arrived:
            gradients.add(index)
        held = parameter.grad
        if held is not None:
            gradients.versions[index] = (held.data_ptr(), held._version)
            if current.last:
                self._hot[index] = sq_norm_dots(held, wide=self.wide)
            elif self._hot:
                self._hot.pop(index, None)
        self.seconds += perf_counter() - started

    def _fail(self, problem: str) -> None:
        """Keep an error for `take`: raised in a hook on one worker only, it would leave the others waiting."""
        self._problem = self._problem or problem

    def _begin_backward(self, backward: int) -> None:
        with self._lock:  # one backward over several devices has a thread for each
            if backward == self._running:
                return
            if self._open and self._context is None and not is_nested():
                self.give_up("a backward ended in an error")
            self._current = self._context or self._by_backward.get(backward) or self._begin_microbatch(backward)
            self._running, self._open = backward, True
        # DDP writes the averages in a callback at the backward's end; one queued from there comes after it.
        at_end(self._on_end if self._layout.ddp is None else lambda: at_end(self._on_end))

    def _begin_microbatch(self, backward: int) -> Microbatch:
        current = Microbatch(units=self._default_units, nested=is_nested(), last=self._is_last())
        self._by_backward[backward] = current
        self._microbatches.append(current)
        return current

    def _is_last(self) -> bool:
        """Whether to read the sum while it is in the cache: one worker, and the last step had no further microbatch."""
        return self._layout.kind == "single" and len(self._microbatches) + 1 >= self._expected

    def _on_end(self) -> None:
        started = perf_counter()
        self._open = False
        # Where more microbatches are expected, nobody will ask.
        num = len(self._microbatches) + (self._context is not None)
        self._gradients.note(mark=self._expected == NEVER or num >= self._expected)
        self.seconds += perf_counter() - started

    def _forget_all_but(self, current: Microbatch, backward: int, index: int) -> None:
        """The gradients were set to None since they came: the step begins with the microbatch that runs now."""
        if index in current.seen:
            self._fail("gradients were set to None inside a microbatch context: zero them between steps only.")
            return
        versions, problem = self._gradients.versions, self._gradients.problem
        kept = self.seconds, self._synced, self._open
        self._reset()
        self._problem, (self.seconds, self._synced, self._open) = problem, kept
        for seen in current.seen:
            self._gradients.add(seen)
            self._gradients.versions[seen] = versions[seen]
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
        return sq_norm_dots(grad, weights, wide=self.wide)

    def _sum_step(self, gradients: dict[int, Tensor], hot: dict[int, Sequence[Tensor]], device: torch.device) -> Tensor:
        """Squared norm of the gradients as they are (dots in `hot` are known); under DDP this worker's share of it."""
        dots: list[Tensor] = []
        owners: list[int] = []
        for index, grad in gradients.items():
            if self._watched.shares[index] != self._layout.rank:
                continue
            plain = hot.get(index) or sq_norm_dots(grad, wide=self.wide)
            for part, row in ((plain, 0), (self._weighed(index, grad), self._num_plain)):
                dots += part
                owners += [self._rows[index] + row] * len(part)
        return self._tallies[1].sums(dots, owners, self.num_rows, device)
