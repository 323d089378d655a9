"""What goes wrong in a real loop that cannot be seen at rest?

with watch(model, optimizer, loader, scheduler) as watched:
    train_for_a_few_steps()
for finding in watched.findings:
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from largebatch.audit.findings import Finding, sort_findings
from largebatch.audit.watch_draws import DrawRecorder
from largebatch.audit.watch_forwards import ForwardRecorder
from largebatch.audit.watch_judge import find_between_workers, find_in_steps, find_undecided
from largebatch.audit.watch_order import find_between_orders, find_in_order
from largebatch.audit.watch_patch import Function, wrapped, wrapped_in_family
from largebatch.audit.watch_record import MAX_STEPS, StepRecorder
from largebatch.errors import ConfigError
from largebatch.groups import num_workers
from largebatch.noise.monitor import NoiseScaleMonitor

_CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_open: list[Watched] = []  # at most one: two would see each other


class Watched:
    """What a loop showed while it was watched."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        dataloader: Any,
        scheduler: Any,
        *,
        accumulation: int,
        monitor: NoiseScaleMonitor | None,
        on_finding: Callable[[Finding], None] | None,
    ) -> None:
        """Made by `watch`."""
        self._steps = StepRecorder(model, _unwrapped(optimizer, "optimizer"), self._on_step)
        self._forwards, self._draws = ForwardRecorder(model), DrawRecorder(dataloader)
        self._steps.on_backward, self._steps.last_draw = self._draws.backward, self._draws.last_draw
        self._scheduler, self._monitor = _unwrapped(scheduler, "scheduler"), monitor
        self._accumulation, self._on_finding = accumulation, on_finding
        self._between_workers: list[Finding] = []
        self._told: set[str] = set()
        self._scheduling = False

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The mistakes seen so far, errors first; those between workers are known when the context has ended."""
        found = find_in_steps(self._steps.steps, world_size=num_workers(), accumulation=self._accumulation)
        found += self._forwards.findings() + find_in_order(self._draws.trained()) + self._between_workers
        return tuple(sort_findings(found))

    @property
    def num_steps(self) -> int:
        """Optimizer steps, those included that a gradient scaler skipped."""
        return self._steps.num_steps

    @property
    def num_backwards(self) -> int:
        """Backwards that gave the model a gradient: this worker's microbatches."""
        return self._steps.num_backwards

    @property
    def unread(self) -> tuple[str, ...]:
        """What kept a loss from being read, by the name of its graph's node, or from being judged; empty if nothing."""
        return (*self._steps.unread, *find_undecided(self._steps.steps, self._accumulation))

    def _tell(self) -> None:
        if self._on_finding is None:
            return
        for finding in self.findings:
            if finding.code not in self._told:
                self._told.add(finding.code)
                self._on_finding(finding)

    def _on_step(self) -> None:
        self._forwards.new_step()
        if self.num_steps <= MAX_STEPS:
            self._tell()

    def _settle(self, group: dist.ProcessGroup) -> None:
        """Lay the workers' records side by side; every worker of the group calls it, whatever it has found."""
        own = (self._steps.steps, self._draws.trained())
        records: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(records, own, group=group)
        self._between_workers = find_between_workers([steps for steps, _ in records])
        self._between_workers += find_between_orders([passes for _, passes in records])

    @contextmanager
    def _looking(self) -> Generator[None]:
        """Have every hook and wrapper in place while the context is open."""
        steps = self._steps
        with ExitStack() as stack:
            stack.enter_context(wrapped(torch.autograd, "backward", self._wrap_backward))
            stack.enter_context(wrapped_in_family(LRScheduler, "step", self._wrap_scheduler))
            for name in ("step", "step_update") if not isinstance(self._scheduler, LRScheduler) else ():
                owner = next((base for base in type(self._scheduler).__mro__ if name in vars(base)), None)
                if owner is not None:  # timm's, or one of the user's own
                    stack.enter_context(wrapped(owner, name, self._wrap_scheduler))
            for name, wrap in (
                ("scale", self._wrap_scale), ("unscale_", self._wrap_unscale), ("step", self._wrap_scaler_step)
            ):  # fmt: skip
                stack.enter_context(wrapped_in_family(torch.amp.GradScaler, name, wrap))
            for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
                for name in _CLIPPERS:
                    if name in vars(owner):
                        stack.enter_context(wrapped(owner, name, self._wrap_clipper))
            stack.enter_context(wrapped(NoiseScaleMonitor, "step", self._wrap_monitor))
            stack.enter_context(self._draws.looking())
            stack.enter_context(self._forwards.looking())
            hook = register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: steps.stepped(optimizer))
            stack.callback(hook.remove)
            yield

    def _wrap_backward(self, original: Function) -> Function:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **named: Any) -> Any:
            return self._steps.backward(original, tensors, grad_tensors, args, named)

        return backward

    def _wrap_scheduler(self, original: Function) -> Function:
        def step(scheduler: Any, *args: Any, **named: Any) -> Any:
            outermost, self._scheduling = not self._scheduling, True
            rates = _rates_of(scheduler)
            try:
                result = original(scheduler, *args, **named)
            finally:
                self._scheduling = not outermost
            # timm's are told where they stand, so that a call that sets the same rate again is none
            stays = bool(args or named) and not isinstance(scheduler, LRScheduler) and rates == _rates_of(scheduler)
            if outermost and not stays and self._is_watched(scheduler):
                self._steps.scheduled(scheduler, original.__name__)
            return result

        return step

    def _is_watched(self, scheduler: Any) -> bool:
        if getattr(scheduler, "_is_initial", False):  # the step that makes it
            return False
        if self._scheduler is not None:
            return scheduler is self._scheduler
        optimizer = getattr(scheduler, "optimizer", None)
        return isinstance(optimizer, torch.optim.Optimizer) and self._steps.is_ours(_unwrapped(optimizer, "optimizer"))

    def _wrap_scale(self, original: Function) -> Function:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            self._steps.scaled(result, float(scaler.get_scale()))
            return result

        return scale

    def _wrap_unscale(self, original: Function) -> Function:
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            self._steps.unscaling()
            result = original(scaler, optimizer)
            self._steps.unscaled()
            return result

        return unscale_

    def _wrap_scaler_step(self, original: Function) -> Function:
        def step(scaler: Any, optimizer: Any, *args: Any, **named: Any) -> Any:
            before = self._steps.num_steps
            result = original(scaler, optimizer, *args, **named)
            if self._steps.num_steps == before:  # not finite: the optimizer's own step was left out
                self._steps.stepped(_unwrapped(optimizer, "optimizer"))
            return result

        return step

    def _wrap_clipper(self, original: Function) -> Function:
        def clip(*args: Any, **named: Any) -> Any:
            self._steps.clipped(original.__name__)
            return original(*args, **named)

        return clip

    def _wrap_monitor(self, original: Function) -> Function:
        def step(monitor: NoiseScaleMonitor) -> Any:
            if self._monitor is None or monitor is self._monitor:
                self._steps.measuring()
            return original(monitor)

        return step


