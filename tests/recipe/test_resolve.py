"""Do Adam, batch norm, the measured rules and every shape resolve to their numbers and their doubts?"""

import dataclasses
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.errors import ConfigError
from largebatch.recipe.optimizer import build_optimizer
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.recipes import goyal2017_resnet50
from largebatch.recipe.resolve import check_layout
from largebatch.recipe.resolved import ResolvedRecipe
from largebatch.recipe.schedule import WarmupStepDecay, as_torch_scheduler
from oracles.recipe_scaling import can_be_dealt

IMAGENET, UNITS = 1_281_167, 60_000
SGD = Recipe(reference_batch=64, reference_lr=0.02, warmup_epochs=2.0)
ADAM = Recipe(reference_batch=64, reference_lr=1e-3, warmup_epochs=2.0, optimizer="adamw", betas=(0.9, 0.99),
              scaling="sqrt", weight_decay=0.1)  # fmt: skip


def rows(resolved: ResolvedRecipe) -> dict[str, tuple]:
    return {number.name: (number.value, number.rule, number.source) for number in resolved.numbers}


# The published recipe


def test_goyal2017_resnet50_is_table_5_1_of_the_paper():
    # Goyal 2017, sec. 2.3, 5.1, Figure 1.
    recipe = goyal2017_resnet50()
    assert (recipe.optimizer, recipe.momentum, recipe.nesterov, recipe.weight_decay) == ("sgd", 0.9, True, 1e-4)
    assert (recipe.warmup, recipe.warmup_epochs, recipe.schedule) == ("gradual", 5.0, "step")
    assert (recipe.decay_epochs, recipe.decay_factor, recipe.exclude_biases) == ((30.0, 60.0, 80.0), 0.1, False)
    resolved = recipe.resolve(8192, IMAGENET, world_size=256)
    assert (resolved.lr, resolved.warmup_steps, resolved.batchnorm_n, resolved.microbatch) == (3.2, 782, 32, 32)
    assert resolved.schedule == WarmupStepDecay(
        start_lr=0.1, peak_lr=3.2, warmup_steps=782, decay_steps=(4692, 9384, 12511)
    )
    assert resolved.warnings == ()


def test_beyond_8192_goyals_recipe_warns_and_names_what_was_measured():
    recipe = goyal2017_resnet50()
    beyond = "a batch of 16384 is beyond 8192, the largest that this recipe was shown for"
    assert recipe.resolve(16384, IMAGENET).warnings == (f"{beyond}.",)
    assert recipe.resolve(16384, IMAGENET, b_crit=21_000).warnings == (
        f"{beyond} (the measured critical batch is 21000).",
    )
    assert recipe.resolve(16384, IMAGENET, b_simple=21_000).warnings == (
        f"{beyond} (the measured noise scale is 21000).",
    )
    assert recipe.resolve(8192, IMAGENET, b_crit=21_000).warnings == ()


def test_above_the_critical_batch_the_cost_is_that_of_the_hyperbola():
    # McCandlish 2018, eq. (2.11): at B = 2 B_crit three times the fewest units, 1.5 times the fewest steps.
    (warning,) = SGD.resolve(1024, UNITS, b_crit=512).warnings
    assert "above the measured critical batch of 512" in warning
    assert "3 times the fewest units and 1.5 times the fewest steps" in warning
    (warning,) = SGD.resolve(1024, UNITS, b_simple=512).warnings
    assert "above the measured noise scale of 512" in warning
    (warning,) = SGD.resolve(1024, UNITS, b_simple=100, b_crit=512).warnings  # what was measured directly counts
    assert "critical batch of 512" in warning
    assert SGD.resolve(512, UNITS, b_crit=512).warnings == ()


# Rules


def test_the_noise_rule_takes_the_measured_noise_scale():
    # McCandlish 2018, eq. (2.6): half of eps_max at B_simple; 64 = B_simple was tuned, so 0.04 is eps_max.
    resolved = SGD.resolve(192, UNITS, rule="noise", b_simple=64)
    assert resolved.lr == pytest.approx(0.03, rel=1e-12)
    assert rows(resolved)["lr"][1:] == (
        "noise: eps_max / (1 + B_simple / B), eps_max 0.04 from 0.02 at 64, B_simple 64",
        "McCandlish 2018, eq. (2.6)",
    )
    assert dataclasses.replace(SGD, scaling="noise").resolve(192, UNITS, b_simple=64).lr == resolved.lr
    assert resolved.rule == "noise"
    with pytest.raises(ConfigError, match="rule 'noise' needs a measured noise scale; got b_simple=None"):
        SGD.resolve(192, UNITS, rule="noise", b_crit=64)


