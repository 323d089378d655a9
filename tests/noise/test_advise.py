"""Does the advice follow from the papers' formulas, and is nothing advised where nothing is known?"""

import dataclasses
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from largebatch.errors import ConfigError
from largebatch.noise.advise import advise
from largebatch.noise.estimate import NoiseScale, noise_scale
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.recipe.scaling import eps_max_from, noise_scale_lr, scaled_lr

# McCandlish et al. 2018: (B / B_crit, S / S_min, E / E_min), worked out by hand from (S/S_min - 1)(E/E_min - 1) = 1.
TABLE = [(0.25, 5, 1.25), (0.5, 3, 1.5), (1, 2, 2), (2, 1.5, 3), (4, 1.25, 5)]


def measured(value, low, high, unit="examples", **change):
    scale = NoiseScale(
        b_simple=value, interval=(low, high), resolved=True, reason="", unit=unit, grad_sq_norm=0.01,
        trace_cov=0.01 * value, num_steps=1200, steps_to_resolve=0,
    )  # fmt: skip
    return dataclasses.replace(scale, **change)


def unresolved(reason, **change):
    return measured(900.0, None, None, resolved=False, reason=reason, steps_to_resolve=340, **change)


BELOW = {"batch": 512, "microbatch": 32, "world_size": 4, "lr": 0.1}


@pytest.mark.parametrize(("ratio", "steps", "units"), TABLE)
def test_what_a_batch_takes_is_mccandlishs_table(ratio, steps, units):
    advice = advise(measured(1024.0, 1000.0, 1050.0), batch=round(1024 * ratio), microbatch=16)
    assert (advice.now.steps.value, advice.now.units.value) == (steps, units)
    assert advice.then.steps.value == pytest.approx(2, rel=0.02)
    assert advice.then.units.value == pytest.approx(2, rel=0.02)


positive = st.floats(0.01, 1e9)


