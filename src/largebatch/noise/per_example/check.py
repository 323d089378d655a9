"""Does each example have a loss of its own?"""

from __future__ import annotations

import torch
from torch import Tensor

from largebatch.errors import ConfigError

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""How large a foreign part of a row's gradient may be, relative to the row, for rounding's sake."""
TOLERANCE_HALF = 5e-2
"""The same in float16 and bfloat16."""


def check_independent(losses: Tensor, outputs: Tensor) -> None:
    """Raise unless example i's loss depends on row i of `outputs` alone.

    What per-example norms assume and the layers cannot show: a contrastive, ranking or batch-normalised loss compares
    examples, and none of them then has a gradient of its own. Two backwards down to `outputs`, one with every loss
    weighted at random, must agree row by row; nothing is accumulated, and the graph stays.

    Args:
        losses: each example's loss, before any mean or sum, shape (B,).
        outputs: what they were made from, shape (B, ...), with a graph: the model's output, or the input of a
            model (with requires_grad) to hold its layers to it as well.

    Raises:
        ConfigError: the losses depend on other rows, or the shapes are not those.

    >>> outputs = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    >>> check_independent(outputs.square().sum(1), outputs)
    >>> check_independent((outputs - outputs.mean(0)).square().sum(1), outputs)
    Traceback (most recent call last):
    ...
    largebatch.errors.ConfigError: the losses compare examples: those of 2 of 2 rows depend on other rows ...

    Source: ours; the assumption is that of per-example gradients as such (Goodfellow 2015, arXiv:1510.01799).
    """
    if losses.dim() != 1 or outputs.dim() < 1 or len(outputs) != len(losses):
        raise ConfigError(
            f"one loss and one row for each example are needed; got losses of shape {tuple(losses.shape)} and outputs "
            f"of shape {tuple(outputs.shape)}. Use reduction='none' and average over positions."
        )
    weights = torch.randn(len(losses), generator=torch.Generator().manual_seed(0)).to(losses)
    (plain,) = torch.autograd.grad(losses.sum(), outputs, retain_graph=True)
    (weighted,) = torch.autograd.grad(losses @ weights, outputs, retain_graph=True)
    plain = plain.flatten(1) if plain.dim() > 1 else plain.unsqueeze(1)
    expected = plain * weights.to(plain).unsqueeze(1)
    foreign = (weighted.reshape(plain.shape) - expected).norm(dim=1)
    allowed = TOLERANCE.get(outputs.dtype, TOLERANCE_HALF) * (
        expected.norm(dim=1) + weighted.reshape(plain.shape).norm(dim=1)
    )
    num_coupled = int((foreign > allowed).sum())
    if num_coupled:
        raise ConfigError(
            f"the losses compare examples: those of {num_coupled} of {len(losses)} rows depend on other rows of the "
            "outputs, so no example has a gradient of its own. Measure by microbatches."
        )
