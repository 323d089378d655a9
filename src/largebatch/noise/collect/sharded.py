"""How long was each worker's own gradient under fully_shard (FSDP2), and how long is their mean?

Hooks on the shards see no gradient that is not averaged yet; the reduce-scatter does. A stand-in for it reads the
squared norm of what goes in, this worker's own gradient of a whole fully_shard unit, and lets the original do its
work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.noise.collect.backwards import at_end, backward_id, check_units, is_nested, weakly
from largebatch.noise.collect.changes import MARK
from largebatch.noise.collect.collector import Weigh
from largebatch.noise.collect.fsdp import (
    Bundle,
    check_division,
    check_managed,
    divided_before,
    find_bundles,
    find_spread,
    local,
)
from largebatch.noise.collect.layout import Layout, plain_name
from largebatch.noise.collect.norms import Tally, sq_norm, sq_norm_dots, total
from largebatch.noise.collect.reduce import LossScaling
from largebatch.noise.collect.shares import Backward, Share, Shares
from largebatch.noise.collect.step_norms import StepNorms


class ReduceScatter:
    """Stands in for a bundle's reduce-scatter: reads what goes in, then lets the original do its work."""

    def __init__(self, original: Any, read: Callable[[Tensor], None]) -> None:
        """Give to `read` whatever goes into `original`."""
        self.original, self._read = original, read

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Reduce and scatter."""
        self._read(input_tensor)
        return self.original(output_tensor, input_tensor, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """`allocate`, and whatever else torch asks for."""
        return getattr(self.original, name)


class ShardedCollector:
    """Reads squared norms of each worker's gradients under fully_shard, without touching them.

    Has the interface of `collect.GradientCollector`. A worker's microbatch is what it gave to one reduce-scatter:
    one backward, or with set_requires_gradient_sync(False) all backwards up to the one that syncs. A unit's
    gradient comes as one flat tensor, so all its parameters are in one group. If the reduction is in half
    precision, the norms are those of the gradients as they were rounded for it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        default_units: int,
        layout: Layout,
        row_of: Callable[[str], int] = lambda _: 0,
        num_rows: int = 1,
        weigh: Weigh | None = None,
        read_microbatches: bool = True,
        num_marks: int = 1,
        loss_scaling: LossScaling = "step_mean",
    ) -> None:
        """Stand in for the reduce-scatters of `model`; see `collect.GradientCollector` for the arguments.

        Raises:
            ConfigError: a group that divides a fully_shard unit, a second metric, or norms per example.
        """
        if weigh is not None:
            raise ConfigError(
                "under fully_shard an optimizer's second moments are sharded and a worker's gradient is not, so its "
                "metric is not measured: leave precondition_by out."
            )
        if not read_microbatches:
            raise ConfigError("per_example does not measure under fully_shard: leave it out, or use DDP.")
        self.enabled = True
        """While False, hooks return at once and nothing is read."""
        self.buffering = False
        """Never: fully_shard itself adds gradients up where no sync is wanted."""
        self.wide = False
        """Whether squares are taken in float64: those of very long or short gradients leave float32's range."""
        self.seconds = 0.0
        """Host time spent in hooks since the last `take`."""
        self.num_rows = num_rows
        """Rows of what `take` gives."""
        self._model, self._layout, self._row_of = model, layout, row_of
        self._default_units, self._uneven = default_units, loss_scaling != "microbatch_mean"
        self._bundles = find_bundles(model)
        self._spread = find_spread(model, self._bundles)
        self._rows = [self._row(bundle) for bundle in self._bundles]
        self._params: list[Any] = [parameter for bundle in self._bundles for parameter in bundle.state.fsdp_params]
        starts = [sum(len(bundle.names) for bundle in self._bundles[:k]) for k in range(len(self._bundles))]
        self._members = [range(k, k + len(b.names)) for k, b in zip(starts, self._bundles, strict=True)]
        self._hooked: dict[int, nn.Parameter] = {}
        self._handles: list[Any] = []
        self._tallies = Tally(), Tally()
        self._context: Backward | None = None
        self._backward, self._mark = -1, 0
        self._reset()
        self._readers: list[Any] = []
        before_forward: Any = torch.compiler.disable(self._before_forward)
        for number, bundle in enumerate(self._bundles):
            hook = partial(_call, before_forward, number)
            self._handles += [module.register_forward_pre_hook(hook) for module in bundle.modules]
            self._watch(number)
            read = partial(self._on_reduced, number)
            if self._spread.shard_size > 1:
                self._readers.append(ReduceScatter(bundle.state._reduce_scatter_comm, read))
                bundle.module.set_custom_reduce_scatter(self._readers[-1])
            else:  # one worker: nothing is scattered, and what this hook gets is the worker's own gradient
                self._readers.append(read)
                bundle.module.set_all_reduce_hook(read)

    @contextmanager
    def microbatch(self, units: int) -> Generator[None, None, None]:
        """All backwards inside are one microbatch of `units` units; all but the last are to run without sync."""
        check_units(units, inside=self._context is not None)
        self._context = current = Backward(units=units, explicit=True)
        try:
            yield
        except BaseException:
            self.give_up("a microbatch ended in an error")
            raise
        finally:
            self._context = None
        if self.enabled and not current.seen:
            raise ConfigError(f"no backward reached the parameters inside this microbatch({units}) context.")

    def take(self, *, may_be_unscaled: bool = False) -> StepNorms:
        """Return this step's squared norms and start the next step; as `collect.GradientCollector.take`."""
        step, written, states, stale = self._step, sorted(self._written), self._states, self._stale
        skip, mark, drift = self._skip, self._sq_norm_mark, self._drift
        if self._context is not None:
            raise ConfigError("step() was called inside a microbatch context: leave it first.")
        self._reset()
        self._check_bundles()
        shares = step.done(uneven=self._uneven)
        if not shares and not skip:
            raise ConfigError("no backward has been seen since the last step: call step() once after each step's last.")
        if any(bundle.unfinished for bundle in self._bundles):
            raise ConfigError(
                "gradients were left without their mean over the replicas: call set_requires_all_reduce(True) before "
                "the last backward of every step."
            )
        gradients = {index: self._grad(index) for index in written}
        if any(gradient is None for gradient in gradients.values()):
            raise ConfigError(
                "gradients are gone: call step() after the last backward and before zero_grad(); an optimizer that "
                "steps inside the backward cannot be measured."
            )
        changed = any(self._state(index) != states.get(index) for index in written)
        if changed and not may_be_unscaled:
            raise ConfigError(
                "gradients were changed after the last backward: call step() before clipping, unscaling and "
                "optimizer.step(); with a GradScaler give it to the monitor as grad_scaler."
            )
        device = self._params[0].sharded_param.device
        sq_norms = self._sum_shares(shares, device)
        now = sq_norm(self._grad(self._mark)) * (1 + drift)
        return StepNorms(
            units=tuple(share.units for share in shares),
            together=tuple(share.backwards[0].units for share in shares),
            sq_norms=sq_norms,
            sq_norm_step=self._sum_step(gradients, device),
            sq_norm_stale=total(stale, device).to(sq_norms).view(1),
            mark_before=mark.to(sq_norms).view(1),
            mark_now=now.to(sq_norms).view(1),
            skip=skip,
        )

    def give_up(self, reason: str) -> None:
        """Have this step skipped because of `reason`, if it is one that is measured."""
        if self.enabled:
            self._skip = self._skip or reason

    def discard(self) -> None:
        """Forget what has arrived since the last step."""
        self._reset()

    def close(self) -> None:
        """Remove every hook, and put the reduce-scatters back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for bundle, reader in zip(self._bundles, self._readers, strict=True):
            if bundle.state._reduce_scatter_comm is reader:
                bundle.module.set_custom_reduce_scatter(reader.original)
            if bundle.state._all_reduce_hook is reader:
                bundle.module.set_all_reduce_hook(None)
        self._bundles, self._readers = [], []
        self.enabled = False
        self._reset()

    def _reset(self) -> None:
        self._step = Shares()
        self._by_backward: dict[int, Backward] = {}
        self._forget_written()
        self.seconds = 0.0

    def _forget_written(self) -> None:
        self._written: set[int] = set()
        """Parameters whose shard has been given a gradient in this step."""
        self._states: dict[int, tuple[int, int, int]] = {}
        self._stale: list[Tensor] = []
        self._sq_norm_mark = torch.zeros(())
        self._drift: Tensor | float = 0.0
        """By how much the mark's norm has changed between backwards, as a share of it: to be 0."""
        self._skip = ""

    def _row(self, bundle: Bundle) -> int:
        names = [name for name, shard in zip(bundle.names, bundle.sharded, strict=True) if shard.requires_grad]
        rows = {self._row_of(plain_name(name)): name for name in names}
        if len(rows) > 1:
            one, other, *_ = rows.values()
            raise ConfigError(
                f"groups must be whole fully_shard units: {one!r} and {other!r} are in one unit, whose gradient comes "
                "as one, but in two groups. Call fully_shard on what is to be a group."
            )
        return next(iter(rows), 0)

    def _before_forward(self, number: int) -> None:
        if self.enabled:
            self._watch(number)

    def _watch(self, number: int) -> None:
        """Hook into a bundle's parameters that are new; those that a forward uses are made in the first one."""
        bundle = self._bundles[number]
        for hook, parameters in ((self._on_written, bundle.sharded), (self._on_arrived, bundle.whole)):
            for index, parameter in zip(self._members[number], parameters, strict=True):
                if parameter is not None and parameter.requires_grad and id(parameter) not in self._hooked:
                    self._hooked[id(parameter)] = parameter
                    self._handles.append(
                        parameter.register_post_accumulate_grad_hook(partial(_call, weakly(hook), index))
                    )

    def _on_arrived(self, index: int) -> None:
        """A parameter has taken this worker's own gradient."""
        if not self.enabled:
            return
        started = time.perf_counter()
        self._enter_backward()
        current = self._context or self._by_backward.get(self._backward)
        if current is None:
            current = Backward(units=self._default_units, nested=is_nested())
            self._by_backward[self._backward] = current
        self._step.arrive(current, index)
        self.seconds += time.perf_counter() - started

    def _on_reduced(self, number: int, flat: Tensor) -> None:
        """Read a bundle's gradients as they leave this worker: all that came since they left the last time."""
        if not self.enabled:
            return
        started = time.perf_counter()
        bundle = self._bundles[number]
        with torch.no_grad():
            self._enter_backward()
            if any(p is not None and p.requires_grad and id(p) not in self._hooked for p in bundle.whole):
                self._skip = "a parameter joined after the monitor was made; it is watched from the next step on"
            self._step.fail(check_division(bundle, self._layout.world_size))
            factor = divided_before(flat.dtype, self._layout.world_size) ** 2
            dots = [dot if factor == 1 else dot * factor for dot in sq_norm_dots(flat, wide=self.wide)]
            covered = self._step.reduce(number, members=self._members[number], dots=dots)
            for index in covered - self._written:
                held = self._grad(index)
                self._stale += [] if held is None else sq_norm_dots(held)
        self.seconds += time.perf_counter() - started

    def _on_written(self, index: int) -> None:
        if self.enabled:
            self._written.add(index)

    def _enter_backward(self) -> None:
        """At a backward's start: were gradients set to None or 0, so that the step begins again, or changed?"""
        backward = backward_id()
        if backward == self._backward:
            return
        self._backward = backward
        # fully_shard reduces what is left in a callback at the backward's end; one queued from there comes after it.
        at_end(lambda: at_end(self._note))
        held = {index: self._grad(index) for index in self._written}
        touched = {index for index in held if self._state(index) != self._states.get(index)}
        if any(held[index] is not None and torch.count_nonzero(held[index]) for index in touched):  # pyright: ignore
            self._step.fail("gradients were changed between two backwards of one step: clip and scale after step().")
        elif touched:
            self._step.begin_again(self._context)
            self._forget_written()
        elif held:  # _foreach_mul_, as in clipping, leaves no trace on a sharded gradient but the mark's norm
            now, before = sq_norm(self._grad(self._mark)), self._sq_norm_mark
            self._drift = self._drift + (now - before).abs() / before.clamp(min=torch.finfo(before.dtype).tiny)

    def _note(self) -> None:
        """At a backward's end: how the gradients are now, to see later whether somebody has changed them."""
        self._states = {index: self._state(index) for index in self._written}
        if self._mark not in self._written and self._written:
            sizes = {index: self._params[index].sharded_param._local_tensor.numel() for index in sorted(self._written)}
            small = [index for index, size in sizes.items() if size <= MARK]
            self._mark = max(small, key=sizes.__getitem__) if small else min(sizes, key=sizes.__getitem__)
        # Neither `.data` nor a gradient scaler on a CPU counts versions up: one gradient's norm shows them.
        self._sq_norm_mark = sq_norm(self._grad(self._mark))

    def _grad(self, index: int) -> Tensor | None:
        """This worker's part of a parameter's gradient."""
        grad = self._params[index].sharded_param.grad
        return None if grad is None else local(grad)

    def _state(self, index: int) -> tuple[int, int, int]:
        """Where a gradient is, and how often it was changed in place: by fully_shard its part, by others the whole."""
        grad: Any = self._params[index].sharded_param.grad
        return (0, 0, 0) if grad is None else (local(grad).data_ptr(), local(grad)._version, grad._version)

    def _check_bundles(self) -> None:
        """Raise ConfigError if the model is not spread any more as it was; watch parameters that are new."""
        if [id(b.state) for b in find_bundles(self._model)] != [id(b.state) for b in self._bundles]:
            raise ConfigError("fully_shard was applied again after the monitor was made: make the monitor after it.")
        check_managed(self._model, self._bundles)
        for number, (bundle, reader) in enumerate(zip(self._bundles, self._readers, strict=True)):
            if reader not in (bundle.state._reduce_scatter_comm, bundle.state._all_reduce_hook):
                raise ConfigError(
                    "the reduce-scatter or all-reduce hook of a fully_shard unit was replaced after the monitor was "
                    "made, so gradients go unseen: close() it first."
                )
            self._watch(number)
            self._rows[number] = self._row(bundle)

    def _sum_shares(self, shares: list[Share], device: torch.device) -> Tensor:
        num = len(shares)
        owners = [self._rows[bundle] * num + k for k, share in enumerate(shares) for bundle in share.bundles]
        dots = [dot for share in shares for dot in share.dots]
        return self._tallies[0].sums(dots, owners, self.num_rows * num, device).view(self.num_rows, num)

    def _sum_step(self, gradients: dict[int, Tensor | None], device: torch.device) -> Tensor:
        """This worker's part of the squared norm: of its shards, of which each replica holds the same."""
        dots: list[Tensor] = []
        owners: list[int] = []
        for row, members in zip(self._rows, self._members, strict=True):
            for index in members:
                if (grad := gradients.get(index)) is not None:
                    part = sq_norm_dots(grad, wide=self.wide)
                    dots += part
                    owners += [row] * len(part)
        return self._tallies[1].sums(dots, owners, self.num_rows, device) / self._spread.replica_size


def _call(function: Callable[[int], None], number: int, *_: Any) -> None:
    function(number)
