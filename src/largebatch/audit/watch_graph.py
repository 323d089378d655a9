"""Which losses come from one forward? Those whose graphs share a node.

A node is known by its number, which autograd never gives twice in a thread: no part of a graph is kept alive for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_LEAF = 2**64 - 1
"""The number that autograd gives all nodes of parameters."""
_MOST = 50_000
"""Nodes that are looked at, those next to the loss first."""


def find_nodes(roots: Sequence[Tensor]) -> frozenset[int]:
    """The numbers of the nodes that a backward of `roots` runs through.

    Parameters are left out, and so are their casts and views: autocast caches one cast for all forwards inside it.
    """
    found: set[int] = set()
    seen: set[Any] = set()
    ahead: list[Any] = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn is not None]
    for node in ahead:  # grows while it is walked
        if node in seen or len(seen) >= _MOST:
            continue
        seen.add(node)
        if not _is_of_a_parameter(node):
            found.add(node._sequence_nr())
            ahead += [child for child, _ in node.next_functions if child is not None]
    return frozenset(found)


def _is_of_a_parameter(node: Any) -> bool:
    """Whether a node is a parameter's, or the only thing between it and the parameter is a chain of such nodes."""
    while node is not None and node._sequence_nr() != _LEAF:
        if len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return node is not None
