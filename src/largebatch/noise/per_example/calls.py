"""Which calls of which layers does a backward go through, and what did they see?

A call is kept from the forward until the first backward that goes through it. Its tensors are kept as autograd
keeps its own: by reference, with the check that nobody wrote into them, and through whatever hooks pack them, so
that activation checkpointing and offloading still save what they save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from largebatch.errors import ConfigError
from largebatch.noise.per_example.fallback import gradients_by_example
from largebatch.noise.per_example.forms import Form, Summed
from largebatch.noise.per_example.rules import Rule


@dataclass(kw_only=True, slots=True)
class Scope:
    """One call of the model from outside: what its examples are."""

    owner: nn.Module
    """The module that was called."""
    num_examples: int | None
    """Rows of its first tensor; None if it got no tensor."""
    num_dims: int
    """Dims of its first tensor."""
    depth: int = 0
    """Calls of the owner inside its own call that are open."""
    taken_by: int | None = None
    """The backward that went through it."""
    refusal: str | None = None
    """Why its examples have no gradients of their own."""
    candidates: list[Call] = field(default_factory=list["Call"])
    """Calls whose output may be the same for all examples; only while it is open."""


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One call of a layer that holds parameters."""

    module: nn.Module
    name: str
    scope: Scope
    rule: Rule | None
    """None: run again by torch.func."""
    names: dict[int, str]
    """Index of each parameter to be measured -> its name in the layer."""
    kept: Any = None
    """The autograd node that holds the inputs; None once a backward took them."""
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What the inputs were besides tensors, for torch.func."""
    autocast: AbstractContextManager[Any] = field(default_factory=nullcontext[None])
    refusal: str | None = None
    shape: torch.Size | None = None
    """Shape of the output, where it may be the same for all examples."""
    node: Any = None
    """Autograd node of that output; only while the scope is open."""
    shared: bool = False
    """Whether its gradient is read where the output is given to the examples, not at the output."""
    open: set[int] = field(default_factory=set[int])
    """Parameters whose gradient was not committed yet."""

    def take_tensors(self, backward: int) -> tuple[str | None, tuple[Tensor, ...]]:
        """(None, the tensors that were kept), or why there are none."""
        if self.scope.taken_by not in (None, backward):
            return (
                f"a second backward went through one forward, at {self.name!r}, though its examples are the same. "
                "Use one backward, of the sum of the losses."
            ), ()
        try:
            return None, () if self.kept is None else self.kept.saved_tensors
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            return f"the input of {self.name!r} is gone ({reason}). Do not write into it after the layer.", ()

    def commit(self, parameter: int, backward: int) -> str | None:
        """A gradient was accumulated: keep the tensors no longer than all of them; why no example has one, or None."""
        self.scope.taken_by = backward
        self.open.discard(parameter)
        if not self.open:
            self.kept = None
        return self.scope.refusal


@dataclass(kw_only=True, slots=True, eq=False)
class Use:
    """One call as one backward sees it: what `Call` says, and the gradients that arrived."""

    call: Call
    tensors: tuple[Tensor, ...]
    waiting: set[int]
    """Parameters whose gradient has not arrived."""
    gone: str | None = None
    """Why there are no tensors."""
    grads: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Gradient of each output, by its position."""
    known: dict[str, Form] = field(default_factory=dict[str, Form])
    """Forms that were made, from as many gradients as there were."""
    num_grads: int = 0
    delivered: dict[str, Form] = field(default_factory=dict[str, Form])
    """Forms that were found on the way."""

    def form(self, name: str) -> Form:
        """The form of one parameter; raises ConfigError if the layer cannot be run again."""
        if name in self.delivered:
            return self.delivered[name]
        if self.num_grads != len(self.grads):
            self.known, self.num_grads = self._forms(), len(self.grads)
        return self.known[name]

    def _forms(self) -> dict[str, Form]:
        call = self.call
        if call.rule is not None:
            return call.rule(call.module, self.tensors[0] if self.tensors else None, self.grads[0])
        assert call.inputs is not None and call.scope.num_examples is not None, call.name
        leaves, spec = pytree.tree_flatten(call.inputs)
        tensors = iter(self.tensors)
        leaves = [next(tensors) if leaf is KEPT else leaf for leaf in leaves]
        own = dict(call.module.named_parameters())
        gradients = gradients_by_example(
            call.module,
            {name: own[name] for name in call.names.values()},
            pytree.tree_unflatten(leaves, spec),
            self.grads,
            num_examples=call.scope.num_examples,
            autocast=call.autocast,
        )
        return {name: Summed(gradient.unsqueeze(1)) for name, gradient in gradients.items()}


KEPT = object()
"""Stands where a kept tensor stood."""


class _Keep(torch.autograd.Function):
    """Saves tensors as autograd saves them; is part of no graph and never runs backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("a node that only keeps tensors ran backward")


def keep(anchor: Tensor, tensors: Iterable[Tensor]) -> Any:
    """The node that keeps `tensors`: `node.saved_tensors` gives them back. `anchor` requires a gradient."""
    return _Keep.apply(anchor, *(tensor.detach() for tensor in tensors)).grad_fn  # pyright: ignore


class Deliver(torch.autograd.Function):
    """The output as it is, and parameters whose gradients are what `derive` makes of the output's.

    The layer ran with its parameters frozen, so that autograd computes no gradient of them; this node does.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, output: Tensor, x: Tensor, derive: Callable[[Tensor, Tensor], Sequence[Tensor]], *parameters: Tensor
    ) -> Tensor:
        """Keep the input; the output is the same memory, as no view, so that it may be written into."""
        ctx.save_for_backward(x)
        ctx.derive = derive
        return output.data

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Pass the gradient on, and make the parameters'."""
        (x,) = ctx.saved_tensors
        wanted = any(ctx.needs_input_grad[3:])
        gradients = ctx.derive(x, grad) if wanted else [None] * (len(ctx.needs_input_grad) - 3)
        return (grad if ctx.needs_input_grad[0] else None), None, None, *gradients


def consumers(outputs: Iterable[Tensor], targets: set[Any]) -> dict[Any, list[Any]]:
    """The autograd nodes that take each target's gradient, found by walking the graph back from `outputs`."""
    found: dict[Any, list[Any]] = {target: [] for target in targets}
    seen: set[Any] = set()
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child in found:
                found[child].append(node)
            stack.append(child)
    return found


def reduce_examples(grad: Tensor, shape: torch.Size) -> Tensor:
    """Gradient of each example for a tensor of `shape` that all of them got; (B, ...) -> (B, numel).

    Raises ConfigError where the tensor had a row for each example, or more dims than they have.
    """
    own = list(shape)
    if len(own) == grad.dim() and own[0] == 1:
        own = own[1:]
    if len(own) >= grad.dim():
        raise ConfigError(
            f"a tensor of shape {tuple(shape)} was not shared by the examples of one of shape {tuple(grad.shape)}."
        )
    extra = grad.dim() - 1 - len(own)
    grad = grad.flatten(1, extra).sum(1) if extra else grad
    if not own:
        return grad.unsqueeze(1)
    dims = [dim + 1 for dim, size in enumerate(own) if size == 1 and grad.shape[dim + 1] != 1]
    return (grad.sum(dims, keepdim=True) if dims else grad).flatten(1)


def first_shape(args: object) -> torch.Size | None:
    """Shape of the first tensor with a dim, in order of the arguments; None if there is none."""
    for leaf in pytree.tree_leaves(args):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape
    return None
