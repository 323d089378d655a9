"""Does a recipe resolve to Goyal's numbers, and say why for each?"""

import dataclasses
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.errors import ConfigError
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.recipes import goyal2017_resnet50
from largebatch.recipe.scaling import noise_scale_lr

IMAGENET = 1_281_167
SMALL = Recipe(reference_batch=64, reference_lr=0.02)


def test_goyal2017_resnet50_at_8192():
    # Goyal 2017, sec. 2.2, 5.1.
    resolved = goyal2017_resnet50().resolve(8192, IMAGENET)
    assert resolved.lr == 3.2
    assert resolved.warmup_steps == 782
    assert resolved.num_steps == 14075  # 90 * 156.39
    assert (resolved.momentum, resolved.nesterov, resolved.weight_decay) == (0.9, True, 1e-4)
    lr_at = resolved.schedule.lr_at
    assert (lr_at(0), lr_at(782)) == (0.1, 3.2)
    for epoch, lr in ((29, 3.2), (30, 0.32), (59, 0.32), (60, 0.032), (79, 0.032), (80, 0.0032), (90, 0.0032)):
        assert lr_at(resolved.steps_at(epoch)) == pytest.approx(lr, rel=1e-15)


@pytest.mark.parametrize(
    ("batch", "lr"),
    [(128, 0.05), (256, 0.1), (512, 0.2), (1024, 0.4), (8192, 3.2), (65536, 25.6)],
)
def test_goyal2017_resnet50_trains_90_epochs_at_any_batch_and_warms_up_above_256_only(batch: int, lr: float):
    # Goyal 2017, sec. 5.3, Figure 1: every kn > 256 starts its warmup at 0.1.
    resolved = goyal2017_resnet50().resolve(batch, IMAGENET)
    assert resolved.lr == lr
    assert abs(resolved.num_steps * batch - 90 * IMAGENET) <= batch / 2
    assert (resolved.warmup_steps > 0) == (batch > 256)
    assert resolved.schedule.lr_at(0) == min(lr, 0.1)
    assert resolved.schedule.lr_at(resolved.warmup_steps) == lr


@given(batch=st.integers(1, 60_000), units=st.integers(60_000, 10**7))
def test_lengths_are_the_nearest_whole_steps_whatever_the_batch(batch: int, units: int):
    recipe = Recipe(reference_batch=64, reference_lr=0.02, decay_epochs=(5.0, 7.5))
    resolved = recipe.resolve(batch, units)
    assert abs(resolved.num_steps - 10 * units / batch) <= 0.5
    assert resolved.steps_at(10) == resolved.num_steps
    assert resolved.schedule.decay_steps == (resolved.steps_at(5.0), resolved.steps_at(7.5))
    assert resolved.warmup_steps == (resolved.steps_at(5.0) if batch > 64 else 0)
    assert resolved.lr == pytest.approx(0.02 * batch / 64, rel=1e-15)


def test_what_does_not_change_with_the_batch_does_not():
    # Goyal 2017, sec. 2.1: all other hyper-parameters (weight decay, momentum, epochs) are kept.
    numbers = {(r.momentum, r.nesterov, r.weight_decay) for r in (SMALL.resolve(b, 60_000) for b in (1, 64, 4096))}
    assert numbers == {(0.9, True, 1e-4)}


def test_the_rule_can_be_named_by_the_recipe_or_by_the_call():
    assert Recipe(reference_batch=64, reference_lr=0.02, scaling="sqrt").resolve(1024, 60_000).lr == pytest.approx(0.08)
    assert SMALL.resolve(1024, 60_000, rule="sqrt").lr == pytest.approx(0.08)
    unscaled = SMALL.resolve(1024, 60_000, rule="none")
    assert (unscaled.lr, unscaled.warmup_steps, unscaled.schedule.lr_at(0)) == (0.02, 0, 0.02)


def test_a_learning_rate_chosen_elsewhere_keeps_the_name_of_what_chose_it():
    lr = noise_scale_lr(0.1, 300, 512)
    resolved = SMALL.resolve(512, 60_000, lr=lr, rule="eps_max / (1 + B_simple/B)")
    row = next(number for number in resolved.numbers if number.name == "lr")
    assert (resolved.lr, row.value, row.rule) == (lr, lr, "eps_max / (1 + B_simple/B)")
    assert resolved.schedule.lr_at(0) == 0.02
    assert resolved.warmup_steps > 0


def test_there_is_no_warmup_where_there_is_nothing_to_climb():
    assert SMALL.resolve(512, 60_000, lr=0.01).schedule.lr_at(0) == 0.01
    assert [SMALL.resolve(batch, 60_000, lr=0.5).schedule.lr_at(0) for batch in (32, 64)] == [0.5, 0.5]
    assert dataclasses.replace(SMALL, warmup_epochs=0.0).resolve(512, 60_000).schedule.lr_at(0) == 0.16


