"""Are the other shapes what their sources and torch's own schedulers say, with every warmup, across a checkpoint?"""

import io
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torch_lr

from largebatch.errors import ConfigError
from largebatch.recipe.schedule import Constant, Schedule, WarmupStepDecay, as_torch_scheduler
from largebatch.recipe.schedules import Cosine, Joined, Linear, warmed_up, warmup_stable_decay
from oracles.recipe_schedule import by_knots, cosine_by_half_angles, lr_by_counting, with_warmup

EXACT = {"rtol": 1e-12, "atol": 1e-15}  # float64 on both sides; only the order of operations differs
STEP = WarmupStepDecay(start_lr=0.1, peak_lr=0.7, warmup_steps=6, decay_steps=(9, 12))
LATE = WarmupStepDecay(start_lr=0.1, peak_lr=0.7, warmup_steps=6, decay_steps=(9, 12), warmup="constant")
EVERY: dict[str, Schedule] = {
    "step": STEP,
    "step, constant warmup": LATE,
    "cosine": Cosine(start_lr=0.7, num_steps=15, end_lr=0.07),
    "linear": Linear(start_lr=0.7, num_steps=15),
    "warmup, cosine": warmed_up(Cosine(start_lr=0.7, num_steps=11), num_steps=15, start_lr=0.1, warmup_steps=4),
    "wsd": warmup_stable_decay(peak_lr=0.7, num_steps=15, decay_steps=4, warmup_steps=3, start_lr=0.1, end_lr=0.07),
    "joined": Joined(parts=((Constant(lr=0.3), 4), (STEP, 8), (Linear(start_lr=0.2, num_steps=3), 3))),
}

rates = st.floats(1e-5, 10)
lengths = st.integers(1, 60)


def rates_of(schedule: Schedule, num_steps: int) -> np.ndarray:
    return np.array([schedule.lr_at(step) for step in range(num_steps)])


@given(start=rates, end_factor=st.floats(0, 1), num_steps=lengths)
def test_a_cosine_is_the_squared_cosine_of_half_the_angle(start: float, end_factor: float, num_steps: int):
    schedule = Cosine(start_lr=start, end_lr=start * end_factor, num_steps=num_steps)
    steps = range(num_steps + 3)
    expected = cosine_by_half_angles(start, start * end_factor, num_steps, steps)
    np.testing.assert_allclose(rates_of(schedule, num_steps + 3), expected, rtol=1e-12, atol=1e-15 * start)
    assert (schedule.lr_at(0), schedule.lr_at(num_steps)) == (pytest.approx(start, rel=1e-15), start * end_factor)


@given(start=rates, end=rates, num_steps=lengths)
def test_a_line_adds_the_same_at_each_step(start: float, end: float, num_steps: int):
    schedule = Linear(start_lr=start, end_lr=end, num_steps=num_steps)
    exact = lr_by_counting(num_steps + 1, Fraction(start), Fraction(end), num_steps, (), Fraction(1))
    np.testing.assert_allclose(rates_of(schedule, num_steps + 1), [float(lr) for lr in exact], rtol=1e-12)
    assert schedule.lr_at(num_steps + 5) == end