def test_a_given_rate_needs_no_measurement_whatever_the_recipes_rule():
    resolved = dataclasses.replace(SGD, scaling="noise").resolve(192, UNITS, lr=0.1, rule="given")
    assert (resolved.lr, resolved.rule) == (0.1, "given")
    assert SGD.resolve(192, UNITS, lr=0.1).rule == "given"


def test_the_surge_rule_peaks_at_the_critical_batch_and_is_for_adam_alone():
    recipe = dataclasses.replace(ADAM, scaling="surge", adam_rule="none")
    rates = {batch: recipe.resolve(batch, UNITS, b_crit=256).lr for batch in (64, 128, 256, 512, 1024)}
    # Li 2024: 0.8 of the peak at a quarter of B_noise and at four times it; 1e-3 was tuned at a quarter.
    assert rates[256] == pytest.approx(1e-3 / 0.8, rel=1e-12)
    assert rates[64] == pytest.approx(rates[1024], rel=1e-12)
    assert rates[128] == pytest.approx(rates[512], rel=1e-12)
    row = rows(recipe.resolve(256, UNITS, b_crit=256))["lr"]
    assert "eps_max 0.00125 from 0.001 at 64, B_noise 256" in row[1]
    assert any("b_simple stands in" in words for words in recipe.resolve(256, UNITS, b_simple=256).warnings)
    for optimizer in ("sgd", "velocity_sgd", "lars", "lamb"):
        with pytest.raises(ConfigError, match=f"rule 'surge' is for .*; got '{optimizer}'"):
            dataclasses.replace(recipe, optimizer=optimizer)
    with pytest.raises(ConfigError, match="rule 'surge' is for"):
        SGD.resolve(256, UNITS, rule="surge", b_crit=256)


@pytest.mark.parametrize(
    ("optimizer", "rule", "doubtful"),
    [("sgd", "linear", False), ("lars", "linear", False), ("adamw", "sqrt", False), ("lamb", "sqrt", False),
     ("adam", "linear", True), ("lamb", "linear", True), ("sgd", "sqrt", True), ("adamw", "noise", True),
     ("adamw", "none", False)],
)  # fmt: skip
def test_a_rule_that_was_shown_for_other_optimizers_is_doubtful(optimizer: str, rule: str, doubtful: bool):
    recipe = dataclasses.replace(ADAM, optimizer=optimizer, scaling=rule, adam_rule="none")
    found = recipe.resolve(128, UNITS, b_simple=1000).warnings
    assert any(f"the {rule} rule was shown for" in words for words in found) is doubtful
    assert len(found) == doubtful
    assert recipe.resolve(64, UNITS, b_simple=1000).warnings == ()  # at the reference nothing is scaled


def test_malladis_betas_with_another_rule_for_the_rate_are_doubtful():
    found = dataclasses.replace(ADAM, scaling="linear").resolve(128, UNITS).warnings
    assert any("Malladi 2022 scales betas and epsilon together with the square root" in words for words in found)
    assert ADAM.resolve(128, UNITS).warnings == ()


# Adam


def test_adams_numbers_follow_malladi_2022():
    resolved = ADAM.resolve(256, UNITS)
    assert resolved.lr == 2e-3
    assert resolved.betas == pytest.approx((0.6, 0.96), rel=1e-12)
    assert resolved.eps == pytest.approx(5e-9, rel=1e-12)
    assert resolved.weight_decay == 0.1
    found = rows(resolved)
    assert found["optimizer"][0] == "adamw"
    assert found["beta1"][1] == "1 - 4 (1 - 0.9): as many units back as at the reference"
    assert found["eps"][1] == "1e-08 / sqrt(4)"
    assert {found[name][2] for name in ("beta1", "beta2", "eps")} == {"Malladi 2022, Adam scaling rule"}
    assert "momentum" not in found


def test_adams_numbers_follow_marek_2025():
    resolved = dataclasses.replace(ADAM, adam_rule="marek").resolve(128, UNITS)
    assert resolved.betas == (0.9, pytest.approx(0.99**2, rel=1e-12))
    assert resolved.eps == 1e-8
    assert rows(resolved)["beta2"][1] == "0.99 to the power 2: a half-life of 4414 units as at the reference"
    assert rows(resolved)["beta2"][2].startswith("Marek 2025")
    assert 64 * math.log(2) / -math.log(0.99) == pytest.approx(4414, abs=0.5)