@contextmanager
def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    dataloader: Any = None,
    scheduler: Any = None,
    *,
    accumulation: int = 1,
    group: dist.ProcessGroup | None = None,
    monitor: NoiseScaleMonitor | None = None,
    on_finding: Callable[[Finding], None] | None = None,
) -> Generator[Watched]:
    """Watch some real steps of a loop, and say what goes wrong in them; nothing of the loop is changed.

    Any loop will do: one of your own, or `trainer.fit` and `trainer.train` as a whole. Ten steps show the mistakes of
    steps and losses; two epochs those of the data's order. A loss is read from its graph: one that is computed inside
    a compiled model, or by a function of its own, is not: `watched.unread` names it, and its mistakes are not found.
    Backwards of one forward are one microbatch; if there are more of them than `accumulation` before an optimizer step,
    the draws of the dataloader tell which belong together (a GAN's real and fake batch), or `watched.unread` says so:
    say `accumulation` where all forwards of a step come before its backwards, since they have been drawn by then.
    Gradients, weights and random numbers stay as they are, bit for bit; reading makes the host wait for an accelerator.

    On several workers every worker watches: at the end of the context they lay their records side by side, once, over
    `group`. A context that ends in an exception asks no other worker.

    Args:
        model: the model in training.
        optimizer: whose steps are counted; None is any that has a parameter of the model.
        dataloader: the one of the training; without it, or if it has no sampler (a generator), only the order of a
            DistributedSampler is seen.
        scheduler: whose steps are counted; None is any that belongs to that optimizer.
        accumulation: microbatches that a worker's optimizer step is meant to have, >= 1.
        group: the workers of the job; None is the group of a DistributedDataParallel model, or all workers.
        monitor: the noise scale monitor in use; None is any.
        on_finding: called with each mistake when it is first seen.

    Yields:
        Watched: its `findings` hold what was seen so far, and all of it after the context.

    Raises:
        ConfigError: a value out of range, or another watch is open.

    >>> layer = nn.Linear(2, 1)
    >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> with watch(layer, sgd, accumulation=2) as watched:
    ...     for part in torch.randn(3, 2).split(2):  # 2 examples, and 1: two means of uneven parts
    ...         (layer(part).square().mean() / 2).backward()
    ...     sgd.step()
    >>> [finding.code for finding in watched.findings]
    ['LB403']

    Source: Goyal 2017, sec. 3: remarks 3 and 4, and what its subtleties look like in PyTorch loops.
    """
    _check(model, optimizer, accumulation)
    _check_rest(dataloader, scheduler, group, monitor, on_finding)
    if _open:
        raise ConfigError("another watch is open: two would see each other's hooks. End the first one before.")
    watched = Watched(
        model, optimizer, dataloader, scheduler, accumulation=accumulation, monitor=monitor, on_finding=on_finding
    )
    _open.append(watched)
    try:
        with watched._looking():  # pyright: ignore[reportPrivateUsage]
            yield watched
    finally:
        _open.clear()
    workers = group or _group_of(model)
    if workers is not None:
        watched._settle(workers)  # pyright: ignore[reportPrivateUsage]
    watched._tell()  # pyright: ignore[reportPrivateUsage]


