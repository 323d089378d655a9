"""Which network stands in for ResNet-50? Two residual blocks with batch norm over groups of n, several seeds at once.

Nets that differ only in their seed share one forward: seed s owns the s-th part of every layer's channels, and every
convolution has one group a seed, so that no seed sees another's weights, pictures or statistics. At a batch of 32 this
gives twice as many pictures a second as one net after the other; the arithmetic is that of separate nets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

MOMENTUM = 0.1
"""How far a running statistic moves in a step: torch's 0.1 is Goyal's 0.9 (sec. 5.1)."""


class GroupedNorm(nn.BatchNorm2d):
    """BN whose statistics are of `group` consecutive examples, whatever the batch: one group is one worker's share.

    Running statistics move once a forward, towards the mean over the groups.
    """

    def __init__(self, channels: int, group: int) -> None:
        super().__init__(channels, momentum=MOMENTUM)
        self.group = group

    def forward(self, given: Tensor) -> Tensor:
        if not self.training or len(given) == self.group:
            return super().forward(given)
        num_groups, rest = divmod(len(given), self.group)
        if rest:
            raise ValueError(f"a forward of {len(given)} examples is no multiple of BN's n = {self.group}")
        channels, (height, width) = self.num_features, given.shape[2:]
        assert self.running_mean is not None and self.running_var is not None
        means, variances = self.running_mean.repeat(num_groups), self.running_var.repeat(num_groups)
        grouped = given.view(num_groups, self.group, channels, height, width).transpose(0, 1)
        normed = functional.batch_norm(
            grouped.reshape(self.group, num_groups * channels, height, width), means, variances,
            self.weight.repeat(num_groups), self.bias.repeat(num_groups), True, self.momentum or 0.0, self.eps,
        )  # fmt: skip
        self.running_mean.copy_(means.view(num_groups, channels).mean(0))
        self.running_var.copy_(variances.view(num_groups, channels).mean(0))
        normed = normed.view(self.group, num_groups, channels, height, width).transpose(0, 1)
        return normed.reshape(len(given), channels, height, width)


class Block(nn.Module):
    """A basic residual block: two 3x3 convolutions, and 1x1 beside them where the shape changes."""

    def __init__(self, before: int, after: int, *, stride: int, seeds: int, group: int) -> None:
        super().__init__()
        self.conv1 = _conv(before, after, 3, stride=stride, seeds=seeds)
        self.norm1 = GroupedNorm(seeds * after, group)
        self.conv2 = _conv(after, after, 3, stride=1, seeds=seeds)
        self.norm2 = GroupedNorm(seeds * after, group)
        self.shortcut = nn.Identity()
        if stride > 1 or before != after:
            narrow = _conv(before, after, 1, stride=stride, seeds=seeds)
            self.shortcut = nn.Sequential(narrow, GroupedNorm(seeds * after, group))

    def forward(self, given: Tensor) -> Tensor:
        hidden = functional.relu(self.norm1(self.conv1(given)), inplace=True)
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(given), inplace=True)


class Head(nn.Module):
    """One linear layer a seed."""

    def __init__(self, channels: int, classes: int, seeds: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(seeds, channels, classes))
        self.bias = nn.Parameter(torch.zeros(seeds, classes))

    def forward(self, given: Tensor) -> Tensor:
        per_seed = given.view(len(given), len(self.weight), -1).transpose(0, 1)
        return torch.baddbmm(self.bias.unsqueeze(1), per_seed, self.weight).transpose(0, 1)


class ResidualNet(nn.Module):
    """4 channels at 14x14 -> a stem at stride 2 -> blocks of 8 at 7x7 and 32 at 4x4 -> mean -> 10 logits, per seed.

    There are `depth` blocks of either width.

    Convolutions by He et al., the last layer N(0, 0.01^2), and `gamma` in the last norm of every block, 0 in the
    recipe (Goyal 2017, sec. 5.1).
    """

    def __init__(
        self, seeds: Sequence[int], *, group: int, gamma: float = 0.0, in_channels: int = 4, depth: int = 1
    ) -> None:
        super().__init__()
        shared = {"seeds": len(seeds), "group": group}
        self.stem = _conv(in_channels, 8, 3, stride=2, seeds=len(seeds))
        self.norm = GroupedNorm(8 * len(seeds), group)
        narrow = [Block(8, 8, stride=1, **shared) for _ in range(depth)]
        wide = [Block(32, 32, stride=1, **shared) for _ in range(depth - 1)]
        self.blocks = nn.Sequential(*narrow, Block(8, 32, stride=2, **shared), *wide)
        self.head = Head(32, 10, len(seeds))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                for part, generator in zip(module.weight.chunk(len(seeds)), generators, strict=True):
                    nn.init.kaiming_normal_(part, mode="fan_out", nonlinearity="relu", generator=generator)
            if isinstance(module, Block):
                nn.init.constant_(module.norm2.weight, gamma)
        for part, generator in zip(self.head.weight, generators, strict=True):
            nn.init.normal_(part, std=0.01, generator=generator)

    def forward(self, given: Tensor) -> Tensor:
        """Logits, shape (batch, seeds, 10), of pictures of shape (batch, seeds * in_channels, 14, 14)."""
        hidden = functional.relu(self.norm(self.stem(given)), inplace=True)
        return self.head(self.blocks(hidden).mean((2, 3)))


def move_statistics_by(net: nn.Module, share: float) -> None:
    """Let the next forward move running statistics by `share` of the way."""
    for module in net.modules():
        if isinstance(module, GroupedNorm):
            module.momentum = share


@torch.no_grad()
def recompute_statistics(net: nn.Module, images: Tensor, *, at_once: int) -> None:
    """Replace every running statistic by the plain average over all groups of `images`, at the weights as they are.

    Args:
        net: in training mode, and left there.
        images: shape (num_examples, seeds * in_channels, height, width).
        at_once: examples in one forward, a multiple of BN's n that divides their number.
    """
    for number, part in enumerate(images.split(at_once), start=1):
        move_statistics_by(net, 1 / number)  # a cumulative average
        net(part)
    move_statistics_by(net, MOMENTUM)


def _conv(before: int, after: int, width: int, *, stride: int, seeds: int) -> nn.Conv2d:
    return nn.Conv2d(
        seeds * before, seeds * after, width, stride=stride, padding=width // 2, bias=False, groups=seeds
    )  # fmt: skip