@given(
    kind=st.sampled_from(["gradual", "constant"]), start=rates, peak=rates, warmup=st.integers(0, 20), rest=lengths,
    end_factor=st.floats(0, 1),
)  # fmt: skip
def test_every_shape_follows_every_warmup(
    kind: str, start: float, peak: float, warmup: int, rest: int, end_factor: float
):
    num_steps, end = warmup + rest, peak * end_factor
    settings = {"num_steps": num_steps, "start_lr": start, "warmup_steps": warmup, "warmup": kind}
    cosine = warmed_up(Cosine(start_lr=peak, num_steps=rest, end_lr=end), **settings)
    after = cosine_by_half_angles(peak, end, rest, range(rest + 2))
    np.testing.assert_allclose(rates_of(cosine, num_steps + 2), with_warmup(kind, start, warmup, after), **EXACT)

    line = warmed_up(Linear(start_lr=peak, num_steps=rest, end_lr=end), **settings)
    after = by_knots([(0, peak), (rest, end)], range(rest + 2))
    np.testing.assert_allclose(rates_of(line, num_steps + 2), with_warmup(kind, start, warmup, after), **EXACT)

    decay = 1 + rest // 2
    wsd = warmup_stable_decay(peak_lr=peak, decay_steps=decay, end_lr=end, **settings)
    after = by_knots([(rest - decay, peak), (rest, end)], range(rest + 2))
    np.testing.assert_allclose(rates_of(wsd, num_steps + 2), with_warmup(kind, start, warmup, after), **EXACT)

    step = WarmupStepDecay(
        start_lr=start, peak_lr=peak, warmup_steps=warmup, decay_steps=(warmup + rest // 2,), warmup=kind
    )
    after = np.where(np.arange(rest + 2) < rest // 2, peak, peak * 0.1)
    if rest // 2:  # a drop at the very end of the warmup is below the peak that the warmup leads to
        np.testing.assert_allclose(rates_of(step, num_steps + 2), with_warmup(kind, start, warmup, after), **EXACT)


def torch_rates(make, num_steps: int, lr: float) -> np.ndarray:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(found)


def in_a_row(optimizer, makes, milestones):
    return torch_lr.SequentialLR(optimizer, [make(optimizer) for make in makes], milestones)


def rise(optimizer):
    return torch_lr.LinearLR(optimizer, start_factor=0.1 / 0.7, end_factor=1.0, total_iters=4)


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (EVERY["cosine"], lambda o: torch_lr.CosineAnnealingLR(o, T_max=15, eta_min=0.07)),
        (EVERY["linear"], lambda o: torch_lr.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=15)),
        (
            EVERY["warmup, cosine"],
            lambda o: in_a_row(o, [rise, lambda o: torch_lr.CosineAnnealingLR(o, T_max=11)], [4]),
        ),
        (
            warmup_stable_decay(peak_lr=0.7, num_steps=15, decay_steps=5, warmup_steps=4, start_lr=0.1),
            lambda o: in_a_row(
                o,
                [
                    rise,
                    lambda o: torch_lr.ConstantLR(o, factor=1.0, total_iters=0),
                    lambda o: torch_lr.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=5),
                ],
                [4, 10],
            ),
        ),
        (
            WarmupStepDecay(start_lr=0.7, peak_lr=0.7, decay_steps=(9, 12)),
            lambda o: torch_lr.MultiStepLR(o, milestones=[9, 12], gamma=0.1),
        ),
        (
            WarmupStepDecay(start_lr=0.1, peak_lr=0.7, warmup_steps=6, warmup="constant"),
            lambda o: torch_lr.ConstantLR(o, factor=0.1 / 0.7, total_iters=6),
        ),
    ],
    ids=["cosine", "linear", "warmup and cosine", "wsd", "step", "constant warmup"],
)
def test_torchs_own_schedulers_agree(schedule: Schedule, make):
    # torch multiplies the rate of the step before, so its error adds up over the 15 steps.
    np.testing.assert_allclose(rates_of(schedule, 15), torch_rates(make, 15, 0.7), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("schedule", EVERY.values(), ids=EVERY)
def test_every_schedule_resumes_exactly_from_a_checkpoint_of_plain_numbers(schedule: Schedule):
    def make():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        return optimizer, as_torch_scheduler(optimizer, schedule)

    def follow(optimizer, scheduler, num_steps: int):
        found = []
        for _ in range(num_steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    whole = follow(*make(), 18)
    assert whole == [schedule.lr_at(step) for step in range(18)]  # bit for bit, past the end too
    for stop in (0, 4, 11, 15):
        optimizer, scheduler = make()
        follow(optimizer, scheduler, stop)
        file = io.BytesIO()
        torch.save([optimizer.state_dict(), scheduler.state_dict()], file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        optimizer, scheduler = make()
        optimizer.load_state_dict(states[0])
        scheduler.load_state_dict(states[1])
        assert follow(optimizer, scheduler, 18 - stop) == whole[stop:]


@pytest.mark.parametrize("schedule", EVERY.values(), ids=EVERY)
def test_every_schedule_can_be_sent_to_another_process(schedule: Schedule):
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_joined_parts_each_count_from_their_own_beginning(lengths: list[int]):
    parts = [Linear(start_lr=1.0 + number, num_steps=4) for number in range(len(lengths))]
    joined = Joined(parts=tuple(zip(parts, lengths, strict=True)))
    expected = [part.lr_at(step) for part, steps in zip(parts, lengths, strict=True) for step in range(steps)]
    assert joined.num_steps == len(expected)
    assert list(rates_of(joined, joined.num_steps)) == expected
    assert joined.lr_at(joined.num_steps) == parts[-1].lr_at(lengths[-1])  # the last part goes on


def test_joining_in_two_ways_is_the_same():
    a, b, c = ((Linear(start_lr=lr, num_steps=3), 2) for lr in (0.1, 0.2, 0.3))
    left = Joined(parts=((Joined(parts=(a, b)), 4), c))
    right = Joined(parts=(a, (Joined(parts=(b, c)), 4)))
    assert list(rates_of(left, 9)) == list(rates_of(right, 9)) == list(rates_of(Joined(parts=(a, b, c)), 9))


def test_no_warmup_is_the_schedule_itself():
    cosine = Cosine(start_lr=0.7, num_steps=15)
    assert warmed_up(cosine, num_steps=15, start_lr=0.1, warmup_steps=0) is cosine


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Linear(start_lr=0.0, num_steps=4), "start_lr is a finite learning rate above 0; got 0.0"),
        (lambda: Cosine(start_lr=0.1, num_steps=4, end_lr=-0.1), "end_lr is a finite learning rate of at least 0"),
        (lambda: Cosine(start_lr=0.1, num_steps=0), "num_steps is at least 1; got 0"),
        (lambda: Cosine(start_lr=0.1, num_steps=4).lr_at(-1), "a schedule starts at step 0; got step -1"),
        (lambda: Linear(start_lr=0.1, num_steps=4).lr_at(-1), "a schedule starts at step 0; got step -1"),
        (lambda: EVERY["joined"].lr_at(-1), "a schedule starts at step 0; got step -1"),
        (lambda: Joined(parts=()), "a joined schedule has at least one part; got none"),
        (
            lambda: Joined(parts=((Constant(lr=0.1), 3), (Constant(lr=0.2), 0))),
            "each part of a joined schedule lasts at least 1 step; part 2 of 2 lasts 0",
        ),
        (
            lambda: warmed_up(Constant(lr=0.1), num_steps=5, start_lr=0.1, warmup_steps=5),
            "a warmup of 5 steps does not end within the run of 5 steps",
        ),
        (
            lambda: warmed_up(Constant(lr=0.1), num_steps=5, start_lr=0.1, warmup_steps=-1),
            "warmup_steps is at least 0; got -1",
        ),
        (
            lambda: warmed_up(Constant(lr=0.1), num_steps=5, start_lr=0.1, warmup_steps=2, warmup="slow"),
            "warmup 'slow' is not known. Use one of: gradual, constant",
        ),
        (
            lambda: WarmupStepDecay(start_lr=0.1, peak_lr=0.1, warmup="slow"),
            "warmup 'slow' is not known. Use one of: gradual, constant",
        ),
        (
            lambda: warmup_stable_decay(peak_lr=0.1, num_steps=9, decay_steps=6, warmup_steps=4, start_lr=0.1),
            "a decay over the last 6 of 9 steps begins inside the warmup of 4 steps",
        ),
        (
            lambda: warmup_stable_decay(peak_lr=0.1, num_steps=9, decay_steps=0),
            "a decay lasts at least 1 step; got 0 of 9",
        ),
        (
            lambda: warmup_stable_decay(peak_lr=0.1, num_steps=9, decay_steps=2, warmup_steps=4),
            "a warmup of 4 steps needs the rate it starts from; got start_lr=None",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_its_values(call, words: str):
    with pytest.raises(ConfigError) as error:
        call()
    assert words in str(error.value)


@pytest.mark.parametrize("shape", [Linear, Cosine])
@pytest.mark.parametrize("numbers", [{"num_steps": "3"}, {"num_steps": float("nan")}, {"end_lr": "0"}])
def test_what_is_no_number_is_refused_by_name(shape, numbers):
    with pytest.raises(ConfigError, match=next(iter(numbers))):
        shape(**{"start_lr": 0.1, "num_steps": 3, **numbers})
