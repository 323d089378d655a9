"""Is a velocity with the learning rate inside the same optimizer as one without, whatever the rate does?"""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.errors import ConfigError
from largebatch.recipe.momentum import VelocitySGD
from largebatch.recipe.schedule import WarmupStepDecay, as_torch_scheduler
from oracles.recipe_momentum import velocity_10
from oracles.recipe_sgd import momentum_9

JUMP = [0.1] * 5 + [3.2] * 5 + [0.32] * 5
W = np.linspace(-1, 1, 6).reshape(2, 3)


def gradients(num_steps: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=W.shape) for _ in range(num_steps)]


def path_of(grads: list[np.ndarray], lrs: list[float], **options) -> list[np.ndarray]:
    # Two parameters, a matrix and its first row, so that a step has several tensors to get right.
    params = [nn.Parameter(torch.tensor(W)), nn.Parameter(torch.tensor(W[0]))]
    optimizer = VelocitySGD(params, lr=lrs[0], **options)
    path = []
    for g, lr in zip(grads, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        params[0].grad, params[1].grad = torch.tensor(g), torch.tensor(g[0])
        optimizer.step()
        path.append(params[0].detach().numpy().copy())
        np.testing.assert_allclose(params[1].detach().numpy(), path[-1][0], rtol=1e-14)
    return path


def assert_same(path: list[np.ndarray], expected: list[np.ndarray]) -> None:
    # Float64 on both sides, in another order: rounding of the largest number on the way, a few dozen times.
    np.testing.assert_allclose(path, expected, rtol=0, atol=1e-12 * max(1.0, np.abs(expected).max()))


rates = st.one_of(st.floats(1e-4, 10.0), st.sampled_from([0.1, 3.2]))


@settings(deadline=None, max_examples=150)
@given(
    lrs=st.lists(st.one_of(rates, st.just(0.0)), min_size=1, max_size=12),
    momentum=st.floats(0.01, 0.99),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.05]),
)
def test_with_the_correction_it_is_equation_9_under_any_rates(
    lrs: list[float], momentum: float, nesterov: bool, weight_decay: float
):
    # Goyal 2017, remark 2. Rates of 0 are among them: form (9) goes on taking gradients in, and moves later.
    grads = gradients(len(lrs))
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    assert_same(path_of(grads, lrs, **options), momentum_9(W, grads, lrs, **options))


