"""By what is a loss divided? Read from its graph, from the loss down to the first mean or sum over units.

Nothing is run or changed: a node of the graph tells by which number it multiplied and over how many elements it took
a mean. What is not understood is refused with its name, and never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_THROUGH = frozenset(
    ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Expand", "Neg")
)
"""Nodes that hand the same number on, but for its sign."""
_MEAN, _SUM = 1, 2  # torch's numbers of a loss's reduction


class UnreadError(Exception):
    """A part of the graph that is not understood; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One mean or sum over units, as it stands in a loss."""

    count: int
    """Elements it goes over; labels that count, for a cross-entropy."""
    is_mean: bool
    """Whether it is their mean, not their sum."""
    factor: float
    """What it is multiplied by, divisors included, its sign and a gradient scaler's scale left out."""
    divisor: float = 1.0
    """The first number that a sum is divided by."""


def read_terms(loss: Tensor, scales: Mapping[Any, float], factor: float = 1.0) -> tuple[Term, ...]:
    """The terms of a loss, in the order in which they stand in its graph.

    Args:
        loss: one number, before its backward.
        scales: by graph node, the scale of a gradient scaler that is to be left out.
        factor: what a backward multiplies the loss by.

    Raises:
        UnreadError: the loss is not one number, or a node is not understood.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UnreadError(f"a loss of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__)
    try:
        return tuple(_walk(loss.grad_fn, loss.output_nr, factor, 1.0, scales))
    except (AttributeError, RuntimeError) as error:  # a node without what it had, freed, or too deep a graph
        raise UnreadError(f"{type(loss.grad_fn).__name__} ({error})") from error


def _walk(node: Any, output: int, factor: float, divisor: float, scales: Mapping[Any, float]) -> Iterator[Term]:
    if node is None:
        raise UnreadError("a loss without a graph")
    kind = _kind(node)
    factor /= scales.get(node, 1.0)
    edges = _edges(node)
    children = [edge for edge in edges if edge[0] is not None]
    if kind == "_DDPSink":  # hands each of its inputs on as an output
        yield from _walk(*edges[output], factor, divisor, scales)
    elif kind in _THROUGH and len(children) == 1:
        yield from _walk(*children[0], factor, divisor, scales)
    elif kind == "Div":
        number, child = _operand(node, kind)
        yield from _walk(*child, factor / number, number, scales)
    elif kind == "Mul":
        number, child = _operand(node, kind)
        yield from _walk(*child, factor * number, divisor, scales)
    elif kind in ("Add", "Sub"):
        for index, edge in enumerate(edges):
            if edge[0] is not None:
                yield from _walk(*edge, factor * (float(node._saved_alpha) if index else 1.0), divisor, scales)
    elif kind in ("Mean", "Sum") and _kind(children[0][0]) == "Stack" and _numel(node) == _num_stacked(children[0][0]):
        share = factor / _numel(node) if kind == "Mean" else factor
        for edge in _edges(children[0][0]):
            if edge[0] is not None:
                yield from _walk(*edge, share, divisor, scales)
    else:
        yield _term(node, kind, [child for child, _ in children], factor, divisor)


def _term(node: Any, kind: str, children: Sequence[Any], factor: float, divisor: float) -> Term:
    """The mean or sum that a node is; raises UnreadError if it is neither."""
    if kind == "Sum" and children and _kind(children[0]) == "Mean" and hasattr(children[0], "_saved_dim"):
        return Term(count=_reduced(children[0]), is_mean=True, factor=abs(factor))
    if kind in ("Mean", "Sum"):
        return Term(count=_numel(node), is_mean=kind == "Mean", factor=abs(factor), divisor=divisor)
    reduction = getattr(node, "_saved_reduction", 0)
    if reduction not in (_MEAN, _SUM):
        raise UnreadError(type(node).__name__)
    count = _num_labels(node) if kind.startswith("NllLoss") else node._saved_self.numel()
    return Term(count=count, is_mean=reduction == _MEAN, factor=abs(factor), divisor=divisor)


def _edges(node: Any) -> list[tuple[Any, int]]:
    """What a node's gradient goes to: nodes, each with the number of its output."""
    return list(node.next_functions)


def _kind(node: Any) -> str:
    """A node's name without "Backward" and its number."""
    return re.sub(r"Backward\d*$", "", type(node).__name__)


def _operand(node: Any, kind: str) -> tuple[float, tuple[Any, int]]:
    """The number that a loss is multiplied or divided by, and the edge to the loss."""
    edges = _edges(node)
    if not hasattr(node, "_saved_self"):
        return float(node._saved_other), edges[0]
    is_other = edges[0][0] is None
    if (kind == "Mul" and all(child is not None for child, _ in edges)) or (kind == "Div" and is_other):
        raise UnreadError(f"{type(node).__name__} of two losses")
    number: Tensor = node._saved_self if is_other else node._saved_other
    if number.numel() != 1:
        raise UnreadError(f"{type(node).__name__} by a tensor of shape {tuple(number.shape)}")
    return float(number), edges[1 if is_other else 0]


def _numel(node: Any) -> int:
    return math.prod(node._saved_self_sym_sizes)


def _reduced(node: Any) -> int:
    """Elements of each mean that a node takes over some dims."""
    sizes = node._saved_self_sym_sizes
    dims: Sequence[int] = node._saved_dim
    # torch keeps a negative dim as an unsigned number
    return math.prod(sizes[dim - 2**64 if dim >= 2**63 else dim] for dim in dims) if dims else math.prod(sizes)


def _num_stacked(node: Any) -> int:
    return len(node.next_functions)


def _num_labels(node: Any) -> int:
    """Labels that count in a cross-entropy: those that are not `ignore_index`."""
    if node._saved_weight is None:
        return int(node._saved_total_weight)
    ignored = node._saved_ignore_index
    return int((node._saved_target != (ignored - 2**64 if ignored >= 2**63 else ignored)).sum())
