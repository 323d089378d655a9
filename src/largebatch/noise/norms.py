"""How long is a gradient, to float32's last digits and without a copy?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 2**18
"""Elements in one dot product. A float32 dot of so many is right to about 1e-6; of 25 M to 1e-4 only."""


def sq_norm_dots(tensor: Tensor, weights: Tensor | None = None) -> list[Tensor]:
    """Dot products, of at most CHUNK elements each, whose sum (in float64) is the squared norm of `tensor`.

    Args:
        tensor: any shape, dtype and device. A dense one is read in the order of its memory, whatever its
            strides, so channels-last is not copied; half precision is widened to float32 chunk by chunk.
        weights: of the same shape; then the sum is of weights times squares.

    Returns:
        0-dim tensors on the device of `tensor`, float32 or wider; no host sync.

    >>> [dot.item() for dot in sq_norm_dots(torch.tensor([[1.0, 2.0], [2.0, 4.0]]))]
    [25.0]
    """
    tensor = tensor.detach()
    if weights is None:
        if tensor.numel() <= CHUNK and tensor.dtype == torch.float32 and tensor.is_contiguous():
            flat = tensor.view(-1)
            return [torch.dot(flat, flat)]
        return [torch.dot(chunk, chunk) for chunk in map(_widen, flat_view(tensor).split(CHUNK))]
    same = tensor.stride() == weights.stride()
    flat, flat_weights = (flat_view(x) if same else x.reshape(-1) for x in (tensor, weights.detach()))
    pairs = zip(map(_widen, flat.split(CHUNK)), map(_widen, flat_weights.split(CHUNK)), strict=True)
    return [torch.dot(chunk * part, chunk) for chunk, part in pairs]


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of `tensor` in one dim, in the order of memory: a view wherever its memory has no gaps."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return tensor.reshape(-1)
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


class Tally:
    """Adds dot products up by owner, on their device, in float64 (float32 where a device has no wider)."""

    def __init__(self) -> None:
        self._owners: tuple[tuple[int, ...], Tensor] = ((), torch.empty(0))

    def sums(self, dots: Sequence[Tensor], owners: Sequence[int], num_owners: int, device: torch.device) -> Tensor:
        """Sum of the dots of each owner, shape (num_owners,), on `device`; no host sync.

        The owners go to the device once as long as they stay the same from call to call.
        """
        wide = torch.float32 if device.type == "mps" else torch.float64
        total = torch.zeros(num_owners, dtype=wide, device=device)
        if not dots:
            return total
        key = tuple(owners)
        if self._owners[0] != key or self._owners[1].device != device:
            self._owners = (key, torch.tensor(key, device=device))
        values = torch.stack([dot if dot.device == device else dot.to(device, non_blocking=True) for dot in dots])
        return total.index_add_(0, self._owners[1], values.to(wide))


def _widen(chunk: Tensor) -> Tensor:
    return chunk.float() if chunk.dtype in (torch.float16, torch.bfloat16) else chunk
