"""Set-ups for the experiment: one that is right, and parts that make a mistake of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from largebatch.testing import EquivalenceReport, check_parallel_equivalence

N, DIM, CLASSES = 8, 5, 3

# pytest-xdist's own threads would make it spawn, which needs what it sends to be picklable.
check: Callable[..., EquivalenceReport] = partial(check_parallel_equivalence, start_method="fork")


def examples(num: int = N, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, DIM, generator=generator), torch.randint(CLASSES, (num,), generator=generator)


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def dropping_net() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 6), nn.Dropout(0.5), nn.Linear(6, CLASSES))


def normed_net(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 6), norm(6), nn.Tanh(), nn.Linear(6, CLASSES))


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)


def total(count: int) -> int:
    """Goyal's kn: the examples of all workers."""
    value = torch.tensor(count)
    dist.all_reduce(value)
    return int(value)


def by_total(model: nn.Module, share: tuple[Tensor, Tensor]) -> Tensor:
    """The summed loss over kn, times the workers over which gradients are averaged (Goyal 2017, remark 3)."""
    return by_sum(model, share) * dist.get_world_size() / total(len(share[0]))


def by_mean(model: nn.Module, share: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over this worker's own examples."""
    return F.cross_entropy(model(share[0]), share[1])


def by_sum(model: nn.Module, share: tuple[Tensor, Tensor]) -> Tensor:
    """Not divided at all."""
    return F.cross_entropy(model(share[0]), share[1], reduction="sum")


def nothing(*_: Any) -> None:
    pass


def setup(
    net: Callable[[], nn.Module] = plain_net,
    loss: Callable[[Any, Any], Tensor] = by_total,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    schedule: Callable[[torch.optim.Optimizer], Any] = nothing,
    begin: Callable[[int, int], Any] = nothing,
    after_backward: Callable[[nn.Module], Any] = nothing,
    end: Callable[[Any], Any] = nothing,
) -> Callable[[int, int], tuple[nn.Module, torch.optim.Optimizer, Callable[[Any], Tensor]]]:
    """A step over a share: begin(rank, step), loss, backward, after_backward(model), update, end(scheduler)."""

    def make(rank: int, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Any], Tensor]]:
        model = wrap(net())
        stepper = optimizer(model)
        scheduler = schedule(stepper)
        count = 0

        def step(share: Any) -> Tensor:
            nonlocal count
            begin(rank, count)
            count += 1
            stepper.zero_grad()
            value = loss(model, share)
            value.backward()
            after_backward(model)
            stepper.step()
            end(scheduler)
            return value.detach()

        return model, stepper, step

    return make


def unwrapped(model: nn.Module) -> nn.Module:
    return model


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def averaged_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def clip(model: nn.Module, limit: float = 0.05) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def clip_then_average(model: nn.Module) -> None:
    clip(model)
    averaged_by_hand(model)


def clip_own_shards(model: nn.Module, limit: float = 0.05) -> None:
    """By the norm of this worker's shards alone."""
    grads: list[Any] = [parameter.grad for parameter in model.parameters()]
    norm = torch.stack([grad.to_local().norm() for grad in grads]).norm()
    for grad in grads:
        grad.to_local().mul_(min(1.0, limit / float(norm)))


def step_once(scheduler: Any) -> None:
    scheduler.step()


def step_per_process(scheduler: Any) -> None:
    for _ in range(dist.get_world_size()):
        scheduler.step()


def fading(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def accumulating(
    net: Callable[[], nn.Module] = plain_net,
    divide: str = "by total",
    step_each: bool = False,
) -> Callable[[int, int], tuple[nn.Module, torch.optim.Optimizer, Callable[[Any], None]]]:
    """A step over a list of microbatches; gradients are averaged by hand after the last."""

    def make(rank: int, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Any], None]]:
        model = net()
        stepper = sgd(model)

        def step(parts: list[tuple[Tensor, Tensor]]) -> None:
            stepper.zero_grad()
            units = total(sum(len(x) for x, _ in parts))
            for part in parts:
                if divide == "by total":
                    loss = by_sum(model, part) * world_size / units
                elif divide == "by microbatches":
                    loss = by_mean(model, part) / len(parts)
                else:
                    loss = by_mean(model, part)
                loss.backward()
                if step_each:
                    averaged_by_hand(model)
                    stepper.step()
                    stepper.zero_grad()
            if not step_each:
                averaged_by_hand(model)
                stepper.step()

        return model, stepper, step

    return make


class _SumOverWorkers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class NormOverAllWorkers(nn.BatchNorm1d):
    """What SyncBatchNorm does (which refuses the CPU): statistics over the microbatches of all workers."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        count = len(x) * dist.get_world_size()
        mean = _SumOverWorkers.apply(x.sum(0)) / count
        var = _SumOverWorkers.apply((x - mean).square().sum(0)) / count
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias
