"""What happened in each optimizer step: backwards, schedulers, clipping, measuring?

It is written down in the order in which it happened; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.audit.watch_loss import Term, UnreadError, read_terms
from largebatch.noise.collect.changes import version_of

MAX_STEPS = 1000
"""Steps that are kept; the rest are only counted."""
_LOOKED_AT = 4  # gradients whose norms are read, to see whether they are changed


@dataclass(kw_only=True, slots=True)
class Step:
    """One optimizer step, from the end of the one before to its own."""

    events: list[str] = field(default_factory=list[str])
    """"B" for a backward, "0" for one that was zeroed, "S0" for a step of the first scheduler, and so on."""
    losses: list[tuple[Term, ...]] = field(default_factory=list[tuple[Term, ...]])
    """The terms of each backward's loss; empty where it was not read."""
    is_clean: bool = False
    """Whether a backward of it began with gradients that were zero or None."""
    changed_by: str = ""
    """What changed the gradients between the last backward and a monitor's measuring; empty if nothing did."""

    @property
    def num_backwards(self) -> int:
        """Microbatches of this worker."""
        return self.events.count("B")

    def discard(self) -> None:
        """Take the backwards so far for none of this step's: their gradients were zeroed."""
        self.events = ["0" if event == "B" else event for event in self.events]
        self.losses.clear()


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
        self._model, self._optimizer, self._on_step = model, optimizer, on_step
        self._step, self._in_backward = Step(), False
        self._schedulers: list[Any] = []
        self._scales: dict[Any, float] = {}
        self._marks: list[tuple[int, int]] = []
        self._norms: list[Tensor] = []
        self._changed_by = ""

    def backward(self, original: Callable[..., Any], tensors: Any, grad_tensors: Any, rest: Any, named: Any) -> Any:
        """Run a backward, and take it down if it gave the model a gradient."""
        if self._in_backward:  # a checkpoint's own, inside another
            return original(tensors, grad_tensors, *rest, **named)
        roots: Sequence[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        before, clean = self._find_marks(), self._is_zeroed()
        terms = self._read(roots, grad_tensors)
        self._in_backward = True
        try:
            result = original(tensors, grad_tensors, *rest, **named)
        finally:
            self._in_backward = False
            self._scales.clear()
        after = self._find_marks()
        if after != before or any(hasattr(parameter, "device_mesh") for parameter in self._parameters()):
            # fully_shard keeps what is not reduced yet where it cannot be seen
            self.num_backwards += 1
            if clean:
                self._step.discard()
            self._step.events.append("B")
            self._step.losses.append(terms)
            self._step.is_clean |= clean
            self._mark(after)
            self.on_backward()
        return result

    def scheduled(self, scheduler: Any) -> None:
        """Take down that a scheduler has stepped."""
        known = [index for index, other in enumerate(self._schedulers) if other is scheduler]
        if not known:
            self._schedulers.append(scheduler)
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
        self._on_step()

    def is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its steps are the ones that are watched."""
        if self._optimizer is not None:
            return optimizer is self._optimizer
        own = {id(parameter) for parameter in self._model.parameters()}
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

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _find_marks(self) -> list[tuple[int, int]]:
        """Where each gradient is, and how often it was changed in place."""
        grads = (parameter.grad for parameter in self._parameters())
        return [version_of(None if grad is None else _local(grad)) for grad in grads]

    def _is_zeroed(self) -> bool:
        """Whether all gradients are None or 0."""
        held = (parameter.grad for parameter in self._parameters())
        return not any(bool(_local(grad).count_nonzero()) for grad in held if grad is not None and not grad.is_sparse)

    def _mark(self, marks: list[tuple[int, int]]) -> None:
        self._marks, self._norms = marks, self._find_norms()

    def _find_norms(self) -> list[Tensor]:
        """The norms of the first few gradients: neither `.data` nor all scalers count versions up."""
        held = (parameter.grad for parameter in self._parameters())
        grads = [grad for grad in held if grad is not None and not grad.is_sparse][:_LOOKED_AT]
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
    """A gradient's part on this worker, without its graph; reading it asks no other worker."""
    return getattr(grad, "_local_tensor", grad).detach()