@pytest.mark.parametrize("optimizer", ["lamb", "sgd", "adam"])
def test_betas_stay_where_no_rule_moves_them(optimizer: str):
    recipe = dataclasses.replace(ADAM, optimizer=optimizer, adam_rule="none" if optimizer == "adam" else "malladi")
    resolved = recipe.resolve(2048, UNITS)  # 32-fold: Malladi's beta1 would be -2.2
    assert (resolved.betas, resolved.eps) == ((0.9, 0.99), 1e-8)


def test_a_beta_that_leaves_0_to_1_is_an_error_with_the_way_out():
    with pytest.raises(ConfigError, match=r"beta1 of 0\.9 becomes .* Let the batch grow less than 10-fold"):
        ADAM.resolve(640, UNITS)
    assert 0 < ADAM.resolve(639, UNITS).betas[0] < 0.02
    with pytest.raises(ConfigError, match="adam_rule='marek' or 'none'"):
        ADAM.resolve(640, UNITS, lr=1e-3)  # a given rate does not give betas


def test_every_optimizer_says_its_form_and_its_source():
    sources = {}
    for optimizer in ("sgd", "velocity_sgd", "lars", "lamb", "adam", "adamw"):
        resolved = dataclasses.replace(ADAM, optimizer=optimizer).resolve(128, UNITS)
        found = rows(resolved)
        assert resolved.optimizer == found["optimizer"][0] == optimizer
        assert ("momentum" in found) == (optimizer in ("sgd", "velocity_sgd", "lars"))
        assert ("beta1" in found) == (optimizer in ("lamb", "adam", "adamw"))
        assert all(rule and source for _, rule, source in found.values())
        assert ("biases" in found["weight_decay"][1]) == (optimizer in ("lars", "lamb"))
        sources[optimizer] = found["optimizer"][2]
    assert sources["sgd"] == "Goyal 2017, eq. (9)"
    assert sources["velocity_sgd"] == "Goyal 2017, eq. (10), remark 2"
    assert len(set(sources.values())) == 6
    excluded = dataclasses.replace(SGD, exclude_biases=True).resolve(64, UNITS)
    assert excluded.exclude_biases
    assert "norm layers and biases" in rows(excluded)["weight_decay"][1]


@pytest.mark.parametrize("name", ["sgd", "velocity_sgd", "lars", "lamb", "adam", "adamw"])
def test_the_optimizer_and_its_scheduler_take_the_resolved_numbers(name: str):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    resolved = dataclasses.replace(ADAM, optimizer=name, schedule="cosine").resolve(256, UNITS)
    optimizer = build_optimizer(model, resolved)
    scheduler = as_torch_scheduler(optimizer, resolved.schedule)
    for step in range(3):
        model(torch.eye(3)).square().sum().backward()
        optimizer.step()
        assert {group["lr"] for group in optimizer.param_groups} == {resolved.schedule.lr_at(step)}
        scheduler.step()
    for group in optimizer.param_groups:
        if "betas" in group:
            assert (tuple(group["betas"]), group["eps"]) == (resolved.betas, resolved.eps)
        else:
            assert group["momentum"] == 0.9
    assert sorted({group["weight_decay"] for group in optimizer.param_groups}) == [0.0, 0.1]


# Warmup and shapes


