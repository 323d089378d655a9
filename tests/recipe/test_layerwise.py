"""Does each layer move by the share of its length that LARS and LAMB give it?"""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from largebatch.errors import ConfigError
from largebatch.recipe.layerwise import LAMB, LARS
from largebatch.recipe.momentum import VelocitySGD
from oracles.recipe_layerwise import lamb, lars
from workers import on_workers

SHAPES = [(3, 4), (5,), (2, 3, 1, 1)]
LRS = [0.5, 1.0, 4.0, 4.0, 0.4, 0.0, 2.0]


def layers(seed: int, scale: float) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [scale * rng.normal(size=shape) for shape in SHAPES]


def paths_of(make, weights: list[np.ndarray], grads: list[list[np.ndarray]], lrs: list[float], **options):
    """The last layer is in a group that leaves itself out. Weights by [layer][step]."""
    params = [nn.Parameter(torch.tensor(w)) for w in weights]
    groups = [{"params": params[:-1]}, {"params": params[-1:], "layerwise": False, "weight_decay": 0.0}]
    optimizer = make(groups, lr=lrs[0], **options)
    paths = [[] for _ in params]
    for step, lr in enumerate(lrs):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter, g in zip(params, grads[step], strict=True):
            parameter.grad = torch.tensor(g)
        optimizer.step()
        for path, parameter in zip(paths, params, strict=True):
            path.append(parameter.detach().numpy().copy())
    return paths


@settings(deadline=None, max_examples=40)
@given(
    momentum=st.floats(0.05, 0.99),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 5e-4, 0.1]),
    scale=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_lars_is_algorithm_1(momentum: float, nesterov: bool, weight_decay: float, scale: float):
    # You 2017, Algorithm 1, the layer that is left out with trust = 1 and no decay.
    weights, grads = layers(0, scale), [layers(step + 1, 1.0) for step in range(len(LRS))]
    paths = paths_of(LARS, weights, grads, LRS, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay,
                     trust_coefficient=0.01)  # fmt: skip
    for number, (w, path) in enumerate(zip(weights, paths, strict=True)):
        left_out = number == len(SHAPES) - 1
        decay = 0.0 if left_out else weight_decay
        g = [step[number] for step in grads]
        expected = lars(w, g, LRS, momentum, decay, 0.01, nesterov, layerwise=not left_out)
        np.testing.assert_allclose(path, expected, rtol=1e-11, atol=1e-13 * np.abs(expected).max())


@settings(deadline=None, max_examples=40)
@given(
    betas=st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.9999)),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
    eps=st.sampled_from([1e-8, 1e-6, 0.1]),
    scale=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_lamb_is_algorithm_2(betas: tuple[float, float], weight_decay: float, eps: float, scale: float):
    # You 2019, Algorithm 2, bias correction in it; the layer that is left out takes AdamW's step.
    lrs = [0.01 * lr for lr in LRS]
    weights, grads = layers(0, scale), [layers(step + 1, 1.0) for step in range(len(lrs))]
    paths = paths_of(LAMB, weights, grads, lrs, betas=betas, eps=eps, weight_decay=weight_decay)
    for number, (w, path) in enumerate(zip(weights, paths, strict=True)):
        left_out = number == len(SHAPES) - 1
        decay = 0.0 if left_out else weight_decay
        g = [step[number] for step in grads]
        expected = lamb(w, g, lrs, betas, eps, decay, layerwise=not left_out)
        np.testing.assert_allclose(path, expected, rtol=1e-9, atol=1e-11 * np.abs(expected).max())