def test_every_number_has_a_rule_and_a_source():
    resolved = goyal2017_resnet50().resolve(8192, IMAGENET)
    values = [(number.name, number.value) for number in resolved.numbers]
    assert values == [
        ("batch", 8192), ("lr", 3.2), ("warmup_steps", 782), ("num_steps", 14075), ("decay_step_1", 4692),
        ("decay_step_2", 9384), ("decay_step_3", 12511), ("optimizer", "sgd"), ("momentum", 0.9),
        ("weight_decay", 1e-4), ("batchnorm_n", 32), ("loss_divisor", 8192),
    ]  # fmt: skip
    assert all(number.rule and number.source for number in resolved.numbers)
    rows = {number.name: number for number in resolved.numbers}
    assert rows["lr"].rule == "linear: 0.1 at 256, times 32"
    assert rows["lr"].source == "Goyal 2017, sec. 2.1"
    assert rows["warmup_steps"].rule == "gradual over 5 epochs, from 0.1, adding 0.003964 a step"  # 3.1/782


@pytest.mark.parametrize(
    ("recipe", "batch", "lr", "words"),
    [
        (SMALL, 32, None, "none at a batch up to the reference of 64"),
        (SMALL, 128, 0.01, "none, since the rate does not rise above the reference of 0.02"),
        (dataclasses.replace(SMALL, warmup_epochs=0.0), 128, None, "none asked for"),
    ],
)
def test_a_missing_warmup_says_why(recipe: Recipe, batch: int, lr: float | None, words: str):
    rows = {number.name: number.rule for number in recipe.resolve(batch, 60_000, lr=lr).numbers}
    assert rows["warmup_steps"] == words


def test_a_resolved_recipe_can_be_sent_to_another_process():
    resolved = SMALL.resolve(512, 60_000)
    assert pickle.loads(pickle.dumps(resolved)) == resolved


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reference_batch": 0}, "reference_batch is a whole number of at least 1; got 0"),
        ({"reference_batch": 64.0}, "reference_batch is a whole number of at least 1; got 64.0"),
        ({"reference_lr": 0.0}, "reference_lr is a finite learning rate above 0; got 0.0"),
        ({"reference_lr": math.nan}, "reference_lr is a finite learning rate above 0; got nan"),
        ({"epochs": 0}, "epochs is a whole number of at least 1; got 0"),
        ({"warmup_epochs": -1.0}, "warmup_epochs is at least 0; got -1.0"),
        (
            {"epochs": 4},
            "a warmup of 5 epochs does not end within the run of 4 epochs: the target learning rate would never be "
            "used. Use warmup_epochs below 4, or more epochs.",
        ),
        ({"epochs": 5}, "a warmup of 5 epochs does not end within the run of 5 epochs"),
        ({"decay_epochs": (8.0, 6.0)}, "decay_epochs must increase; got (8.0, 6.0)"),
        ({"decay_epochs": (3.0,)}, "the first decay, after epoch 3, lies inside the warmup of 5 epochs"),
        ({"decay_epochs": (6.0, 30.0)}, "the last decay, after epoch 30, is not within the run of 10 epochs"),
        ({"decay_factor": 0.0}, "decay_factor is in (0, 1]; got 0.0"),
        ({"momentum": 1.0}, "momentum is in [0, 1); got 1.0"),
        ({"momentum": 0.0}, "nesterov=True needs a momentum above 0; got momentum=0. Set nesterov=False."),
        ({"weight_decay": -1e-4}, "weight_decay is a finite number of at least 0; got -0.0001"),
        ({"scaling": "cubic"}, "learning-rate rule 'cubic' is not known. Use one of: linear, sqrt, none"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_with_its_values(changes: dict, words: str):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(SMALL, **changes)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch": 60_001}, "a batch of 60001 is larger than the data, which has 60000. Use a batch of at most 60000."),
        ({"batch": 0}, "batch is a whole number of at least 1; got 0"),
        ({"batch": 128, "rule": "cubic"}, "learning-rate rule 'cubic' is not known. Use one of: linear, sqrt, none"),
        ({"batch": 128, "lr": -0.1}, "lr is a finite learning rate above 0; got -0.1"),
        ({"batch": 128, "lr": math.nan}, "lr is a finite learning rate above 0; got nan"),
    ],
)
def test_a_batch_or_rate_that_cannot_be_is_refused_with_its_values(arguments: dict, words: str):
    with pytest.raises(ConfigError) as error:
        SMALL.resolve(units_per_epoch=60_000, **arguments)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "numbers",
    [{"reference_lr": "1e-1"}, {"warmup_epochs": None}, {"decay_epochs": 30}, {"decay_epochs": ("30",)},
     {"decay_factor": "0.1"}, {"decay_fraction": "0.1"}, {"end_factor": "0"}, {"momentum": "0.9"},
     {"weight_decay": "1e-4"}, {"betas": 0.9}, {"betas": ("0.9", 0.99)}, {"eps": "1e-8"}],
)  # fmt: skip
def test_a_number_that_came_as_text_is_named(numbers):
    # YAML 1.1 reads 1e-4, which has no point, as text.
    with pytest.raises(ConfigError, match=next(iter(numbers))):
        Recipe(**{"reference_batch": 256, "reference_lr": 0.1, **numbers})