def _check(model: Any, optimizer: Any, accumulation: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a torch.nn.Module; got {type(model).__name__}.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError("model is on the meta device, where gradients have no values: watch it after to_empty(...).")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is a torch.optim.Optimizer or None; got {type(optimizer).__name__}.")
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise ConfigError(f"accumulation is a whole number of microbatches, at least 1; got {accumulation!r}.")


def _check_rest(dataloader: Any, scheduler: Any, group: Any, monitor: Any, on_finding: Any) -> None:
    iterates = hasattr(dataloader, "__iter__") and not isinstance(dataloader, str)
    inner = _unwrapped(scheduler, "scheduler")
    steps = callable(getattr(inner, "step", None)) and not isinstance(inner, torch.optim.Optimizer)
    for name, value, is_right, what in (
        ("dataloader", dataloader, iterates, "gives batches"),
        ("scheduler", scheduler, steps, "has a step()"),
        ("group", group, isinstance(group, dist.ProcessGroup), "is a torch.distributed.ProcessGroup"),
        ("monitor", monitor, isinstance(monitor, NoiseScaleMonitor), "is a NoiseScaleMonitor"),
        ("on_finding", on_finding, callable(on_finding), "is a function of a Finding"),
    ):
        if value is not None and not is_right:
            raise ConfigError(f"{name} {what}, or is None; got {value!r}.")


def _unwrapped(thing: Any, name: str) -> Any:
    """An optimizer or scheduler without the wrappers of accelerate and Lightning, which hold it as `name`."""
    inner = getattr(thing, name, None)
    while inner is not None and (name == "optimizer" or not isinstance(thing, LRScheduler)):
        thing, inner = inner, getattr(inner, name, None)
    return thing


def _rates_of(scheduler: Any) -> list[float]:
    """The learning rates that a scheduler has set."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    return [float(group["lr"]) for group in groups if "lr" in group]


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The workers that train together: those of DistributedDataParallel, or all; None for one."""
    if num_workers() == 1:
        return None
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    found: Any = wrappers[0].process_group if wrappers else dist.group.WORLD
    return found
