"""Which models do the benchmarks of measuring run on?

Each comes with one microbatch of random data and its loss per example: what a step costs does not depend on the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Work(NamedTuple):
    """A model, a microbatch and the losses of its examples."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    losses: Callable[[Tensor, Tensor], Tensor]
    """(outputs, targets) -> one loss per example, shape (examples,)."""

    def loss(self, model: nn.Module | None = None) -> Tensor:
        """The mean loss of the microbatch."""
        return self.losses((model or self.model)(self.inputs), self.targets).mean()


def small_cnn() -> Work:
    """5 k parameters in 8 tensors, 64 images of 28 x 28."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    return Work(model, torch.randn(64, 1, 28, 28), torch.randint(10, (64,)), _cross_entropy)


def resnet18() -> Work:
    """torchvision's, 11.2 M parameters in 62 tensors, 32 images of 32 x 32.

    The stem of the 224 px network stays, so a parameter does little work for its gradient: hard for measuring.
    """
    from torchvision.models import resnet18 as make

    return Work(make(num_classes=10), torch.randn(32, 3, 32, 32), torch.randint(10, (32,)), _cross_entropy)


class Block(nn.Module):
    """A transformer block, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(sequences, tokens, width) to the same."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A small language model, output tied to the embedding."""

    def __init__(self, vocabulary: int = 512, context: int = 64, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (sequences, tokens) to logits (sequences, tokens, vocabulary)."""
        hidden = self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        return self.norm(hidden) @ self.tokens.weight.T


def gpt() -> Work:
    """0.9 M parameters in 52 tensors, 8 sequences of 64 tokens."""
    ids = torch.randint(512, (8, 65))
    return Work(GPT(), ids[:, :-1], ids[:, 1:], _token_losses)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def _token_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1)


WORKS: dict[str, Callable[[], Work]] = {"small CNN": small_cnn, "ResNet-18": resnet18, "GPT": gpt}