def test_a_lamb_group_that_leaves_itself_out_is_torchs_adamw():
    weights = [nn.Parameter(torch.tensor(layers(0, 1.0)[0])) for _ in range(2)]
    ours = LAMB([{"params": weights[:1], "layerwise": False}], lr=0.01, eps=1e-8, weight_decay=0.1)
    torchs = torch.optim.AdamW(weights[1:], lr=0.01, eps=1e-8, weight_decay=0.1)
    for step in range(5):
        for optimizer, weight in zip((ours, torchs), weights, strict=True):
            weight.grad = torch.tensor(layers(step, 1.0)[0])
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [LARS, LAMB])
@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_the_length_of_a_first_step_does_not_depend_on_the_length_of_the_gradient(make, scale: float):
    # The law both are made for: |dw| = lr c |w| without decay, whatever the loss is multiplied by.
    (w, *_), (g, *_) = layers(0, 1.0), layers(1, scale)
    weight = nn.Parameter(torch.tensor(w))
    weight.grad = torch.tensor(g)
    optimizer = make([weight], lr=0.3, **({"trust_coefficient": 1.0} if make is LARS else {"eps": 1e-12}))
    optimizer.step()
    moved = np.linalg.norm(weight.detach().numpy() - w)
    assert moved == pytest.approx(0.3 * np.linalg.norm(w), rel=1e-9)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_where_a_norm_is_0_the_ratio_is_1(decay: float):
    zero, one = np.zeros(3), np.ones(3)
    for w, g in ((zero, one), (one, zero), (zero, zero)):
        weight = nn.Parameter(torch.tensor(w))
        weight.grad = torch.tensor(g)
        LARS([weight], lr=0.5, weight_decay=decay).step()
        np.testing.assert_allclose(weight.detach().numpy(), w - 0.5 * (g + decay * w), rtol=1e-15)
    for w, g in ((zero, one), (zero, zero)):
        weight = nn.Parameter(torch.tensor(w))
        weight.grad = torch.tensor(g)
        LAMB([weight], lr=0.5, weight_decay=decay).step()
        np.testing.assert_allclose(weight.detach().numpy(), w - 0.5 * g, rtol=1e-5)  # eps of 1e-6 beside a root of 1
    still = nn.Parameter(torch.ones(3))
    still.grad = torch.zeros(3)
    LAMB([still], lr=0.5).step()  # no update and no decay: |u| is 0
    assert torch.equal(still.detach(), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lamb_moves_half_precision_weights_as_float32_ones_and_goes_on_from_its_state(dtype):
    """Gradients of 300: their square is beyond float16. You 2019, Algorithm 2, in float32 and once rounded a step."""
    start = torch.tensor([1.0, -2.0, 0.5, 4.0])
    grads = [torch.tensor([300.0, -300.0, 150.0, 75.0]) * scale for scale in (1.0, -0.5, 2.0, 1.0)]
    halves, wide = nn.Parameter(start.to(dtype)), nn.Parameter(start.clone())
    optimizers = [LAMB([weights], lr=0.05, weight_decay=0.01) for weights in (halves, wide)]
    for number, grad in enumerate(grads):
        for weights, optimizer in zip((halves, wide), optimizers, strict=True):
            weights.grad = grad.to(weights.dtype)
            optimizer.step()
        if number == 1:  # goes on from a copy of its state
            saved = copy.deepcopy(optimizers[0].state_dict())
            optimizers[0] = LAMB([halves], lr=0.05, weight_decay=0.01)
            optimizers[0].load_state_dict(saved)
            assert torch.equal(optimizers[0].state[halves]["second_moment"], saved["state"][0]["second_moment"])
    assert optimizers[0].state[halves]["second_moment"].dtype == torch.float32
    rounding = 4 * torch.finfo(dtype).eps  # one a step
    np.testing.assert_allclose(halves.detach().float(), wide.detach(), rtol=2 * rounding, atol=rounding)
    assert not torch.equal(halves.detach().float(), start)


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_norms_of_half_precision_do_not_overflow(make):
    weight = nn.Parameter(torch.full((4096,), 300.0, dtype=torch.float16))  # 300^2 is beyond float16
    weight.grad = torch.full((4096,), 0.01, dtype=torch.float16)
    make([weight], lr=10.0 if make is LARS else 0.1).step()
    assert torch.isfinite(weight).all()
    assert (weight < 300).all()


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_it_resumes_to_the_bit_and_leaves_gradients_alone(make):
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for parameter, g in zip(model.parameters(), layers(step, 1.0), strict=False):
                parameter.grad = torch.tensor(g)
            optimizer.step()
            for parameter, g in zip(model.parameters(), layers(step, 1.0), strict=False):
                assert torch.equal(parameter.grad, torch.tensor(g))

    model = nn.ParameterList(torch.tensor(w) for w in layers(9, 1.0))
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.01)
    run(model, optimizer, range(3))
    other = copy.deepcopy(model)
    resumed = make(other.parameters(), lr=5.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, range(3, 6))
    run(other, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model, other, strict=True))


def trained(make: str, *, shard: bool) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = {
        "lars": lambda: LARS(model.parameters(), lr=1.0, weight_decay=0.01, trust_coefficient=0.1),
        "lamb": lambda: LAMB(model.parameters(), lr=0.1, weight_decay=0.01),
        "velocity_sgd": lambda: VelocitySGD(model.parameters(), lr=0.1, weight_decay=0.01, nesterov=True),
    }[make]()
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
    for lr in (0.1, 0.5, 0.0, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    whole = [p.full_tensor() if shard else p for p in model.parameters()]
    return [p.detach().flatten().tolist() for p in whole]


def all_sharded(_: int) -> dict[str, list[list[float]]]:
    return {make: trained(make, shard=True) for make in ("lars", "lamb", "velocity_sgd")}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_under_fsdp2_a_layer_is_the_whole_layer_and_not_its_shard(world_size: int):
    for results in on_workers(world_size, all_sharded):
        for make, weights in results.items():
            for ours, whole in zip(weights, trained(make, shard=False), strict=True):
                np.testing.assert_allclose(ours, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_a_sparse_gradient_is_refused(make):
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=rf"{make.__name__} takes dense gradients; got one of layout .*coo"):
        make(table.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (LARS, {"lr": -1.0}, "lr is a finite number of at least 0"),
        (LARS, {"lr": 1.0, "momentum": 1.5}, "momentum is in [0, 1); got 1.5"),
        (LARS, {"lr": 1.0, "trust_coefficient": 0.0}, "trust_coefficient is a finite number above 0; got 0.0"),
        (LARS, {"lr": 1.0, "weight_decay": -0.1}, "weight_decay is a finite number of at least 0; got -0.1"),
        (LAMB, {"lr": 1.0, "betas": (0.9, 1.0)}, "betas are two numbers, each in [0, 1); got (0.9, 1.0)"),
        (LAMB, {"lr": 1.0, "eps": 0.0}, "eps is a finite number above 0; got 0.0"),
        (LAMB, {"lr": 1.0, "weight_decay": float("inf")}, "weight_decay is a finite number of at least 0; got inf"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value(make, options: dict, words: str):
    with pytest.raises(ConfigError) as error:
        make([nn.Parameter(torch.ones(1))], **options)
    assert words in str(error.value)


@pytest.mark.parametrize("numbers", [{"betas": 0.9}, {"betas": ("0.9", 0.99)}, {"eps": "1e-6"}])
def test_a_number_that_came_as_text_is_named(numbers):
    with pytest.raises(ConfigError, match=next(iter(numbers))):
        LAMB([nn.Parameter(torch.ones(1))], lr=0.1, **numbers)


def test_lamb_refuses_complex_weights():
    # The second moment of a complex gradient by g * g is no size: at g = 1 + i it is imaginary.
    weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    weight.grad = torch.full((4,), 1 + 1j)
    with pytest.raises(ConfigError, match="complex64"):
        LAMB([weight], lr=0.1).step()
