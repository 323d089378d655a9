"""Is an update Goyal's, and does weight decay touch what it should and nothing else?"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from largebatch.errors import ConfigError
from largebatch.recipe.optimizer import build_sgd, decay_groups
from largebatch.recipe.scaling import linear
from largebatch.recipe.schedule import WarmupStepDecay, as_torch_scheduler
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


class Downsample(nn.Module):
    """Every norm layer of torch under names that give nothing away."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        self.b = nn.ModuleList([
            nn.BatchNorm1d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, affine=True),
            nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm3d(4, affine=True), nn.GroupNorm(2, 4), nn.LayerNorm(4),
            nn.RMSNorm(4), type("Mine", (nn.LayerNorm,), {})(4), nn.LazyBatchNorm2d(),
        ])  # fmt: skip
        self.bn_like = nn.Linear(4, 4)  # a name that says norm and a module that is none
        self.rnn = nn.LSTM(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)


def names_of(model: nn.Module, group: list) -> set[str]:
    return {name for name, parameter in model.named_parameters() if any(parameter is member for member in group)}


def test_norm_layers_of_every_type_and_nothing_else_have_no_weight_decay():
    model = Downsample()
    decayed, not_decayed = decay_groups(model)
    assert len(not_decayed) == 2 * 12 - 1  # RMSNorm has no bias
    assert all(name.startswith(("a.1.", "b.")) for name in names_of(model, not_decayed))
    assert {"a.0.bias", "bn_like.weight", "bn_like.bias", "rnn.bias_ih_l0"} <= names_of(model, decayed)
    assert len(decayed) + len(not_decayed) == len(list(model.parameters()))


def test_biases_are_left_out_on_request():
    model = Downsample()
    decayed, not_decayed = decay_groups(model, exclude_biases=True)
    moved = names_of(model, decay_groups(model)[0]) - names_of(model, decayed)
    assert moved == {
        "a.0.bias", "bn_like.bias", "rnn.bias_ih_l0", "rnn.bias_hh_l0", "attention.in_proj_bias",
        "attention.out_proj.bias",
    } | {"attention.bias_k", "attention.bias_v"}  # fmt: skip
    assert {"a.0.weight", "rnn.weight_ih_l0", "attention.in_proj_weight"} <= names_of(model, decayed)
    assert moved <= names_of(model, not_decayed)


def test_frozen_parameters_are_skipped_and_shared_ones_come_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    model[1].weight = model[0].weight
    model[3].weight = model[2].weight
    model[0].bias.requires_grad_(False)
    decayed, not_decayed = decay_groups(model)
    assert [id(p) for p in decayed] == [id(model[0].weight), id(model[1].bias)]
    assert [id(p) for p in not_decayed] == [id(model[2].weight), id(model[2].bias), id(model[3].bias)]


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