@pytest.mark.parametrize("schedule", ["step", "cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", ["gradual", "constant", "none"])
def test_every_shape_takes_every_warmup(schedule: str, warmup: str):
    recipe = dataclasses.replace(SGD, schedule=schedule, warmup=warmup)
    resolved = recipe.resolve(512, UNITS)
    lr_at, end = resolved.schedule.lr_at, resolved.warmup_steps
    assert end == (0 if warmup == "none" else resolved.steps_at(2.0))
    assert lr_at(end) == pytest.approx(0.16, rel=1e-15)
    assert lr_at(0) == (0.16 if warmup == "none" else 0.02)
    if end:
        middle = {"gradual": 0.02 + 0.14 * (end // 2) / end, "constant": 0.02}[warmup]
        assert lr_at(end // 2) == pytest.approx(middle, rel=1e-12)
        assert lr_at(end - 1) < 0.16
    assert lr_at(resolved.num_steps) == (0.16 if schedule == "step" else 0.0)
    assert pickle.loads(pickle.dumps(resolved)) == resolved
    words = {"gradual": "gradual over 2 epochs, from 0.02", "constant": "constant at 0.02 over 2 epochs, then 0.16",
             "none": "none asked for"}  # fmt: skip
    assert rows(resolved)["warmup_steps"][1].startswith(words[warmup])


@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd"]), end_factor=st.floats(0, 1), batch=st.integers(1, 4000),
    fraction=st.floats(0.05, 0.8), units=st.integers(4000, 10**6),
)  # fmt: skip
@settings(max_examples=60)
def test_every_shape_ends_where_the_run_ends(schedule: str, end_factor: float, batch: int, fraction: float, units: int):
    recipe = dataclasses.replace(
        SGD, epochs=20, schedule=schedule, end_factor=end_factor, decay_fraction=fraction
    )  # fmt: skip
    resolved = recipe.resolve(batch, units)
    lr_at, num_steps = resolved.schedule.lr_at, resolved.num_steps
    end_lr = end_factor * resolved.lr
    assert lr_at(num_steps) == end_lr == rows(resolved)["end_lr"][0]
    last = [lr_at(step) for step in range(max(resolved.warmup_steps, num_steps - 50), num_steps + 1)]
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(last))
    if schedule == "wsd":
        decay_start = max(resolved.warmup_steps, resolved.steps_at(20 * (1 - fraction)))
        assert lr_at(decay_start) == pytest.approx(resolved.lr, rel=1e-12)
        middle = (decay_start + num_steps) // 2
        share = (middle - decay_start) / (num_steps - decay_start)
        assert lr_at(middle) == pytest.approx(resolved.lr + share * (end_lr - resolved.lr), rel=1e-9)


def test_each_shape_names_its_source():
    found = {
        name: rows(dataclasses.replace(SGD, schedule=name, end_factor=0.1).resolve(512, UNITS))
        for name in ("cosine", "linear", "wsd")
    }
    assert found["cosine"]["schedule"][1:] == (
        "half a cosine from step 234, where the warmup is over", "Loshchilov 2017; He 2019",
    )  # fmt: skip
    assert found["wsd"]["schedule"][2] == "Hu 2024; Hägele 2024"
    assert found["linear"]["end_lr"][0] == pytest.approx(0.016, rel=1e-12)


def test_a_warmup_that_rounds_to_the_whole_run_is_an_error():
    recipe = Recipe(reference_batch=4, reference_lr=0.1, epochs=1, warmup_epochs=0.5)
    with pytest.raises(ConfigError, match="at a batch of 100 the warmup is all 1 steps of the run"):
        recipe.resolve(100, 100)


# Who takes how much of the batch


@given(
    batch=st.integers(1, 200), world_size=st.integers(1, 6), accumulation=st.integers(1, 4),
    n=st.none() | st.integers(1, 24),
)  # fmt: skip
def test_a_batch_is_refused_just_where_it_cannot_be_dealt_and_the_nearest_are_named(
    batch: int, world_size: int, accumulation: int, n: int | None
):
    def fits(size: int) -> bool:
        return can_be_dealt(size, world_size, accumulation, n) and (n is None or n <= size)

    if fits(batch):
        check_layout(batch, world_size, accumulation, n)
        return
    with pytest.raises(ConfigError) as error:
        check_layout(batch, world_size, accumulation, n)
    if n is not None and n > batch:
        assert f"batchnorm_n={n} examples needs a batch of at least as many; got {batch}" in str(error.value)
        return
    below = [size for size in range(1, batch) if fits(size)][-1:]
    above = next(size for size in range(batch + 1, batch + 10_000) if fits(size))
    nearest = " or ".join(str(size) for size in (*below, above))
    assert str(error.value).endswith(f"The nearest that can: {nearest}.")


@pytest.mark.parametrize(
    ("world_size", "accumulation", "words"),
    [
        (256, 1, "unchanged: each microbatch"),
        (16, 16, "unchanged: each microbatch"),
        (8, None, "unchanged: ghost batches in each microbatch of 1024"),
        (512, 1, "unchanged: groups of 2 workers with 16 each"),
    ],
)
def test_batch_norms_n_stays_whatever_the_layout(world_size: int, accumulation: int | None, words: str):
    # Goyal 2017, sec. 2.3: n is part of the loss, not of how it is computed.
    resolved = goyal2017_resnet50().resolve(8192, IMAGENET, world_size=world_size, accumulation=accumulation)
    assert resolved.batchnorm_n == 32
    assert rows(resolved)["batchnorm_n"][1] == words
    assert (resolved.world_size, resolved.accumulation) == (world_size, accumulation or 1)
    assert resolved.local_batch * world_size == resolved.microbatch * resolved.accumulation * world_size == 8192
    assert resolved.lr == 3.2  # nor has the layout a say in the rate


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"batch": 8192, "world_size": 7},
            "a batch of 8192 cannot be dealt out evenly to 7 workers and batch norm over 32. The nearest that can: "
            "8064 or 8288.",
        ),
        ({"batch": 100}, "evenly to 1 worker and batch norm over 32. The nearest that can: 96 or 128."),
        ({"batch": 96, "world_size": 2, "accumulation": 5}, "to 2 workers with 5 microbatches each and batch norm"),
        ({"batch": 16}, "batch norm over batchnorm_n=32 examples needs a batch of at least as many; got 16."),
        ({"batch": 8192, "world_size": 0}, "world_size is a whole number of at least 1; got 0"),
        ({"batch": 8192, "accumulation": 0}, "accumulation is a whole number of at least 1; got 0"),
        ({"batch": 8192, "b_simple": -1.0}, "b_simple is a finite number of at least 0, or None while unresolved"),
        ({"batch": 8192, "b_crit": math.nan}, "b_crit is a finite number above 0, or None while unresolved; got nan"),
        ({"batch": 8192, "b_crit": 0.0}, "b_crit is a finite number above 0, or None while unresolved; got 0.0"),
        ({"batch": 8192, "rule": "cubic"}, "rule 'cubic' is not known. Use one of: linear, sqrt, none, noise, surge;"),
    ],
)
def test_what_cannot_be_resolved_is_refused_with_its_values(arguments: dict, words: str):
    with pytest.raises(ConfigError) as error:
        goyal2017_resnet50().resolve(units_per_epoch=IMAGENET, **arguments)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup": "slow"}, "warmup 'slow' is not known. Use one of: gradual, constant, none."),
        ({"schedule": "stairs"}, "schedule 'stairs' is not known. Use one of: step, cosine, linear, wsd."),
        (
            {"optimizer": "rmsprop"},
            "optimizer 'rmsprop' is not known. Use one of: sgd, velocity_sgd, lars, lamb, adam, adamw.",
        ),
        ({"adam_rule": "cubic"}, "adam_rule 'cubic' is not known. Use one of: malladi, marek, none."),
        ({"betas": (0.9, 1.0)}, "betas are two numbers in [0, 1); got (0.9, 1.0)"),
        ({"eps": 0.0}, "eps is a finite number above 0; got 0.0"),
        ({"batchnorm_n": 0}, "batchnorm_n is a whole number of at least 1; got 0"),
        ({"batchnorm_n": 128}, "batchnorm_n=128 examples does not fit into the reference batch of 64"),
        ({"shown_up_to": 0}, "shown_up_to is a whole number of at least 1; got 0"),
        ({"schedule": "cosine", "decay_epochs": (6.0,)}, "decay_epochs belong to schedule='step'; got (6.0,)"),
        ({"schedule": "wsd", "decay_fraction": 0.0}, "decay_fraction is in (0, 1]; got 0.0"),
        (
            {"schedule": "wsd", "decay_fraction": 0.9},
            "the decay, over the last 0.9 of 10 epochs, begins inside the warmup of 2 epochs",
        ),
        ({"schedule": "cosine", "end_factor": 1.5}, "end_factor is in [0, 1]; got 1.5"),
        ({"end_factor": 0.1}, "schedule='step' ends where its decays lead; got end_factor=0.1"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_with_its_values(changes: dict, words: str):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(SGD, **changes)
    assert words in str(error.value)


def test_without_warmup_its_length_is_not_asked():
    recipe = Recipe(reference_batch=64, reference_lr=0.02, epochs=2, warmup="none", decay_epochs=(1.0,))
    assert recipe.resolve(512, UNITS).warmup_steps == 0


def test_what_rounds_away_is_said():
    recipe = Recipe(reference_batch=10, reference_lr=0.1, warmup_epochs=0.4, decay_epochs=(9.6,))
    resolved = recipe.resolve(100, 100)
    assert resolved.warmup_steps == 0
    warmup, decay = resolved.warnings
    assert "0.4 epochs is less than half a step" in warmup and "starts at 1" in warmup
    assert "after epoch 9.6 falls on the end of the run of 10 steps" in decay
    (row,) = [number for number in resolved.numbers if number.name == "warmup_steps"]
    assert "less than half a step" in row.rule
    assert not recipe.resolve(10, 100).warnings


@pytest.mark.parametrize("numbers", [{"lr": "0.1"}, {"b_simple": "90"}, {"b_crit": "90"}])
def test_a_number_that_came_as_text_is_named(numbers):
    with pytest.raises(ConfigError, match=next(iter(numbers))):
        Recipe(reference_batch=32, reference_lr=0.1).resolve(64, 1000, **numbers)
