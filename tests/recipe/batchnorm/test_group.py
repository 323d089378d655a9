"""Do workers that hold n examples together normalise, differentiate and remember as one device that holds all n?

Real gloo workers. The oracle has the whole run in one place, in float64.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from largebatch.errors import ConfigError
from largebatch.recipe.batchnorm import GroupBatchNorm
from oracles import recipe_batchnorm as oracle
from workers import on_workers

EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64: only the order of sums differs
COUNTS = {1: (6,), 2: (2, 5), 4: (3, 1, 0, 4)}  # uneven, and one worker with nothing
PLACES = [(), (3,), (2, 2)]


def drawn(*shape: int, seed: int = 0, offset: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator) * 2 + offset


def layer_of(group, **options) -> GroupBatchNorm:
    layer = GroupBatchNorm(3, group, **options).double()
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(3, seed=seed, offset=1.0))
    return layer


def case(world_size: int, places: tuple[int, ...], momentum: float | None) -> tuple[Tensor, Tensor, dict]:
    num = sum(COUNTS[world_size])
    return drawn(num, 3, *places, seed=4), drawn(num, 3, *places, seed=5, offset=0.3), {"momentum": momentum}


def forward_and_backward(rank: int, world_size: int) -> list:
    found = []
    for places in PLACES:
        for momentum in (0.1, None):
            x, dy, options = case(world_size, places, momentum)
            layer = layer_of(dist.new_group(), **options)
            mine = x.split(COUNTS[world_size])[rank].clone().requires_grad_()
            for _ in range(2):
                y = layer(mine)
            y.backward(dy.split(COUNTS[world_size])[rank])
            state = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
            found.append([t.detach().numpy() for t in (y, mine.grad, layer.weight.grad, layer.bias.grad, *state)])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_uneven_workers_are_one_device_forward_and_backward(world_size):
    # Goyal 2017, eq. (5), with the n examples spread over workers. Gradients of weights add up over the workers.
    per_worker = on_workers(world_size, forward_and_backward, world_size)
    cases = [(places, momentum) for places in PLACES for momentum in (0.1, None)]
    for number, (places, momentum) in enumerate(cases):
        x, dy, _ = case(world_size, places, momentum)
        x, dy, num = x.numpy(), dy.numpy(), len(x)
        gamma, beta = (drawn(3, seed=seed, offset=1.0).numpy() for seed in (0, 1))
        workers = [found[number] for found in per_worker]
        np.testing.assert_allclose(
            np.concatenate([w[0] for w in workers]), oracle.outputs(x, num, gamma, beta), **EXACT
        )
        dx, dgamma, dbeta = oracle.gradients(x, dy, num, gamma)
        np.testing.assert_allclose(np.concatenate([w[1] for w in workers]), dx, **EXACT)
        np.testing.assert_allclose(sum(w[2] for w in workers), dgamma, **EXACT)
        np.testing.assert_allclose(sum(w[3] for w in workers), dbeta, **EXACT)
        state = oracle.running(np.concatenate((x, x)), num, momentum, (np.zeros(3), np.ones(3), 0))
        for worker in workers:
            for ours, theirs, first in zip(worker[4:], state, workers[0][4:], strict=True):
                np.testing.assert_allclose(ours, theirs, **EXACT)
                np.testing.assert_array_equal(ours, first)  # the same bits on every worker


def second_derivative(rank: int, world_size: int) -> list:
    layer = layer_of(dist.new_group())
    x = drawn(sum(COUNTS[world_size]), 3, 2, seed=4).split(COUNTS[world_size])[rank].clone().requires_grad_()
    first = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)[0]
    return [g.numpy() for g in torch.autograd.grad(first.square().sum(), [x, layer.weight])]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_second_derivatives_are_one_devices(world_size):
    # Torch's batch norm over all examples, differentiated twice. The sum over workers of |dx|^2 is the whole |dx|^2.
    whole = nn.BatchNorm1d(3).double()
    whole.load_state_dict(layer_of(None).state_dict())
    x = drawn(sum(COUNTS[world_size]), 3, 2, seed=4).requires_grad_()
    first = torch.autograd.grad(whole(x).pow(3).sum(), x, create_graph=True)[0]
    wanted = torch.autograd.grad(
        first.square().sum(),
        [
            x,
            whole.weight,
        ],
    )
    workers = on_workers(world_size, second_derivative, world_size)
    np.testing.assert_allclose(np.concatenate([dx for dx, _ in workers]), wanted[0], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(sum(dw for _, dw in workers), wanted[1], rtol=1e-8, atol=1e-8)


class Net(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), norm(3), nn.ReLU()) for _ in range(4))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return x


def under_ddp(rank: int, world_size: int, again: bool) -> list:
    group = dist.new_group()
    model = Net(lambda channels: GroupBatchNorm(channels, group)).double()
    # A bucket for every parameter: DDP's all-reduces run between those of the layers.
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        mine = drawn(4 * world_size, 3, 4, 4, seed=step).split(4)[rank]
        ddp(mine, again).square().sum(1).mean().backward()
        optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_under_ddp_training_is_one_devices(world_size, again):
    model = Net(nn.BatchNorm2d).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(drawn(4 * world_size, 3, 4, 4, seed=step)).square().sum(1).mean().backward()
        optimizer.step()
    for found in on_workers(world_size, under_ddp, world_size, again):
        for ours, theirs in zip(found, model.parameters(), strict=True):
            np.testing.assert_allclose(ours, theirs.detach(), **EXACT)


def in_half(rank: int) -> tuple:
    layer = GroupBatchNorm(3, dist.new_group())
    x = drawn(8, 3, 4, 4).split(4)[rank].float().contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.bfloat16().requires_grad_())
    y.float().square().sum().backward()
    compiled = torch.compile(layer, backend="eager")
    exact = [torch.equal(layer(x), compiled(x)) for _ in range(2)]
    return str(y.dtype), y.is_contiguous(memory_format=torch.channels_last), exact, str(layer.weight.grad.dtype)


def test_half_precision_channels_last_and_compiled_models_work():
    assert on_workers(2, in_half) == [("torch.bfloat16", True, [True, True], "torch.float32")] * 2


def copies(rank: int) -> tuple:
    layer = layer_of(dist.new_group())
    x = drawn(4, 3, 2).split(2)[rank]
    copied, back = copy.deepcopy(nn.Sequential(layer))[0], pickle.loads(pickle.dumps(layer))
    same = torch.equal(copied(x), layer(x)), copied.group is layer.group, copied.weight is not layer.weight
    back.load_state_dict(layer.state_dict())
    same += (torch.equal(back.eval()(x), layer.eval()(x)), repr(layer).endswith(f"workers={[0, 1]})"))
    with pytest.raises(ConfigError, match=r"was unpickled and has no process group"):
        back.train()(x)
    with pytest.raises(ConfigError, match=r"shape \(batch, 3, \.\.\.\); got \(2, 4\)"):
        layer(torch.ones(2, 4))
    return same


def test_a_deep_copy_keeps_the_group_and_a_pickled_layer_serves_in_evaluation():
    assert on_workers(2, copies) == [(True,) * 5] * 2


def test_its_state_and_evaluation_are_torchs():
    layer, torchs = layer_of(None), nn.BatchNorm1d(3).double()
    torchs.load_state_dict(layer.state_dict())
    layer.load_state_dict(torchs.state_dict())
    x = drawn(5, 3)
    assert torch.equal(layer.eval()(x), torchs.eval()(x))


def lone_values(rank: int, world_size: int) -> list:
    """Statistics after a batch of one value a channel, one of none, and one of many."""
    found = []
    layer = layer_of(dist.group.WORLD)
    for num in (1, 0, 4):
        mine = drawn(num, layer.num_features) if rank == 0 else drawn(0, layer.num_features)
        layer(mine).sum().backward()
        found.append((layer.running_mean.tolist(), layer.running_var.tolist(), layer.num_batches_tracked.item()))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_fewer_than_two_values_a_channel_leave_the_statistics_as_they_were(world_size):
    for one, none, many in on_workers(world_size, lone_values, world_size):
        assert one == none == ([0.0] * 3, [1.0] * 3, 0)
        assert np.isfinite(many[0]).all() and 0.0 not in many[0] and many[2] == 1
