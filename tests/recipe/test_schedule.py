"""Is the learning rate of every step Goyal's, and does it survive a checkpoint?"""

import io
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from largebatch.errors import ConfigError
from largebatch.recipe.optimizer import build_sgd
from largebatch.recipe.schedule import Constant, WarmupStepDecay, as_torch_scheduler, epochs_to_steps
from oracles.recipe_schedule import lr_by_counting, nearest_step

IMAGENET = 1_281_167
GOYAL = WarmupStepDecay(start_lr=0.1, peak_lr=3.2, warmup_steps=782, decay_steps=(4692, 9384, 12511))


def test_warmup_from_01_to_32_over_782_steps_adds_exactly_31_over_782_a_step():
    # Goyal 2017, sec. 2.2. A difference of two floats near 3.2 is exact to 2 ulp(3.2) = 9e-16.
    assert GOYAL.lr_at(0) == 0.1
    assert GOYAL.lr_at(782) == 3.2
    increments = [GOYAL.lr_at(step + 1) - GOYAL.lr_at(step) for step in range(782)]
    assert max(abs(Fraction(increment) - Fraction("3.1") / 782) for increment in increments) < Fraction("9e-16")


def test_the_rate_is_032_0032_00032_after_epochs_30_60_80():
    # Goyal 2017, sec. 5.1 with the reference of 0.1; epochs count from 0, so the warmup does not move the drops.
    after = {epoch: epochs_to_steps(epoch, batch=8192, units_per_epoch=IMAGENET) for epoch in (30, 60, 80)}
    for epoch, before, lr in ((30, 3.2, 0.32), (60, 0.32, 0.032), (80, 0.032, 0.0032)):
        assert GOYAL.lr_at(after[epoch] - 1) == pytest.approx(before, rel=1e-15)
        assert GOYAL.lr_at(after[epoch]) == pytest.approx(lr, rel=1e-15)
    assert GOYAL.lr_at(14075) == pytest.approx(0.0032, rel=1e-15)


def test_the_closed_form_equals_the_running_sum_at_every_step():
    exact = lr_by_counting(14075, Fraction("0.1"), Fraction("3.2"), 782, (4692, 9384, 12511), Fraction("0.1"))
    assert [GOYAL.lr_at(step) for step in range(14075)] == pytest.approx([float(lr) for lr in exact], rel=1e-14)


def test_no_warmup_starts_at_the_peak():
    schedule = WarmupStepDecay(start_lr=0.1, peak_lr=3.2)
    assert [schedule.lr_at(step) for step in (0, 1, 10**6)] == [3.2] * 3


def test_constant_is_the_same_at_every_step():
    assert {Constant(lr=0.3).lr_at(step) for step in (0, 1, 10**9)} == {0.3}


