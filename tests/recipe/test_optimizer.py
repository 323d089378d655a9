"""Is an update Goyal's, and does a recipe get the optimizer that it names?"""

import copy
import math
import pickle
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.errors import ConfigError
from largebatch.recipe.baseline import OptimizerName
from largebatch.recipe.optimizer import OPTIMIZERS, build_optimizer, build_sgd
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import linear, sqrt
from largebatch.recipe.schedule import WarmupStepDecay, as_torch_scheduler
from oracles.recipe_layerwise import adam, lamb, lars
from oracles.recipe_sgd import momentum_9, momentum_10

JUMP = [0.1] * 5 + [3.2] * 5 + [0.32] * 5
WARMUP = [
    WarmupStepDecay(start_lr=0.1, peak_lr=3.2, warmup_steps=9, decay_steps=(12,)).lr_at(step) for step in range(15)
]


def gradients(num_steps: int = 15) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=5) for _ in range(num_steps)]


class Weights(nn.Module):
    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))


def path_of_sgd(w: np.ndarray, grads: list[np.ndarray], lrs: list[float], **options) -> list[np.ndarray]:
    model = Weights(w)
    optimizer = build_sgd(model, lr=lrs[0], **options)
    path = []
    for g, lr in zip(grads, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        model.weight.grad = torch.tensor(g)
        optimizer.step()
        path.append(model.weight.detach().numpy().copy())
    return path


@pytest.mark.parametrize("lrs", [JUMP, WARMUP], ids=["jump", "warmup"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_an_update_is_equation_9_under_any_learning_rates(lrs: list[float], nesterov: bool):
    # Goyal 2017, eq. (8), (9). Float64 on both sides: only the order of operations differs.
    w, grads = np.linspace(-1, 1, 5), gradients()
    path = path_of_sgd(w, grads, lrs, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    np.testing.assert_allclose(path, momentum_9(w, grads, lrs, 0.9, 0.01, nesterov), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lrs", [JUMP, WARMUP], ids=["jump", "warmup"])
def test_equation_10_needs_the_momentum_correction_that_this_form_must_not_have(lrs: list[float]):
    # Goyal 2017, remark 2: (10) with correction is (9); without it the two part as soon as the rate changes.
    w, grads = np.linspace(-1, 1, 5), gradients()
    path = path_of_sgd(w, grads, lrs, momentum=0.9, nesterov=False, weight_decay=0.0)
    np.testing.assert_allclose(path, momentum_10(w, grads, lrs, 0.9, correction=True), rtol=1e-12, atol=1e-12)
    changed = 5 if lrs is JUMP else 1
    uncorrected = momentum_10(w, grads, lrs, 0.9, correction=False)
    np.testing.assert_allclose(path[:changed], uncorrected[:changed], rtol=1e-12, atol=1e-12)
    assert np.abs(path[changed] - uncorrected[changed]).max() > 1e-2


def after_steps(w: np.ndarray, batches: list[torch.Tensor], loss, lr: float, **options) -> np.ndarray:
    """The weights after one step of the library's SGD on each batch; `loss` is a sum over units."""
    model = Weights(w)
    optimizer = build_sgd(model, lr=lr, **({"momentum": 0.0, "nesterov": False, "weight_decay": 0.0} | options))
    for batch in batches:
        optimizer.zero_grad()
        (loss(model.weight, batch) / len(batch)).backward()
        optimizer.step()
    return model.weight.detach().numpy()


@settings(deadline=None, max_examples=50)
@given(k=st.integers(1, 32), n=st.integers(1, 5), lr=st.floats(1e-3, 3.0), seed=st.integers(0, 2**16))
def test_for_a_loss_linear_in_the_weights_one_step_at_k_lr_is_k_steps(k: int, n: int, lr: float, seed: int):
    # Goyal 2017, eq. (3) and (4): the gradients do not move with w, so that the rule is exact, and no other rate is.
    slopes = torch.tensor(np.random.default_rng(seed).normal(size=(k * n, 5)))
    w = np.linspace(-1, 1, 5)

    def loss(weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (batch @ weight).sum()

    small = after_steps(w, list(slopes.split(n)), loss, lr)
    np.testing.assert_allclose(after_steps(w, [slopes], loss, linear(lr, n, k * n)), small, rtol=0, atol=1e-12 * k * lr)
    if k > 1:
        other = after_steps(w, [slopes], loss, sqrt(lr, n, k * n))
        expected = (k - math.sqrt(k)) * lr * slopes.mean(0).numpy()
        np.testing.assert_allclose(other - small, expected, rtol=0, atol=1e-12 * k * lr)


def test_for_a_quadratic_the_gap_is_k_choose_2_lr_squared_to_leading_order():
    # (I - lr H)^k w against (I - k lr H) w: the gap is k(k-1)/2 lr^2 H^2 w + O(k^3 lr^3). Its slopes are measured.
    hessian = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    w = np.array([1.0, -2.0, 0.5])

    def loss(weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return 0.5 * len(batch) * (hessian * weight.square()).sum()

    def gap(k: int, lr: float) -> np.ndarray:
        units = torch.zeros(k)
        return after_steps(w, list(units.split(1)), loss, lr) - after_steps(w, [units], loss, linear(lr, 1, k))

    for k, lr in ((2, 1e-4), (8, 1e-5), (32, 1e-6)):
        leading = k * (k - 1) / 2 * lr**2 * hessian.numpy() ** 2 * w
        np.testing.assert_allclose(gap(k, lr), leading, rtol=k * lr * 2)  # what is left is of relative size k lr H
    lrs, ks = np.array([1e-5, 1e-4, 1e-3]), np.array([64, 128, 256])
    in_lr = np.polyfit(np.log(lrs), np.log([np.linalg.norm(gap(8, lr)) for lr in lrs]), 1)[0]
    in_k = np.polyfit(np.log(ks), np.log([np.linalg.norm(gap(int(k), 1e-6)) for k in ks]), 1)[0]
    assert in_lr == pytest.approx(2.0, abs=0.01)
    assert in_k == pytest.approx(2.0, abs=0.02)  # k(k-1) is steeper than k^2 by 1/k


@settings(deadline=None, max_examples=50)
@given(k=st.integers(2, 256), lr=st.floats(1e-3, 1.0), decay=st.floats(1e-5, 0.5), seed=st.integers(0, 2**16))
def test_on_a_net_loss_times_k_and_lr_times_k_differ_by_k_minus_1_lr_lambda_w(
    k: int, lr: float, decay: float, seed: int
):
    # Goyal 2017, eq. (8), remark 1; and none of it on the norm layer, which has no decay.
    torch.manual_seed(seed)
    start = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()
    x = torch.randn(6, 3, dtype=torch.float64)

    def stepped(rate: float, factor: float) -> list[torch.Tensor]:
        model = copy.deepcopy(start)
        optimizer = build_sgd(model, lr=rate, momentum=0.0, nesterov=False, weight_decay=decay)
        (factor * (model(x) - 1).square().mean()).backward()
        optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    gaps = [a - b for a, b in zip(stepped(lr, k), stepped(linear(lr, 1, k), 1.0), strict=True)]
    for number, (gap, w) in enumerate(zip(gaps, start.parameters(), strict=True)):
        expected = torch.zeros_like(w) if number in (2, 3) else (k - 1) * lr * decay * w.detach()
        torch.testing.assert_close(gap, expected, rtol=1e-9, atol=1e-11 * k)


@pytest.mark.parametrize("k", [2, 32])
def test_loss_times_k_and_lr_times_k_differ_by_k_minus_1_lr_lambda_w(k: int):
    # Goyal 2017, eq. (8), remark 1. Loss x k leaves lr lambda w as it is; lr x k makes it k times as large.
    lr, decay, w, g = 0.1, 0.01, np.linspace(-1, 1, 5), gradients(1)[0]
    plain = {"momentum": 0.0, "nesterov": False, "weight_decay": decay}
    (loss_times_k,) = path_of_sgd(w, [k * g], [lr], **plain)
    (lr_times_k,) = path_of_sgd(w, [g], [linear(lr, 1, k)], **plain)
    np.testing.assert_allclose(loss_times_k - lr_times_k, (k - 1) * lr * decay * w, rtol=1e-9, atol=1e-15)


def test_cancelling_k_decays_the_weights_k_times_too_weakly():
    # Goyal 2017, sec. 3: lr kept and the loss over n instead of kn, that is k times the gradient.
    k, lr, decay, w = 8, 0.1, 0.01, np.linspace(-1, 1, 5)
    plain = {"momentum": 0.0, "nesterov": False, "weight_decay": decay}
    (right,) = path_of_sgd(w, [0 * w], [linear(lr, 1, k)], **plain)
    (cancelled,) = path_of_sgd(w, [0 * w], [lr], **plain)
    np.testing.assert_allclose(right - w, k * (cancelled - w), rtol=1e-9, atol=1e-15)


def test_a_norm_layers_weights_do_not_shrink_without_a_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build_sgd(model, lr=0.5, weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = list(model.parameters())
    torch.testing.assert_close(after[0], before[0] * (1 - 0.5 * 0.1 * 1.9))  # first Nesterov step: (1 + m) lr lambda
    assert torch.equal(after[2], before[2])
    assert torch.equal(after[3], before[3])


@pytest.mark.parametrize("trouble", ["strides", "late", "sparse"])
def test_where_the_fused_kernel_is_wrong_the_plain_loop_goes_on(trouble: str):
    rng = np.random.default_rng(1)
    w, grads, lrs = rng.normal(size=(4, 3)), [rng.normal(size=(4, 3)) for _ in range(6)], [0.1] * 6
    model = Weights(w)
    model.late = nn.Parameter(torch.zeros(2))
    optimizer = build_sgd(model, lr=0.1, momentum=0.9, nesterov=trouble != "sparse", weight_decay=0.0)
    for step, g in enumerate(grads):
        model.weight.grad = torch.tensor(g)
        if trouble != "late" or step >= 3:
            model.late.grad = torch.ones(2)
        if trouble == "strides" and step >= 3:
            model.weight.grad = torch.tensor(g.T.copy()).T
        if trouble == "sparse" and step >= 3:
            model.weight.grad = model.weight.grad.to_sparse()
        optimizer.step()
    path = momentum_9(w, grads, lrs, 0.9, nesterov=trouble != "sparse")
    np.testing.assert_allclose(model.weight.detach().numpy(), path[-1], rtol=1e-12)


def test_the_optimizer_is_fused_where_it_is_right_and_resumes_exactly():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [build_sgd(model, lr=0.1) for model in models]
    assert all(group["fused"] for group in optimizers[0].param_groups)

    def step(which: int) -> None:
        optimizers[which].zero_grad()
        models[which](torch.eye(3)).square().sum().backward()
        optimizers[which].step()

    for _ in range(3):
        step(0)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for which in (0, 0, 1, 1):
        step(which)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_a_whole_warmup_of_torch_steps_equals_equation_9():
    w, grads = np.linspace(-1, 1, 5), gradients()
    model = Weights(w)
    optimizer = build_sgd(model, lr=0.3, weight_decay=1e-4)
    schedule = WarmupStepDecay(start_lr=0.1, peak_lr=3.2, warmup_steps=9, decay_steps=(12,))
    scheduler = as_torch_scheduler(optimizer, schedule)
    for g in grads:
        model.weight.grad = torch.tensor(g)
        optimizer.step()
        scheduler.step()
    expected = momentum_9(w, grads, WARMUP, 0.9, 1e-4, nesterov=True)[-1]
    np.testing.assert_allclose(model.weight.detach().numpy(), expected, rtol=1e-12)


def test_momentum_correction_of_the_form_that_needs_none_is_refused_with_the_reason():
    with pytest.raises(ConfigError) as error:
        build_sgd(nn.Linear(2, 2), lr=0.1, momentum_correction=True)
    assert "would be wrong here: torch's SGD keeps the learning rate outside the velocity" in str(error.value)
    assert "use VelocitySGD" in str(error.value)


def test_why_it_is_refused_a_factor_on_top_parts_form_9_from_itself():
    # What torch's SGD would come to with the factor put on its velocity: not eq. (9) any more, after the first change.
    w, grads = np.linspace(-1, 1, 5), gradients()
    model = Weights(w)
    optimizer = build_sgd(model, lr=0.1, nesterov=False, weight_decay=0.0)
    for step, (g, lr) in enumerate(zip(grads, JUMP, strict=True)):
        if step and lr != JUMP[step - 1]:
            optimizer.state[model.weight]["momentum_buffer"] *= lr / JUMP[step - 1]
        optimizer.param_groups[0]["lr"] = lr
        model.weight.grad = torch.tensor(g)
        optimizer.step()
    assert np.abs(model.weight.detach().numpy() - momentum_9(w, grads, JUMP, 0.9)[-1]).max() > 10


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a resolved recipe says of its optimizer."""

    optimizer: str
    lr: float = 0.1
    momentum: float = 0.8
    nesterov: bool = True
    weight_decay: float = 0.01
    exclude_biases: bool = False
    betas: tuple[float, float] = (0.7, 0.95)
    eps: float = 1e-3


OURS = {
    "sgd": lambda w, g, lrs, decay, _: momentum_9(w, g, lrs, 0.8, decay, True),
    "velocity_sgd": lambda w, g, lrs, decay, _: momentum_9(w, g, lrs, 0.8, decay, True),
    "lars": lambda w, g, lrs, decay, layerwise: lars(w, g, lrs, 0.8, decay, 0.001, True, layerwise),
    "lamb": lambda w, g, lrs, decay, layerwise: lamb(w, g, lrs, (0.7, 0.95), 1e-3, decay, layerwise),
    "adam": lambda w, g, lrs, decay, _: adam(w, g, lrs, (0.7, 0.95), 1e-3, coupled=decay),
    "adamw": lambda w, g, lrs, decay, _: adam(w, g, lrs, (0.7, 0.95), 1e-3, decoupled=decay),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("exclude_biases", [False, True])
def test_the_optimizer_that_a_recipe_names_takes_its_numbers_and_no_others(name: str, exclude_biases: bool):
    # Each parameter against the float64 oracle of its optimizer: weight, bias, gamma, beta, and one named in no_decay.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)).double()
    starts = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    optimizer = build_optimizer(model, Numbers(optimizer=name, exclude_biases=exclude_biases), no_decay=["2.weight"])
    lrs = [0.1, 0.1, 0.4, 0.02]
    rng = np.random.default_rng(1)
    grads = [[rng.normal(size=w.shape) for w in starts] for _ in lrs]
    for step, lr in enumerate(lrs):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter, g in zip(model.parameters(), grads[step], strict=True):
            parameter.grad = torch.tensor(g)
        optimizer.step()
    layerwise = name in ("lars", "lamb")
    decayed = [True, not exclude_biases and not layerwise, False, False, False]
    for number, (w, parameter) in enumerate(zip(starts, model.parameters(), strict=True)):
        decay = 0.01 if decayed[number] else 0.0
        expected = OURS[name](w, [step[number] for step in grads], lrs, decay, decayed[number])[-1]
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-9, atol=1e-12, err_msg=str(number))


def test_a_resolved_recipe_is_taken_as_it_is():
    resolved = Recipe(reference_batch=8, reference_lr=0.1, warmup_epochs=1.0).resolve(32, 1000)
    optimizer = build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), resolved)
    assert isinstance(optimizer, torch.optim.SGD)
    (first, second) = optimizer.param_groups
    assert (first["lr"], first["momentum"], first["nesterov"]) == (resolved.lr, 0.9, True)
    assert (first["weight_decay"], second["weight_decay"]) == (1e-4, 0.0)
    assert get_args(OptimizerName) == tuple(OPTIMIZERS)  # every optimizer that a recipe can name can be built


def test_an_unknown_optimizer_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"'sdg' is not known. Use one of: sgd, velocity_sgd, lars, lamb, adam"):
        build_optimizer(nn.Linear(2, 2), Numbers(optimizer="sdg"))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.0}, "lr is a finite learning rate above 0; got 0.0"),
        ({"weight_decay": -1.0}, "weight_decay is a finite number of at least 0; got -1.0"),
        ({"momentum": 1.0}, "momentum is in [0, 1); got 1.0"),
        ({"betas": (1.0, 0.9)}, "betas are two numbers, each in [0, 1); got (1.0, 0.9)"),
        ({"eps": 0.0}, "eps is a finite number above 0; got 0.0"),
    ],
)
def test_every_optimizer_refuses_a_number_out_of_its_range(name: str, options: dict, words: str):
    (field,) = options
    unread = {"momentum": ("lamb", "adam", "adamw"), "betas": ("sgd", "velocity_sgd", "lars")}
    unread["eps"] = unread["betas"]
    numbers = Numbers(optimizer=name, **options)
    if name in unread.get(field, ()):
        build_optimizer(nn.Linear(2, 2), numbers)  # a number that the optimizer does not have is not looked at
        return
    with pytest.raises(ConfigError) as error:
        build_optimizer(nn.Linear(2, 2), numbers)
    assert words in str(error.value)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_no_optimizer_is_made_for_a_frozen_model_or_a_pattern_that_matches_nothing(name: str):
    with pytest.raises(ConfigError, match="nothing to train: all 2 parameters"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), Numbers(optimizer=name))
    with pytest.raises(ConfigError, match=r"'wieght' of no_decay matches none of the 2 parameters. The nearest"):
        build_optimizer(nn.Linear(2, 2), Numbers(optimizer=name), no_decay=["wieght"])


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(ConfigError, match=r"nothing to train: all 2 parameters of the model are frozen"):
        build_sgd(nn.Linear(2, 2).requires_grad_(False), lr=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.0}, "lr is a finite learning rate above 0; got 0.0"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum is in [0, 1); got 1.0"),
        ({"lr": 0.1, "momentum": 0.0}, "nesterov=True needs a momentum above 0; got momentum=0. Set nesterov=False."),
        ({"lr": 0.1, "weight_decay": -1.0}, "weight_decay is a finite number of at least 0; got -1.0"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value(options: dict, words: str):
    with pytest.raises(ConfigError) as error:
        build_sgd(nn.Linear(2, 2), **options)
    assert words in str(error.value)


def channels_last_step(optimizer, weight, seed):
    torch.manual_seed(seed)
    weight.grad = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    optimizer.step()


def test_a_copy_and_an_unpickled_one_step_as_the_original():
    """torch's fused kernel reads a channels-last gradient as if it were contiguous; hooks do not survive a copy."""
    steps = []
    for make in (lambda pair: pair, copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        weight = nn.Parameter(torch.ones(4, 3, 2, 2))
        module = nn.Module()
        module.weight = weight
        weight, optimizer = make((weight, build_sgd(module, lr=0.1)))
        channels_last_step(optimizer, weight, 0)
        channels_last_step(optimizer, weight, 1)
        steps.append(weight.detach())
    torch.testing.assert_close(steps[1], steps[0])
    torch.testing.assert_close(steps[2], steps[0])


def test_a_gradient_scaler_on_a_cpu_steps_it_even_where_a_gradient_is_missing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = build_sgd(model, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model[1].weight.detach().clone()
    scaler.scale(model[1](torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    expected = before - 0.1 * (1 + 0.9) * (1.0 + 1e-4 * before)  # Nesterov's first step, weight decay in the gradient
    torch.testing.assert_close(model[1].weight.detach(), expected)


@pytest.mark.parametrize("lr", ["1e-1", None])
def test_a_rate_that_is_no_number_is_named(lr):
    with pytest.raises(ConfigError, match="lr is a finite learning rate"):
        build_sgd(nn.Linear(2, 2), lr=lr)
