"""What happened in each optimizer step: backwards, schedulers, clipping, measuring?

It is written down in the order in which it happened; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.audit.watch_graph import find_nodes
from largebatch.audit.watch_loss import Term, UnreadError, read_terms
from largebatch.groups import is_spread
from largebatch.noise.collect.changes import version_of

MAX_STEPS = 1000
"""Steps that are kept; the rest are only counted."""
_LOOKED_AT = 4  # gradients whose norms are read, to see whether they are changed


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a backward's loss comes from."""

    forward: int
    """Number of its forward; backwards of one forward share it."""
    draw: tuple[int, int] | None
    """The sampler that had drawn last, and how many draws there had been; None if none was seen."""


@dataclass(kw_only=True, slots=True)
class Step:
    """One optimizer step, from the end of the one before to its own."""

    events: list[str] = field(default_factory=list[str])
    """"B" for a backward, "0" for one that was zeroed, "S0" for a step of the first scheduler, and so on."""
    losses: list[tuple[Term, ...]] = field(default_factory=list[tuple[Term, ...]])
    """The terms of each backward's loss; empty where it was not read."""
    origins: list[Origin] = field(default_factory=list[Origin])
    """What each of these losses comes from."""
    is_clean: bool = False
    """Whether a backward of it began with gradients that were zero or None, or may have."""
    is_known: bool = True
    """Whether gradients that were zeroed before its backwards would have been seen to be."""
    changed_by: str = ""
    """What changed the gradients between the last backward and a monitor's measuring; empty if nothing did."""

    @property
    def num_backwards(self) -> int:
        """Backwards whose gradients it stepped on."""
        return self.events.count("B")

    @property
    def num_forwards(self) -> int:
        """Forwards that these belong to."""
        return len({origin.forward for origin in self.origins})

    def discard(self) -> None:
        """Take the backwards so far for none of this step's: their gradients were zeroed."""
        self.events = ["0" if event == "B" else event for event in self.events]
        self.losses.clear()
        self.origins.clear()
        self.is_known = True