@given(epochs=st.integers(0, 100), batch=st.integers(1, 10**4), units=st.integers(1, 10**7))
def test_epochs_round_to_the_nearest_step(epochs: int, batch: int, units: int):
    steps = epochs_to_steps(epochs, batch=batch, units_per_epoch=units)
    assert steps == nearest_step(Fraction(epochs), batch, units)
    assert abs(steps * batch - epochs * units) * 2 <= batch


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_checkpoint_resumes_the_rates_exactly_whichever_is_loaded_first(optimizer_first: bool):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        optimizer = build_sgd(model, lr=0.3)
        schedule = WarmupStepDecay(start_lr=0.1, peak_lr=0.7, warmup_steps=6, decay_steps=(9, 12))
        return model, optimizer, as_torch_scheduler(optimizer, schedule), schedule

    def train(model, optimizer, scheduler, steps):
        rates = []
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((2, 3), float(step)) + torch.eye(2, 3)).square().sum().backward()
            optimizer.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
            scheduler.step()
        return rates

    model, optimizer, scheduler, schedule = make()
    whole = train(model, optimizer, scheduler, range(15))
    assert whole == [[schedule.lr_at(step)] * 2 for step in range(15)]  # bit for bit

    for stop in (0, 4, 6, 10):
        resumed_model, resumed_optimizer, resumed_scheduler, _ = make()
        train(resumed_model, resumed_optimizer, resumed_scheduler, range(stop))
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (resumed_model, resumed_optimizer, resumed_scheduler)], file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        resumed_model, resumed_optimizer, resumed_scheduler, _ = make()
        resumed_model.load_state_dict(states[0])
        loads = [(resumed_optimizer, states[1]), (resumed_scheduler, states[2])]
        for part, state in loads if optimizer_first else reversed(loads):
            part.load_state_dict(state)
        assert train(resumed_model, resumed_optimizer, resumed_scheduler, range(stop, 15)) == whole[stop:]
        for resumed, straight in zip(resumed_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(resumed, straight)


def test_a_scheduler_made_after_the_optimizer_was_loaded_resumes_too():
    optimizer = build_sgd(nn.Linear(2, 2), lr=0.3)
    scheduler = as_torch_scheduler(optimizer, GOYAL)
    for _ in range(100):
        optimizer.step()
        scheduler.step()
    states = optimizer.state_dict(), scheduler.state_dict()
    optimizer = build_sgd(nn.Linear(2, 2), lr=0.3)
    optimizer.load_state_dict(states[0])
    scheduler = as_torch_scheduler(optimizer, GOYAL)
    scheduler.load_state_dict(states[1])
    assert optimizer.param_groups[0]["lr"] == GOYAL.lr_at(100)
    assert scheduler.get_last_lr() == [GOYAL.lr_at(100)]


def test_a_schedule_can_be_sent_to_another_process():
    assert pickle.loads(pickle.dumps(GOYAL)) == GOYAL


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Constant(lr=0.0), "lr is a finite learning rate above 0; got 0.0"),
        (lambda: Constant(lr=0.1).lr_at(-1), "a schedule starts at step 0; got step -1"),
        (lambda: GOYAL.lr_at(-1), "a schedule starts at step 0; got step -1"),
        (lambda: WarmupStepDecay(start_lr=-1.0, peak_lr=1.0), "start_lr is a finite learning rate above 0; got -1.0"),
        (
            lambda: WarmupStepDecay(start_lr=1.0, peak_lr=float("inf")),
            "peak_lr is a finite learning rate above 0; got inf",
        ),
        (lambda: WarmupStepDecay(start_lr=1.0, peak_lr=1.0, warmup_steps=-1), "warmup_steps is at least 0; got -1"),
        (
            lambda: WarmupStepDecay(start_lr=1.0, peak_lr=1.0, decay_steps=(5, 3)),
            "decay_steps must increase; got (5, 3)",
        ),
        (
            lambda: WarmupStepDecay(start_lr=1.0, peak_lr=1.0, warmup_steps=9, decay_steps=(5,)),
            "the first decay, at step 5, lies inside the warmup of 9 steps",
        ),
        (lambda: WarmupStepDecay(start_lr=1.0, peak_lr=1.0, decay_factor=0.0), "decay_factor is in (0, 1]; got 0.0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_its_values(call, words: str):
    with pytest.raises(ConfigError) as error:
        call()
    assert words in str(error.value)


@pytest.mark.parametrize(
    "numbers",
    [{"peak_lr": "0.1"}, {"start_lr": None}, {"warmup_steps": "3"}, {"warmup_steps": float("nan")},
     {"decay_steps": ("3",)}, {"decay_steps": (float("nan"),)}, {"decay_steps": (-3,)}, {"decay_factor": "0.1"}],
)  # fmt: skip
def test_what_is_no_number_is_refused_by_name(numbers):
    with pytest.raises(ConfigError, match=next(iter(numbers))):
        WarmupStepDecay(**{"start_lr": 0.1, "peak_lr": 0.2, **numbers})
