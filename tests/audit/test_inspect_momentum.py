"""Is a momentum whose learning rate is inside told from one that is outside, by what it does?"""

import pytest
import timm.optim
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from audit.setups import CorrectedSGD
from largebatch.audit.inspect import inspect
from largebatch.audit.look_momentum import form_of
from largebatch.recipe.momentum import VelocitySGD


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


RIGHT = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "SGD, Nesterov, decay, fused": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "SGD, dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD, tensor rate": lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "RMSprop": lambda p: RMSprop(p, lr=0.1, momentum=0.9),
    "VelocitySGD": lambda p: VelocitySGD(p, lr=0.1, momentum=0.9),
    "VelocitySGD, Nesterov": lambda p: VelocitySGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "timm lars": lambda p: timm.optim.create_optimizer_v2(p, opt="lars", lr=0.1, momentum=0.9),
    "timm sgdw": lambda p: timm.optim.create_optimizer_v2(p, opt="sgdw", lr=0.1, momentum=0.9),
    "timm lookahead": lambda p: timm.optim.create_optimizer_v2(p, opt="lookahead_sgd", lr=0.1, momentum=0.9),
}
WRONG = {
    "VelocitySGD without": ("uncorrected", lambda p: VelocitySGD(p, 0.1, momentum_correction=False)),
    "VelocitySGD without, Nesterov": (
        "uncorrected",
        lambda p: VelocitySGD(p, 0.1, nesterov=True, momentum_correction=False),
    ),
    # TensorFlow's RMSProp keeps the rate inside its momentum, and timm's copy of it does so by default.
    "timm rmsproptf": ("uncorrected", lambda p: timm.optim.create_optimizer_v2(p, opt="rmsproptf", lr=0.1)),
    "SGD with a correction": ("corrected twice", lambda p: CorrectedSGD(p, lr=0.1, momentum=0.9)),
}
NONE = {
    "SGD without momentum": lambda p: SGD(p, lr=0.1),
    "Adam": Adam,
    "AdamW": AdamW,
    "NAdam": NAdam,
    "Adagrad": Adagrad,
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_needs_no_correction_or_has_it(name: str):
    # Goyal 2017, eq. (9), and (10) with correction.
    assert form_of(RIGHT[name](params())) == "as it should be"


@pytest.mark.parametrize("name", WRONG)
def test_what_lacks_it_or_has_it_twice(name: str):
    # Goyal 2017, remark 2.
    form, make = WRONG[name]
    assert form_of(make(params())) == form


@pytest.mark.parametrize("name", NONE)
def test_what_has_no_momentum_of_this_kind_is_not_judged(name: str):
    assert form_of(NONE[name](params())) is None


class RateFree(Optimizer):
    """Ignores its rate, as optimizers that find their own do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                    buffer.mul_(0.9).add_(p.grad)
                    p.sub_(buffer)


class NeedsClosure(RateFree):
    def step(self, closure):
        closure()


def test_what_cannot_be_tried_is_not_judged():
    assert form_of(RateFree(params())) is None
    assert form_of(NeedsClosure(params())) is None


def codes(optimizer: Optimizer, model: nn.Module, scheduler=None) -> set[str]:
    return {f.code for f in inspect(model, optimizer, None, scheduler)}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_a_finding_where_the_rate_changes_only(name: str):
    model = nn.Linear(2, 2, bias=False)
    optimizer = WRONG[name][1](model.parameters())
    assert "LB107" not in codes(optimizer, model)
    assert "LB107" in codes(optimizer, model, StepLR(optimizer, 3))
    optimizer = WRONG[name][1](model.parameters())
    assert "LB107" not in codes(optimizer, model, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))


def test_a_velocity_that_is_there_already_is_neither_used_nor_touched():
    model = nn.Linear(2, 2, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weight, buffer = model.weight.detach().clone(), optimizer.state[model.weight]["momentum_buffer"]
    before, grad = buffer.clone(), model.weight.grad
    assert form_of(optimizer) == "as it should be"
    assert torch.equal(model.weight, weight) and model.weight.grad is grad
    assert optimizer.state[model.weight]["momentum_buffer"] is buffer and torch.equal(buffer, before)


class Heavy:
    """A hook that holds the training."""

    def __call__(self, *_) -> None:
        raise AssertionError("called")

    def __deepcopy__(self, memo):
        raise AssertionError("copied")


def test_hooks_are_neither_called_nor_copied():
    optimizer = SGD(params(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(Heavy())
    assert form_of(optimizer) == "as it should be"


class CorrectingScheduler(LRScheduler):
    """What a callback written for the velocity form does: momentum times new_lr / old_lr while the rate changes."""

    def get_lr(self):
        lrs = [lr * min(1.0, 0.1 + self.last_epoch / 10) for lr in self.base_lrs]
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["momentum"] = 0.9 * (lr / group["lr"] if self.last_epoch > 0 else 1.0)
        return lrs


def test_a_scheduler_that_corrects_the_momentum_of_torchs_sgd():
    model = nn.Linear(2, 2, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    (found,) = inspect(model, optimizer, None, CorrectingScheduler(optimizer))
    assert found.code == "LB107" and found.seen.startswith("the scheduler multiplies the momentum of SGD")
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)  # a momentum that goes against the rate is none
    assert codes(optimizer, model, OneCycleLR(optimizer, 0.1, total_steps=20)) == set()
