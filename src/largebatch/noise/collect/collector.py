"""How long was each microbatch's gradient, and how long is their sum?

Hooks on the parameters see every gradient in the moment it arrives; nothing but its squared norm is kept.
A tensor hook reads each norm. The first gradient of a backward also has a hook after its accumulation, which
`torch.autograd.grad` does not reach: what such a probe has brought leaves no trace at its end. The norms stay on
their device: `take` hands them over there.

Under DistributedDataParallel the tensor hook still sees this worker's own gradient, before it is averaged.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.noise.collect.backwards import at_end, backward_id, check_parts, check_units, is_nested, weakly
from largebatch.noise.collect.changes import Gradients
from largebatch.noise.collect.fsdp import is_fsdp_module
from largebatch.noise.collect.layout import Layout, check_averaged
from largebatch.noise.collect.norms import sq_norm_dots, sq_norm_dots_of
from largebatch.noise.collect.step_norms import Arrivals, Microbatch, Part, StepNorms, StepTally
from largebatch.noise.collect.watched import Watched

NEVER = 10**9
"""More microbatches than any step has."""
NOTHING = Arrivals(backward=-1)
"""Of no backward."""
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
        self._keeps_small = True
        self._model, self._layout = model, layout or Layout()
        self._default_units, self._weigh, self._read = default_units, weigh, read_microbatches
        self._num_plain = num_rows
        self.num_rows = num_rows * (2 if weigh is not None else 1)
        """Rows of what `take` gives."""
        self._watched = Watched(model, self._layout, row_of, self._on_gradient, self._on_accumulated)
        self._parameters, self._rows = self._watched.parameters, self._watched.rows
        self._enabled, self._closed = True, False
        self._forward_handle: Any = None
        self._tally = StepTally()
        self._context: Microbatch | None = None
        self._under_way: dict[int, Arrivals] = {}
        self._arrivals = NOTHING
        self._synced: bool | None = None
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
            self._under_way.clear()
        self.seconds += perf_counter() - started

    @contextmanager
    def microbatch(self, units: int) -> Generator[None, None, None]:
        """All backwards inside are one microbatch of `units` units."""
        check_units(units, inside=self._context is not None)
        self._context = current = Microbatch(units=units, explicit=True)
        try:
            yield
        except BaseException:
            self.give_up("a microbatch ended in an error")
            raise
        finally:
            self._context = None
            self._under_way.clear()
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
        self._end_in_error()
        microbatches, arrived, skip = self._microbatches, self._gradients, self._skip
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
        of_step, large = self._dots_of_step(gradients)
        self._unweighed = False
        return self._tally.norms(
            units=[microbatch.units for microbatch in microbatches],
            microbatches=[microbatch.parts for microbatch in microbatches],
            of_step=of_step,
            stale=stale,
            marks=arrived.dots_of_marks(large, wide=self.wide),
            num_rows=self.num_rows,
            device=next(iter(gradients.values())).device,
            skip=skip,
            weighed=weighed,
        )

    def give_up(self, reason: str) -> None:
        """Have this step skipped because of `reason`, if it is one that is measured."""
        if self.enabled:
            self._skip = self._skip or reason

    def discard(self) -> None:
        """Forget what has arrived since the last step."""
        self._under_way.clear()
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
        is_ddp = self._layout.ddp is not None
        self._gradients = Gradients(self._parameters, is_ddp=is_ddp, marks=self._marks, num_marks=self._num_marks)
        self._stale: list[Tensor] = []
        self._skip = self._problem = ""
        self._synced, self._unweighed = None, False
        self.seconds = 0.0

    def _on_forward(self, ddp: Any, _: Any) -> None:
        if torch.is_grad_enabled():
            self._synced = ddp.require_backward_grad_sync

    def _on_gradient(self, index: int, grad: Tensor) -> None:
        """Read one gradient on its way to the parameter; `_commit` takes it in when it is known to stay.

        This is the one place that runs for every gradient of every microbatch: what can wait, waits.
        """
        started = perf_counter()
        arrivals = self._arrivals
        if backward_id() != arrivals.backward:
            arrivals = self._enter(index)
        if grad.is_sparse:
            self._fail("a sparse gradient is not measured: make the layer with sparse=False.")
            return
        if index not in self._gradients.arrived:
            held = self._parameters[index].grad
            if held is not None and not any(index in outer.seen for outer in self._under_way.values()):
                arrivals.stale += sq_norm_dots(held)
        arrivals.seen.add(index)
        if arrivals.plain and self._watched.small[index] and not grad.requires_grad:
            arrivals.small[self._rows[index]].append((grad, grad._version))
        elif self.buffering and arrivals.context is not None:
            arrivals.copies[index] = grad.detach().clone()
        elif self._read:
            arrivals.parts.append((self._rows[index], sq_norm_dots(grad, wide=self.wide)))
            if self._weigh is not None:
                arrivals.parts.append((self._rows[index] + self._num_plain, self._weighed(index, grad)))
        self.seconds += perf_counter() - started

    def _on_accumulated(self, _index: int, _parameter: nn.Parameter) -> None:
        """The first gradient of a backward has been taken: so will be the others."""
        arrivals = self._under_way.get(backward_id())
        if arrivals is not None:
            arrivals.stay = True

    def _fail(self, problem: str) -> None:
        """Keep an error for `take`: raised in a hook on one worker only, it would leave the others waiting."""
        self._problem = self._problem or problem

    def _enter(self, index: int) -> Arrivals:
        """The arrivals of the backward that runs now, which may have begun with this parameter's gradient."""
        backward = backward_id()
        with self._lock:  # one backward over several devices has a thread for each
            arrivals = self._under_way.get(backward)
            if arrivals is None:
                arrivals = self._begin(backward, index)
            self._arrivals = arrivals
        return arrivals

    def _begin(self, backward: int, index: int) -> Arrivals:
        nested = is_nested()
        if not nested:
            self._end_in_error()
        # Inside a backward whose arrivals are not committed, gradients are not as they were left.
        gone: set[int] = set() if self._under_way else self._gradients.given_up()
        arrivals = Arrivals(
            backward=backward, context=self._context, nested=nested, gone=gone,
            plain=self._keeps_small and self._read and self._is_plain and not (self.buffering and self._context),
        )  # fmt: skip
        if self._gradients.problem:
            self._fail(self._gradients.problem)
        self._gradients.begin()
        self._under_way[backward] = arrivals
        self._watched.witness(index)
        end = partial(self._commit, arrivals)
        # DDP writes the averages in a callback at the backward's end; one queued from there comes after it.
        at_end(end if self._layout.ddp is None else partial(at_end, end))
        return arrivals

    def _end_in_error(self) -> None:
        """Take in what came of a backward that never reached its end."""
        for arrivals in list(self._under_way.values()):
            self._commit(arrivals)
            if arrivals.stay and self._context is None:
                self.give_up("a backward ended in an error")

    def _commit(self, arrivals: Arrivals) -> None:
        """At a backward's end: what it has brought belongs to its microbatch now."""
        started = perf_counter()
        self._under_way.pop(arrivals.backward, None)
        self._arrivals = NOTHING
        if not arrivals.stay:
            return
        current = arrivals.context or Microbatch(units=self._default_units, nested=arrivals.nested)
        again = arrivals.gone & arrivals.seen & self._gradients.arrived
        if again:
            self._forget_all_but(current, again)
        self._stale += arrivals.stale
        for index, copy in arrivals.copies.items():
            held = current.sums.get(index)
            current.sums[index] = copy if held is None else held.add_(copy)
        if self._read and not arrivals.copies and not current.seen.isdisjoint(arrivals.seen):
            self.buffering = True
            self._skip = self._skip or "a microbatch had an unforeseen second backward"
        current.parts += arrivals.parts
        current.parts += [(row, self._read_small(kept)) for row, kept in arrivals.small.items()]
        current.seen |= arrivals.seen
        if arrivals.context is None:
            self._microbatches.append(current)
        self._gradients.arrived |= arrivals.seen
        # Where more microbatches are expected, nobody will ask.
        num = len(self._microbatches) + (self._context is not None)
        self._gradients.note(mark=self._expected == NEVER or num >= self._expected, wide=self.wide)
        self.seconds += perf_counter() - started

    def _read_small(self, kept: list[tuple[Tensor, int]]) -> list[Tensor]:
        """Dots of gradients that were kept; what another hook or node has written to since is not what came here."""
        if any(grad._version != version for grad, version in kept):
            self._keeps_small = False
            self._skip = self._skip or "a gradient was changed in place while its backward ran"
        return sq_norm_dots_of([grad for grad, _ in kept])

    def _forget_all_but(self, current: Microbatch, again: set[int]) -> None:
        """The gradients were set to None since they came: the step begins with the microbatch that runs now."""
        if again & current.seen:
            self._fail("gradients were set to None inside a microbatch context: zero them between steps only.")
            return
        problem, kept = self._gradients.problem, (self.seconds, self._synced)
        self._reset()
        self._problem, (self.seconds, self._synced) = problem, kept
        self._gradients.arrived |= current.seen

    def _weighed(self, index: int, grad: Tensor) -> list[Tensor]:
        if self._weigh is None:
            return []
        weights = self._weigh(self._parameters[index])
        if weights is None:
            self._unweighed = True
            return []
        return sq_norm_dots(grad, weights, wide=self.wide)

    def _dots_of_step(self, gradients: dict[int, Tensor]) -> tuple[list[Part], dict[int, list[Tensor]]]:
        """Dots of the gradients as they are (under DDP of this worker's share of them), and of large ones by index."""
        parts: list[Part] = []
        large: dict[int, list[Tensor]] = {}
        small: defaultdict[int, list[Tensor]] = defaultdict(list)
        for index, grad in gradients.items():
            if self._watched.shares[index] != self._layout.rank:
                continue
            if self._is_plain and self._watched.small[index]:
                small[self._rows[index]].append(grad)
                continue
            large[index] = sq_norm_dots(grad, wide=self.wide)
            parts.append((self._rows[index], large[index]))
            if self._weigh is not None:
                parts.append((self._rows[index] + self._num_plain, self._weighed(index, grad)))
        return [*parts, *((row, sq_norm_dots_of(grads)) for row, grads in small.items())], large

    @property
    def _is_plain(self) -> bool:
        """Whether float32 squares are all that is wanted of a gradient."""
        return not self.wide and self._weigh is None