class StepRecorder:
    """Takes down a loop's steps, as hooks and wrapped functions tell of them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, on_step: Callable[[], None]) -> None:
        """Record the steps of `optimizer`, or of any with a parameter of `model`; `on_step` is called after each."""
        self.steps: list[Step] = []
        """Steps that are complete, at most MAX_STEPS."""
        self.num_steps = self.num_backwards = 0
        self.unread: dict[str, None] = {}
        """What kept a loss from being read, in the order in which it was met."""
        self.on_backward: Callable[[], None] = lambda: None
        """Called after each backward that gave the model a gradient."""
        self.last_draw: Callable[[], tuple[int, int] | None] = lambda: None
        """The sampler that has drawn last, and how many draws there have been; None if none was seen."""
        self._model, self._optimizer, self._on_step = model, optimizer, on_step
        self._step, self._in_backward = Step(), False
        self._sharded: dict[str, nn.Parameter] = {}
        self._is_held = self._was_held = False  # gradients where they cannot be seen: of this step, of the last one
        self._num_forwards = 0
        self._graphs: list[frozenset[int]] = []
        self._schedulers: list[tuple[Any, str]] = []
        self._scales: dict[Any, float] = {}
        self._marks: list[tuple[int, int]] = []
        self._norms: list[Tensor] = []
        self._changed_by = ""
        self._remember()
        self._is_known = self._knows_all(optimizer)

    def backward(self, original: Callable[..., Any], tensors: Any, grad_tensors: Any, rest: Any, named: Any) -> Any:
        """Run a backward, and take it down if it gave the model a gradient."""
        if self._in_backward:  # a checkpoint's own, inside another
            return original(tensors, grad_tensors, *rest, **named)
        roots: Sequence[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._remember()
        before, zeroed = self._find_marks(), self._is_zeroed()
        told = self._is_known and not self._was_held
        sharded = self._find_sharded_marks()
        terms, nodes = self._read(roots, grad_tensors), find_nodes(roots)
        self._in_backward = True
        try:
            result = original(tensors, grad_tensors, *rest, **named)
        finally:
            self._in_backward = False
            self._scales.clear()
        self._remember()
        after = self._find_marks()
        if after != before or self._sharded:  # fully_shard keeps what is not reduced yet where it cannot be seen
            self.num_backwards += 1
            if zeroed and told and not self._is_held:
                self._step.discard()
                self._graphs.clear()
            self._step.is_known &= told
            self._step.is_clean |= zeroed and not (told and self._is_held)
            if self._sharded:
                self._is_held = self._find_sharded_marks() == sharded
                self._was_held &= self._is_held
            self._step.events.append("B")
            self._step.losses.append(terms)
            self._note_origin(nodes)
            self._mark(after)
            self.on_backward()
        return result

    def scheduled(self, scheduler: Any, by: str = "step") -> None:
        """Take down that a scheduler has stepped, by its function of that name."""
        known = [index for index, (other, name) in enumerate(self._schedulers) if other is scheduler and name == by]
        if not known:
            self._schedulers.append((scheduler, by))
        self._step.events.append(f"S{known[0] if known else len(self._schedulers) - 1}")

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take down that an optimizer has stepped, or that its scaler skipped the step."""
        if not self.is_ours(optimizer):
            return
        self.num_steps += 1
        if self.num_steps <= MAX_STEPS:
            self.steps.append(self._step)
        self._step, self._changed_by = Step(), ""
        self._marks, self._norms = [], []
        self._graphs.clear()
        self._was_held, self._is_held = self._is_held or self._was_held, False
        self._remember()
        self._is_known = self._knows_all(optimizer)
        self._on_step()

    def is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its steps are the ones that are watched."""
        if self._optimizer is not None:
            return optimizer is self._optimizer
        own = {id(parameter) for parameter in (*self._model.parameters(), *self._sharded.values())}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def scaled(self, outputs: Any, scale: float) -> None:
        """Take down that a gradient scaler has multiplied losses by `scale`."""
        for output in outputs if isinstance(outputs, list | tuple) else [outputs]:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                self._scales[output.grad_fn] = scale

    def unscaling(self) -> None:
        """A gradient scaler is about to divide the gradients, which is no clipping."""
        self._look_for_changes()

    def unscaled(self) -> None:
        """It has done so."""
        if self._marks:
            self._mark(self._find_marks())

    def clipped(self, by: str) -> None:
        """Take down that a function that clips was called."""
        self._changed_by = by

    def measuring(self) -> None:
        """A monitor is about to read the gradients."""
        self._look_for_changes()
        self._step.changed_by = self._changed_by

    def _remember(self) -> None:
        """Note the parameters of fully_shard, which holds them out of sight from a forward to its backward."""
        self._sharded |= {name: own for name, own in self._model.named_parameters() if is_spread(own)}

    def _knows_all(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether no parameter of fully_shard, which an optimizer holds, is still out of sight."""
        if optimizer is None:
            is_plain = not any(hasattr(module, "set_requires_gradient_sync") for module in self._model.modules())
            return is_plain or all(name in self._sharded for name, _ in self._model.named_parameters())
        known = {id(parameter) for parameter in self._sharded.values()}
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return all(id(parameter) in known for parameter in held if is_spread(parameter))

    def _parameters(self) -> list[nn.Parameter]:
        own = (self._sharded.get(name, parameter) for name, parameter in self._model.named_parameters())
        return [parameter for parameter in own if parameter.requires_grad]

    def _find_sharded_marks(self) -> list[tuple[int, int]]:
        grads = (parameter.grad for parameter in self._sharded.values())
        return [version_of(None if grad is None else _local(grad)) for grad in grads]

    def _note_origin(self, nodes: frozenset[int]) -> None:
        """Take down which forward a backward belongs to: that of an earlier one that shares a node, or one more."""
        origins = self._step.origins
        same = {
            origin.forward for origin, graph in zip(origins, self._graphs, strict=True) if not graph.isdisjoint(nodes)
        }
        self._num_forwards += not same
        number = min(same, default=self._num_forwards)
        origins[:] = [replace(each, forward=number) if each.forward in same else each for each in origins]
        origins.append(Origin(forward=number, draw=self.last_draw()))
        self._graphs.append(nodes)

    def _find_marks(self) -> list[tuple[int, int]]:
        """Where each gradient is, and how often it was changed in place."""
        grads = (parameter.grad for parameter in self._parameters())
        return [version_of(None if grad is None else _local(grad)) for grad in grads]

    def _is_zeroed(self) -> bool:
        """Whether all gradients are None or 0."""
        # fully_shard holds what is not reduced yet in the parameters that it shows from a forward to its backward.
        shown = self._model.parameters() if self._sharded else ()
        held = (parameter.grad for parameter in (*self._parameters(), *shown))
        return not any(bool(_local(grad).count_nonzero()) for grad in held if grad is not None)

    def _mark(self, marks: list[tuple[int, int]]) -> None:
        self._marks, self._norms = marks, self._find_norms()

    def _find_norms(self) -> list[Tensor]:
        """The norms of the first few gradients: neither `.data` nor all scalers count versions up."""
        held = (parameter.grad for parameter in self._parameters())
        grads = [grad for grad in held if grad is not None][:_LOOKED_AT]
        return [torch.linalg.vector_norm(_local(grad)) for grad in grads]

    def _look_for_changes(self) -> None:
        if self._changed_by or not self._marks:
            return
        now = self._find_norms()
        same = len(now) == len(self._norms) and all(map(torch.equal, now, self._norms))
        if not same or self._find_marks() != self._marks:
            self._changed_by = "something"

    def _read(self, roots: Sequence[Tensor], grad_tensors: Any) -> tuple[Term, ...]:
        given: Any = [grad_tensors] * len(roots) if isinstance(grad_tensors, Tensor | None) else grad_tensors
        grads: list[Tensor | None] = list(given)
        terms: list[Term] = []
        try:
            for root, grad in zip(roots, grads, strict=True):
                factor = 1.0 if grad is None or grad.numel() != 1 else float(grad)
                terms += read_terms(root, self._scales, factor)
        except UnreadError as error:
            self.unread[str(error)] = None
            return ()
        return tuple(terms)


def _local(grad: Tensor) -> Tensor:
    """A gradient's part on this worker, without its graph; of a sparse one its values. It asks no other worker."""
    own: Tensor = getattr(grad, "_local_tensor", grad).detach()
    return own._values() if own.is_sparse else own
