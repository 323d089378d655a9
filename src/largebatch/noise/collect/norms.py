"""How long is a gradient, to float32's last digits and without a copy?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 2**18
"""Elements in one dot product on a CPU. A float32 dot of so many is right to about 1e-6; of 25 M to 1e-4 only."""
CHUNK_ELSEWHERE = 2**22
"""The same on an accelerator, whose dot adds thousands of parts up side by side, and where a launch costs more."""
SMALL = 2**12
"""Elements up to which gradients are kept until the backward's end, and read together."""


def sq_norm_dots(tensor: Tensor, weights: Tensor | None = None, *, wide: bool = False) -> list[Tensor]:
    """Dot products, of at most CHUNK elements each, whose sum (in float64) is the squared norm of `tensor`.

    Args:
        tensor: any shape, dtype and device. A dense one is read in the order of its memory, whatever its
            strides, so channels-last is not copied; half precision is widened to float32 chunk by chunk.
        weights: of the same shape; then the sum is of weights times squares.
        wide: square in float64, where the device has it. float32 squares nothing below 1e-19 or above 1e19.

    Returns:
        0-dim tensors on the device of `tensor`, float32 or wider; no host sync.

    >>> [dot.item() for dot in sq_norm_dots(torch.tensor([[1.0, 2.0], [2.0, 4.0]]))]
    [25.0]
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    plain = weights is None and not wide and tensor.dtype is torch.float32
    if plain and tensor.numel() <= CHUNK and tensor.is_contiguous():
        flat = tensor.view(-1)
        return [torch.dot(flat, flat)]
    device = tensor.device.type
    size = CHUNK if device == "cpu" else CHUNK_ELSEWHERE
    widen = _to_float64 if wide and device != "mps" else _to_float32
    if weights is None:
        return [torch.dot(chunk, chunk) for chunk in map(widen, flat_view(tensor).split(size))]
    same = tensor.stride() == weights.stride()
    flat, flat_weights = (flat_view(x) if same else x.reshape(-1) for x in (tensor, weights.detach()))
    pairs = zip(map(widen, flat.split(size)), map(widen, flat_weights.split(size)), strict=True)
    return [torch.dot(chunk * part, chunk) for chunk, part in pairs]


def sq_norm_dots_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same of all of several small float32 tensors together: one copy of them costs less than a dot of each."""
    try:
        return sq_norm_dots(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    except RuntimeError:  # they are on several devices
        return [dot for tensor in tensors for dot in sq_norm_dots(tensor)]


def sq_norm(tensor: Tensor | None) -> Tensor:
    """Squared norm of a tensor, 0-dim on its device; 0 for None."""
    if tensor is None:
        return torch.zeros(())
    dots = sq_norm_dots(tensor)
    return dots[0] if len(dots) == 1 else torch.stack(dots).sum()


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


def total(dots: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of dots on `device`, 0 for none; 0-dim, no host sync."""
    if not dots:
        return torch.zeros((), device=device)
    return torch.stack([dot.to(device, non_blocking=True) for dot in dots]).sum()


class Tally:
    """Adds dot products up by owner, on their device, in float64 (float32 where a device has no wider)."""

    def __init__(self) -> None:
        self._owners: tuple[tuple[int, ...], Tensor] = ((), torch.empty(0))

    def sums(self, dots: list[Tensor], owners: Sequence[int], num_owners: int, device: torch.device) -> Tensor:
        """Sum of the dots of each owner, shape (num_owners,), on `device`; no host sync.

        The owners go to the device once as long as they stay the same from call to call.
        """
        if device.type == "cpu":  # nobody waits there, and numbers add up faster than small tensors
            numbers = [0.0] * num_owners
            for dot, owner in zip(dots, owners, strict=True):
                numbers[owner] += dot.item()
            return torch.tensor(numbers, dtype=torch.float64)
        wide = torch.float32 if device.type == "mps" else torch.float64
        total = torch.zeros(num_owners, dtype=wide, device=device)
        if not dots:
            return total
        key = tuple(owners)
        if self._owners[0] != key or self._owners[1].device != device:
            self._owners = (key, torch.tensor(key).to(device, non_blocking=True))
        try:
            values = torch.stack(dots)
        except RuntimeError:  # they are on several devices
            values = torch.stack([dot.to(device, non_blocking=True) for dot in dots])
        return total.index_add_(0, self._owners[1], values.to(wide))


def _to_float32(chunk: Tensor) -> Tensor:
    return chunk.float() if chunk.dtype in (torch.float16, torch.bfloat16) else chunk


def _to_float64(chunk: Tensor) -> Tensor:
    return chunk.double()