@given(ends=st.lists(positive, min_size=3, max_size=3), batch=st.integers(1, 10**7), microbatch=st.integers(1, 10**4))
def test_every_end_of_an_interval_is_the_formula_at_an_end_of_the_noise_scales(ends, batch, microbatch):
    low, value, high = sorted(ends)
    advice = advise(measured(value, low, high), batch=batch, microbatch=microbatch, world_size=2)
    for cost in (advice.now, advice.then):
        for got, scale in ((cost.steps.low, low), (cost.steps.value, value), (cost.steps.high, high)):
            assert got == pytest.approx(float(1 + Fraction(scale) / cost.batch), rel=1e-12)
        for got, scale in ((cost.units.low, high), (cost.units.value, value), (cost.units.high, low)):
            assert got == pytest.approx(float(1 + cost.batch / Fraction(scale)), rel=1e-12)
    target = batch if low <= batch <= high else value
    if advice.batch == batch:
        assert target == batch or abs(batch - target) <= min(abs(k * 2 * microbatch - target) for k in (1, 2, 3))
    else:
        assert (advice.batch > batch) == (target > batch)
        assert abs(advice.batch - target) <= microbatch or advice.batch == 2 * microbatch
    divides = advice.batch % (2 * microbatch) == 0
    assert divides or advice.batch == batch
    assert advice.accumulation == (advice.batch // (2 * microbatch) if divides else None)


def test_sgds_rate_is_that_of_the_recipe_and_adams_its_square_root_rule():
    scale = measured(1700.0, 1280.0, 2560.0)
    sgd, adam = (advise(scale, **BELOW, optimizer=kind) for kind in ("sgd", "adam"))
    assert sgd.batch == adam.batch == 1664
    assert sgd.lr == pytest.approx(noise_scale_lr(eps_max_from(0.1, 1700.0, 512), 1700.0, 1664))
    assert adam.lr == pytest.approx(scaled_lr("sqrt", 0.1, 512, 1664))
    assert sgd.lr < scaled_lr("linear", 0.1, 512, 1664)
    assert "2.6" in sgd.lr_rule
    assert "square root" in adam.lr_rule


def test_no_rate_is_made_up_for_an_optimizer_or_a_rate_that_is_not_known():
    neither = advise(measured(1700.0, 1280.0, 2560.0), **BELOW)
    assert neither.lr is None
    assert neither.lr_factor is None
    assert "for SGD" in str(neither)
    assert "for Adam" in str(neither)
    assert "learning_rate" not in neither.hf_arguments
    factor = advise(measured(1700.0, 1280.0, 2560.0), **BELOW | {"lr": None}, optimizer="adam")
    assert factor.lr is None
    assert factor.lr_factor == pytest.approx(math.sqrt(1664 / 512))


def test_hugging_faces_arguments_give_the_batch_and_the_rate():
    advice = advise(measured(1700.0, 1280.0, 2560.0), **BELOW, optimizer="sgd")
    names = {"per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate"}
    assert set(advice.hf_arguments) == names
    assert 4 * math.prod(advice.hf_arguments[name] for name in names - {"learning_rate"}) == advice.batch
    assert advice.hf_arguments["learning_rate"] == advice.lr
    for name in names:
        said = float(re.search(rf"{name}=([0-9.e-]+[0-9])", str(advice)).group(1))
        assert said == pytest.approx(advice.hf_arguments[name], rel=5e-3)


def test_transformers_takes_these_arguments_by_these_names(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'largebatch[hf]'")
    advice = advise(measured(1700.0, 1280.0, 2560.0), **BELOW, optimizer="adam")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **advice.hf_arguments)
    assert arguments.gradient_accumulation_steps == advice.accumulation
    assert arguments.learning_rate == advice.lr


def test_tokens_become_rows_of_sequences_or_nothing():
    scale, now = measured(2e5, 1.5e5, 3e5, "tokens"), {"batch": 32768, "microbatch": 4096, "world_size": 2}
    assert advise(scale, **now, tokens_per_sequence=512).hf_arguments["per_device_train_batch_size"] == 8
    assert advise(scale, **now).hf_arguments == {}
    uneven = advise(scale, **now, tokens_per_sequence=1000)
    assert uneven.hf_arguments == {}
    assert "a microbatch of 4,096 tokens is no whole number of rows of 1,000" in str(uneven)
    assert "Hugging Face" not in str(advise(scale, **now))
    frames = measured(2e5, 1.5e5, 3e5, "frames")
    assert advise(frames, **now).hf_arguments == {}
    assert "tokens" in str(advise(scale, **now))
    assert "examples" not in str(advise(scale, **now))


@pytest.mark.parametrize("unit", ["tokens", "sequences"])
@pytest.mark.parametrize("optimizer", ["adam", None])
def test_under_adam_a_language_models_noise_scale_is_a_lower_bound(unit, optimizer):
    scale = measured(1000.0, 800.0, 1300.0, unit)
    above = advise(scale, batch=8192, microbatch=64, lr=1e-3, optimizer=optimizer)
    assert above.batch == 8192
    assert above.lr == 1e-3
    assert "Merrill et al. 2025" in str(above)
    assert "branch measurement" in str(above)
    assert "at least" in above.text
    assert "Lower" not in str(above)
    assert advise(scale, batch=128, microbatch=64, optimizer=optimizer).batch == 1024
    sgd = advise(scale, batch=8192, microbatch=64, lr=1e-3, optimizer="sgd")
    assert sgd.batch == 1024
    assert "Merrill" not in str(sgd)


def test_a_batch_far_above_is_to_be_lowered_and_it_says_what_it_costs():
    advice = advise(measured(1024.0, 900.0, 1200.0), batch=4096, microbatch=64, lr=0.1, optimizer="sgd")
    assert advice.batch == 1024
    assert "5 (4.41 to 5.55) times the fewest examples" in str(advice)
    assert "Lower it to 1,024 examples" in str(advice)
    assert advice.lr < 0.1


def test_a_batch_inside_the_interval_is_kept_with_its_rate():
    advice = advise(measured(1000.0, 400.0, 2500.0), batch=512, microbatch=64, lr=0.1, optimizer="sgd")
    assert (advice.batch, advice.lr, advice.accumulation) == (512, 0.1, 8)
    assert "not told from the noise scale" in str(advice)


@pytest.mark.parametrize("batch", [500, 37, 513])
def test_what_is_kept_is_kept_to_the_unit(batch):
    advice = advise(measured(400.0, 20.0, 2500.0), batch=batch, microbatch=64, lr=0.1, optimizer="sgd")
    assert (advice.batch, advice.lr, advice.lr_factor) == (batch, 0.1, 1.0)
    assert (advice.accumulation, advice.hf_arguments) == (None, {})
    assert "Keep it: it is not told" in str(advice)
    assert "no whole number of microbatches, of 64 examples each, so no accumulation is given" in str(advice)
    assert advice.now == advice.then


def test_no_rounding_turns_a_raise_into_a_lowering():
    advice = advise(measured(140.0, 130.0, 150.0), batch=120, microbatch=100, lr=0.1, optimizer="sgd")
    assert (advice.batch, advice.lr) == (120, 0.1)
    assert "It stays" in str(advice)


@pytest.mark.parametrize("change", [{}, {"optimizer": "adam", "unit": "tokens"}, {"batch": 1700}])
def test_the_first_line_is_the_headline_and_the_last_the_caveats(change):
    scale = measured(1700.0, 1280.0, 2560.0, change.pop("unit", "examples"))
    headline, rest, caveats = str(advise(scale, **BELOW | change)).split("\n")
    assert re.fullmatch(r"Batch .* times the noise scale \(B_simple = .* measured steps\)\.", headline)
    assert rest.startswith("A run at it takes")
    assert caveats.startswith("B_simple stands in for")


def test_where_no_smaller_multiple_is_left_the_batch_stays():
    advice = advise(measured(100.0, 80.0, 130.0), batch=512, microbatch=64, world_size=8, optimizer="sgd", lr=0.1)
    assert (advice.batch, advice.lr, advice.accumulation) == (512, 0.1, 1)
    assert "no multiple of 512 examples" in str(advice)


def test_a_leap_is_taken_in_doublings_and_a_single_microbatch_ends_the_measuring():
    far = advise(measured(1e5, 9e4, 1.2e5), batch=64, microbatch=32)
    assert "in doublings" in str(far)
    assert "in doublings" not in str(advise(measured(200.0, 150.0, 250.0), batch=64, microbatch=32))
    assert "halve the microbatch" in str(advise(measured(30.0, 25.0, 40.0), batch=128, microbatch=32))


def test_unknown_workers_leave_the_split_open():
    advice = advise(measured(1700.0, 1280.0, 2560.0), **BELOW | {"world_size": None})
    assert advice.accumulation is None
    assert advice.hf_arguments == {}
    assert "over all workers together" in str(advice)


def test_an_unknown_microbatch_leaves_the_split_out():
    advice = advise(measured(1700.0, 1280.0, 2560.0), **BELOW | {"microbatch": None})
    assert (advice.batch, advice.accumulation, advice.hf_arguments) == (1700, None, {})
    assert "microbatch" not in str(advice)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", None])
def test_an_unresolved_noise_scale_advises_nothing_and_says_how_many_steps_are_missing(optimizer):
    rng = np.random.default_rng(0)
    scale = noise_scale(8 + rng.normal(size=60), 0.02 + 0.3 * rng.normal(size=60))
    assert not scale.resolved
    advice = advise(scale, batch=64, microbatch=8, lr=0.1, optimizer=optimizer)
    assert not advice.resolved
    assert advice.reason == scale.reason
    assert advice.reason in str(advice)
    assert advice.steps_to_resolve == scale.steps_to_resolve
    assert (advice.batch, advice.lr, advice.lr_factor, advice.accumulation, advice.hf_arguments) == (None,) * 4 + ({},)
    assert advice.now is None
    assert str(advice).startswith("Nothing is advised after 60 measured steps")


def test_what_is_known_of_an_unresolved_noise_scale_is_said_as_a_bound():
    advice = advise(unresolved("|G|^2 is not told from 0.", interval=(640.0, None)), batch=64, microbatch=8)
    assert "B_simple is at least 640 examples" in str(advice)


def test_noise_that_is_not_told_from_zero_advises_nothing():
    advice = advise(measured(-0.002, -0.01, 0.05), batch=64, microbatch=8)
    assert not advice.resolved
    assert "too little noise" in str(advice)
    one_sided = advise(measured(2.0, -1.0, 5.0), batch=64, microbatch=8)
    assert one_sided.now.units.high is None
    assert one_sided.now.steps.low == 1
    assert "unbounded" in str(one_sided)


def test_before_the_first_step_there_is_no_batch_and_no_advice():
    nothing = noise_scale([], [])
    assert not advise(nothing, batch=None, microbatch=8).resolved
    with pytest.raises(ConfigError, match="batch="):
        advise(measured(1700.0, 1280.0, 2560.0), batch=None, microbatch=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch is a whole number"),
        ({"microbatch": 1.5}, "microbatch is a whole number"),
        ({"world_size": True}, "world_size is a whole number"),
        ({"lr": 0.0}, "lr is a finite number"),
        ({"lr": math.nan}, "lr is a finite number"),
        ({"batch": "x"}, "batch is a whole number"),
        ({"lr": "x"}, "lr is a finite number above 0; got 'x'"),
        ({"lr": True}, "lr is a finite number above 0; got True"),
        ({"lr": -0.1}, "lr is a finite number above 0; got -0.1"),
        ({"lr": [0.1]}, "lr is a finite number"),
        ({"optimizer": "lion"}, "'lion' is not known"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "^optimizer SGD is not known"),
        ({"tokens_per_sequence": 512}, "counts examples"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        advise(measured(1700.0, 1280.0, 2560.0), **BELOW | change)
    assert not re.search(r"[.!?]\s", str(caught.value)), "one sentence"


def train(monitor, model, steps, seed=0, parts=4):
    """Linear regression on fresh data, 4 microbatches of 8."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model.zero_grad()
        for inputs in torch.randn(parts, 8, 3, generator=generator):
            targets = inputs.sum(1, keepdim=True) + torch.randn(8, 1, generator=generator)
            ((model(inputs) - targets).square().mean() / parts).backward()
        monitor.step()


def test_a_monitor_advises_from_its_own_noise_scale_batch_and_microbatch():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    with NoiseScaleMonitor(model, microbatch=8, every=1) as monitor:
        assert not monitor.advise(lr=0.1).resolved
        train(monitor, model, 40)
        advice = monitor.advise(lr=0.1, optimizer="sgd")
        assert monitor.noise_scale.resolved
        expected = advise(monitor.noise_scale, batch=32, microbatch=8, lr=0.1, optimizer="sgd")
        assert advice == expected
        assert monitor.advise(lr=0.1, batch=256).now.batch == 256
        state = monitor.state_dict()
    with NoiseScaleMonitor(model, microbatch=8, every=1) as resumed:
        resumed.load_state_dict(state)
        assert resumed.advise(lr=0.1, optimizer="sgd") == expected


def test_a_monitor_needs_no_argument_to_advise():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    with NoiseScaleMonitor(model, microbatch=8, every=1) as monitor:
        train(monitor, model, 40)
        advice = monitor.advise()
    assert advice.resolved
    assert advice.lr is None
    assert "for SGD" in str(advice)


def test_an_epochs_short_last_step_does_not_turn_the_advice():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    with NoiseScaleMonitor(model, microbatch=8, every=1) as monitor:
        train(monitor, model, 40, parts=16)
        before = monitor.advise(lr=0.1, optimizer="sgd")
        train(monitor, model, 1, seed=1, parts=2)
        after = monitor.advise(lr=0.1, optimizer="sgd")
        state = monitor.state_dict()
    assert (before.now.batch, after.now.batch) == (128, 128)
    with NoiseScaleMonitor(model, microbatch=8, every=1) as resumed:
        resumed.load_state_dict(state)
        assert resumed.advise(lr=0.1, optimizer="sgd") == after
        train(resumed, model, 14, seed=2, parts=2)
        assert resumed.advise().now.batch == 128, "16 of the last 31 steps"
        train(resumed, model, 1, seed=3, parts=2)
        assert resumed.advise().now.batch == 16, "the batch was changed for good"