@settings(deadline=None, max_examples=50)
@given(
    lrs=st.lists(st.one_of(rates, st.just(0.0)), min_size=1, max_size=12),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.05]),
)
def test_without_the_correction_it_is_equation_10_as_printed(lrs: list[float], nesterov: bool, weight_decay: float):
    grads = gradients(len(lrs))
    options = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": weight_decay}
    expected, _ = velocity_10(W, grads, lrs, **options)
    assert_same(path_of(grads, lrs, momentum_correction=False, **options), expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_at_the_first_change_the_two_differ_by_m_times_the_relative_change_times_the_velocity(nesterov: bool):
    # v' = m (lr'/lr) v + lr' g against m v + lr' g: weights m (lr'/lr - 1) v apart, once more times m for Nesterov's.
    momentum, change = 0.9, 5
    grads = gradients(len(JUMP))
    _, velocities = velocity_10(W, grads, JUMP, momentum)
    corrected = path_of(grads, JUMP, momentum=momentum, nesterov=nesterov)
    uncorrected = path_of(grads, JUMP, momentum=momentum, nesterov=nesterov, momentum_correction=False)
    assert_same(uncorrected[:change], corrected[:change])
    gap = momentum * (3.2 / 0.1 - 1) * velocities[change - 1] * (momentum if nesterov else 1.0)
    np.testing.assert_allclose(uncorrected[change] - corrected[change], gap, rtol=1e-11)
    assert np.abs(gap).max() > 1.0


def test_the_printed_factor_is_the_one_that_is_used():
    # Remark 2's own form, ratio by ratio, and not only its consequence.
    grads = gradients(len(JUMP))
    expected, _ = velocity_10(W, grads, JUMP, 0.9, correction=True)
    assert_same(path_of(grads, JUMP, momentum=0.9), expected)


def test_a_rate_of_0_moves_nothing_and_loses_nothing():
    lrs = [0.0, 0.1, 0.0, 0.0, 3.2, 3.2]
    grads = gradients(len(lrs))
    path = path_of(grads, lrs, momentum=0.9, nesterov=True, weight_decay=0.01)
    assert np.array_equal(path[0], W)
    assert np.array_equal(path[2], path[1])
    assert np.array_equal(path[3], path[1])
    assert_same(path, momentum_9(W, grads, lrs, 0.9, 0.01, nesterov=True))


def test_without_the_correction_a_rate_of_0_lets_the_old_velocity_run_on():
    path = path_of(gradients(2), [0.1, 0.0], momentum=0.5, momentum_correction=False)
    np.testing.assert_allclose(path[1] - path[0], 0.5 * (path[0] - W), rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_parameter_that_sat_out_while_the_rate_changed_is_corrected_from_its_own_last_rate(nesterov: bool):
    # torch's SGD, form (9), is the oracle: a gradient of None leaves weights and velocity as they are.
    grads = gradients(len(JUMP))
    weights = [nn.Parameter(torch.tensor(W)) for _ in range(4)]
    ours = VelocitySGD(weights[:2], lr=0.1, momentum=0.9, nesterov=nesterov)
    torchs = torch.optim.SGD(weights[2:], lr=0.1, momentum=0.9, nesterov=nesterov)
    for step, (g, lr) in enumerate(zip(grads, JUMP, strict=True)):
        for optimizer, (always, sometimes) in ((ours, weights[:2]), (torchs, weights[2:])):
            optimizer.param_groups[0]["lr"] = lr
            always.grad = torch.tensor(g)
            sometimes.grad = None if step in (4, 5, 6, 10) else torch.tensor(g)
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights[1], weights[3], rtol=1e-12, atol=1e-12)


def test_each_group_has_its_own_rate_and_a_net_with_a_schedule_goes_torchs_way():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(8, 3, dtype=torch.float64)
    optimizers = [
        make([{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.1}], lr=0.1,
             momentum=0.9, nesterov=True)
        for make, model in zip((VelocitySGD, torch.optim.SGD), models, strict=True)
    ]  # fmt: skip
    schedule = WarmupStepDecay(start_lr=0.01, peak_lr=0.3, warmup_steps=5, decay_steps=(8,))
    schedulers = [as_torch_scheduler(optimizer, schedule) for optimizer in optimizers]
    for step in range(12):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            optimizer.param_groups[1]["lr"] *= 0.5 if step == 3 else 1.0
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            scheduler.step()
    for ours, torchs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cut", [2, 5, 7])
def test_a_checkpoint_across_a_change_of_the_rate_resumes_to_the_bit(cut: int):
    lrs = [0.1] * 5 + [0.0, 0.0] + [3.2] * 5  # cut before, at and after the change, and while the rate is 0
    grads = gradients(len(lrs))

    def run(weight: nn.Parameter, optimizer: VelocitySGD, steps: range) -> None:
        for step in steps:
            optimizer.param_groups[0]["lr"] = lrs[step]
            weight.grad = torch.tensor(grads[step])
            optimizer.step()

    whole = nn.Parameter(torch.tensor(W))
    first = VelocitySGD([whole], lr=0.1)
    run(whole, first, range(cut))
    file = io.BytesIO()
    torch.save(copy.deepcopy(first.state_dict()), file)
    resumed = nn.Parameter(whole.detach().clone())
    run(whole, first, range(cut, len(lrs)))
    second = VelocitySGD([resumed], lr=7.0, momentum=0.5, momentum_correction=False)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    run(resumed, second, range(cut, len(lrs)))
    assert torch.equal(whole, resumed)


def test_gradients_are_left_as_they_are_and_a_closure_gives_its_loss():
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = VelocitySGD([weight], lr=0.1, nesterov=True, weight_decay=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.0
    assert weight.grad == 4.0
    torch.testing.assert_close(weight.detach(), torch.tensor([2.0 - 0.1 * 1.9 * 5.0]))


def test_a_sparse_gradient_is_refused_with_what_to_use():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"dense gradients; got one of layout torch.sparse_coo.*torch.optim.SGD"):
        VelocitySGD(table.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, "lr is a finite number of at least 0, not a tensor; got -0.1"),
        ({"lr": torch.tensor(0.1)}, "got tensor(0.1000)"),
        ({"lr": float("nan")}, "got nan"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum is in [0, 1); got 1.0"),
        ({"lr": 0.1, "momentum": 0.0, "nesterov": True}, "nesterov=True needs a momentum above 0"),
        ({"lr": 0.1, "weight_decay": -1.0}, "weight_decay is a finite number of at least 0; got -1.0"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value(options: dict, words: str):
    with pytest.raises(ConfigError) as error:
        VelocitySGD([nn.Parameter(torch.ones(1))], **options)
    assert words in str(error.value)


def test_a_schedule_that_leaves_the_range_is_refused_when_it_does():
    weight = nn.Parameter(torch.ones(1))
    optimizer = VelocitySGD([weight], lr=0.1)
    weight.grad = torch.ones(1)
    optimizer.param_groups[0]["lr"] = float("inf")
    with pytest.raises(ConfigError, match="got inf"):
        optimizer.step()


@pytest.mark.parametrize("numbers", [{"lr": "1e-3"}, {"lr": None}, {"momentum": "0.9"}, {"weight_decay": "1e-4"}])
def test_a_number_that_came_as_text_is_named(numbers):
    # YAML 1.1 reads 1e-4, which has no point, as text.
    with pytest.raises(ConfigError, match=f"{next(iter(numbers))} is .*got {next(iter(numbers.values()))!r}"):
        VelocitySGD([torch.nn.Parameter(torch.ones(1))], **{"lr": 0.1, **numbers})
