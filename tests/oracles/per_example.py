"""Independent float64 numpy oracles for one example's gradient; imports nothing from src.

Every function takes an input x and the gradient g of the output, both with examples in dim 0, and returns gradients
of shape (B, *parameter): sums over output positions, written as loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def sq_norms(*gradients: Array) -> Array:
    """Squared norm of each example over all its gradients, (B,)."""
    return np.sum([(gradient.reshape(len(gradient), -1) ** 2).sum(axis=1) for gradient in gradients], axis=0)


def linear(x: Array, g: Array) -> tuple[Array, Array]:
    """(weight, bias) of y = W x + b at every position."""
    weight = np.stack(
        [sum(np.outer(g[(b, *at)], x[(b, *at)]) for at in np.ndindex(x.shape[1:-1])) for b in range(len(x))]
    )
    return weight, g.reshape(len(g), -1, g.shape[-1]).sum(axis=1)


def embedding(ids: NDArray[np.int64], g: Array, num_rows: int, padding_idx: int | None = None) -> Array:
    """Table of a look-up: each position adds its gradient to its row."""
    table = np.zeros((len(ids), num_rows, g.shape[-1]))
    for at in np.ndindex(ids.shape):
        if ids[at] != padding_idx:
            table[at[0], ids[at]] += g[at]
    return table


def convolution(
    x: Array, g: Array, kernel: Sequence[int], *, stride: Sequence[int], dilation: Sequence[int],
    padding: Sequence[tuple[int, int]], groups: int, padding_mode: str,
) -> tuple[Array, Array]:  # fmt: skip
    """(weight, bias) of a convolution in any number of dims; padding is (before, after) for each."""
    mode = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}[padding_mode]
    x = np.pad(x, [(0, 0), (0, 0), *padding], mode=mode)  # type: ignore[call-overload]
    ins, outs = x.shape[1] // groups, g.shape[1] // groups
    weight = np.zeros((len(x), g.shape[1], ins, *kernel))
    for tap in itertools.product(*map(range, kernel)):
        for at in np.ndindex(g.shape[2:]):
            place = tuple(t * d + a * s for t, d, a, s in zip(tap, dilation, at, stride, strict=True))
            for group in range(groups):
                seen = x[(slice(None), slice(group * ins, (group + 1) * ins), *place)]
                told = g[(slice(None), slice(group * outs, (group + 1) * outs), *at)]
                rows = slice(group * outs, (group + 1) * outs)
                weight[(slice(None), rows, slice(None), *tap)] += told[:, :, None] * seen[:, None, :]
    return weight, g.reshape(*g.shape[:2], -1).sum(axis=2)


def layer_norm(x: Array, g: Array, num_dims: int, eps: float, *, centre: bool = True) -> tuple[Array, Array]:
    """(scale, shift) of LayerNorm over the last dims; without `centre`, RMSNorm."""
    shape = x.shape[x.ndim - num_dims :]
    flat, told = (array.reshape(len(x), -1, int(np.prod(shape))) for array in (x, g))
    flat = flat - flat.mean(axis=2, keepdims=True) if centre else flat
    normal = flat / np.sqrt((flat**2).mean(axis=2, keepdims=True) + eps)
    return (normal * told).sum(axis=1), told.sum(axis=1)


def group_norm(x: Array, g: Array, groups: int, eps: float) -> tuple[Array, Array]:
    """(scale, shift) of GroupNorm; with as many groups as channels, of InstanceNorm."""
    parts = x.reshape(len(x), groups, -1)
    parts = parts - parts.mean(axis=2, keepdims=True)
    normal = (parts / np.sqrt((parts**2).mean(axis=2, keepdims=True) + eps)).reshape(*x.shape[:2], -1)
    told = g.reshape(*g.shape[:2], -1)
    return (normal * told).sum(axis=2), told.sum(axis=2)
