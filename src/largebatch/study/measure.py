"""What is learned at the baseline batch alone: goals, a tuned learning rate, the noise scale, a prediction?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from largebatch.errors import ConfigError, DivergedError, GoalNotReachedError
from largebatch.noise.estimate import noise_scale
from largebatch.records.files import read_lines
from largebatch.records.schema import GoalPrediction, Interval, NoiseWindow, RunRecord
from largebatch.study.choose import best_lr
from largebatch.study.context import Context
from largebatch.study.plan import microbatch_for, pick_goals
from largebatch.study.predict import geometric_windows, noise_windows, predict_goals
from largebatch.study.sweep import Search, search_lrs

_SHORTEST, _GROWTH = 16, 0.5
"""Windows for the eye are longer than those of the prediction: a picture wants resolved points."""

StepArrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the measured run says."""

    b_simple: Interval
    """Over the whole measured run."""
    resolved: bool
    """Whether that noise scale is resolved; an unresolved one sets no learning rate."""
    reason: str
    """Why not; empty if so."""
    num_runs: int
    """Measured runs that were averaged: 1, or more where one was not enough."""
    windows: tuple[NoiseWindow, ...]
    goals: tuple[GoalPrediction, ...]
    """Hardest last."""


def run_baseline(context: Context) -> list[tuple[int, float]]:
    """Train at the reference batch and rate; return its curve, (step, loss on the goal examples).

    Raises:
        DivergedError: the reference learning rate does not train.
    """
    recipe = context.task.recipe
    context.on_phase(
        "baseline", f"batch {recipe.reference_batch}, learning rate {recipe.reference_lr:g}: sets the goals"
    )
    steps = recipe.resolve(recipe.reference_batch, context.num_units).num_steps
    spec = context.spec("baseline", recipe.reference_batch, recipe.reference_lr, 0, trace_loss=True, max_steps=steps)
    record = context.run([spec])[0]
    if record.status == "diverged":
        raise DivergedError(
            f"the baseline diverged after {record.steps} steps at batch {spec.batch} and learning rate {spec.lr:g}. "
            "Lower reference_lr in the task's recipe."
        )
    lines = read_lines(context.launcher.folder(spec) / "evaluations.jsonl")
    return [(int(line["step"]), float(line["goal_loss"])) for line in lines]


def set_goals(context: Context) -> None:
    """Take the task's goals; where it states none, pick them from a run at the reference batch and rate."""
    context.goals = tuple(context.task.goals or ()) or pick_goals(run_baseline(context), context.protocol)


def check_goals(context: Context, search: Search) -> None:
    """Refuse goals that fresh weights meet: nothing is learned on the way to them.

    Raises:
        ConfigError: a run had met the easiest goal before its first step.
    """
    if any(record.crossings[0] is not None and record.crossings[0] <= 0 for record in search.records.values()):
        advice = (
            "State goals below the loss of fresh weights in the task, or leave `goals` out to have them picked."
            if context.task.goals
            else "The goals were picked from the baseline run, which learned little: give its recipe more epochs or a "
            "higher reference_lr, or state goals in the task."
        )
        raise ConfigError(f"the goal of loss {context.goals[0]:.4g} is met before the first step. {advice}")


def tune_reference(context: Context) -> tuple[Search, float, float]:
    """Search the learning rate at the reference batch; return (search, best rate, fewest steps to the hardest goal).

    Raises:
        DivergedError: every rate diverged.
        GoalNotReachedError: no rate reached the hardest goal.
    """
    recipe = context.task.recipe
    batch = recipe.reference_batch
    allowance = 4 * recipe.resolve(batch, context.num_units).num_steps
    search = search_lrs(context, {batch: recipe.reference_lr}, {batch: allowance})[batch]
    check_goals(context, search)
    hardest = len(context.goals) - 1
    steps = search.best_steps(hardest)
    if steps is None:
        tried = ", ".join(f"{lr:.3g}" for lr in sorted(search.records))
        if all(record.status == "diverged" for record in search.records.values()):
            raise DivergedError(
                f"training diverged at every learning rate tried at batch {batch} ({tried}). "
                "Lower reference_lr in the task's recipe by a factor of 100 or check the loss."
            )
        best = min(
            (record.goal_loss for record in search.records.values() if record.goal_loss is not None), default=None
        )
        raise GoalNotReachedError(
            f"no run reached the goal of loss {context.goals[-1]:.4g} within {allowance} steps at batch {batch} "
            f"(learning rates {tried}; lowest loss at an end {best:.4g}). All runs are kept in {context.out}; "
            "state an easier last goal in the task, or give its recipe more epochs."
        )
    tuned = best_lr(search.tried(hardest), context.protocol.lr_factor)
    assert tuned is not None  # a run has reached the goal
    if tuned >= max(search.records) or tuned <= min(search.records):
        context.warn(
            f"The search for the baseline's learning rate ended at its edge ({tuned:.3g}; {min(search.records):.3g} to "
            f"{max(search.records):.3g} were tried from {recipe.reference_lr:g}): a rate beyond it may be better."
        )
    return search, tuned, steps


def measure(context: Context, lr: float, steps: float) -> Prediction:
    """Train at the baseline with the monitor on, and predict every goal from what it measured.

    One run is enough where its noise scale is resolved. Where it is not, or its interval is wide, runs with other
    seeds are added in rounds and their moments averaged step by step.

    Args:
        lr: the tuned learning rate.
        steps: steps it is expected to need to the hardest goal.
    """
    protocol = context.protocol
    context.measured_steps = math.ceil(steps)
    num_runs = 1
    while True:
        runs = _measured_runs(context, lr, steps, num_runs)
        prediction = forecast(context, runs)
        if num_runs >= protocol.max_measured_runs or not is_wide(prediction.goals[-1].b_simple, protocol.wide_ratio):
            return prediction
        num_runs = min(2 * num_runs + 1, protocol.max_measured_runs)
        context.on_phase("measure", f"the noise scale is not resolved well enough yet: {num_runs} runs in all")


def _measured_runs(context: Context, lr: float, steps: float, num_runs: int) -> list[tuple[RunRecord, StepArrays]]:
    recipe, protocol = context.task.recipe, context.protocol
    specs = [
        context.spec(
            "measure", recipe.reference_batch, lr, number, goals=context.goals, monitor=True,
            microbatch=microbatch_for(recipe.reference_batch, protocol, context.task),
            max_steps=math.ceil(protocol.step_allowance * steps) + 10,
        )
        for number in range(num_runs)
    ]  # fmt: skip
    records = context.run(specs, context.on_step if num_runs == 1 else None)
    runs = [(record, _moments_of(context, record)) for record in records]
    diverged = sum(record.status == "diverged" for record in records)
    if 0 < diverged < len(records):
        context.warn(
            f"{diverged} of {len(records)} measured runs diverged at learning rate {lr:.3g} and were left out."
        )
    kept = [(record, moments) for record, moments in runs if record.status != "diverged" and len(moments["step"])]
    if not kept:
        raise DivergedError(
            f"the measured run diverged after {records[0].steps} steps at the tuned learning rate {lr:.3g}, "
            "which is at the edge of stability. Lower reference_lr in the task's recipe, or state easier goals."
        )
    return kept


def _moments_of(context: Context, record: RunRecord) -> StepArrays:
    lines = read_lines(context.launcher.folder(record.spec) / "steps.jsonl")
    names = ("step", "loss", "trace_cov", "grad_sq_norm")
    # A step whose gradient was not finite has left no line.
    return {name: np.array([line[name] for line in lines]) for name in names}


def is_wide(interval: Interval, ratio: float) -> bool:
    """Whether an interval is open, not positive, or its high end more than `ratio` times its low one."""
    low, high = interval.low, interval.high
    return low is None or high is None or not 0 < high <= ratio * low


def forecast(context: Context, runs: Sequence[tuple[RunRecord, StepArrays]]) -> Prediction:
    """What the measured runs predict for every goal (McCandlish 2018, D.1).

    Several runs are averaged step by step over those that still go on; a goal's crossing is their geometric mean.
    """
    unit, batch = context.task.unit, runs[0][0].spec.batch
    longest = max(len(moments["step"]) for _, moments in runs)
    trace, grad, loss = (
        np.array([
            np.mean([moments[name][step] for _, moments in runs if step < len(moments["step"])])
            for step in range(longest)
        ])
        for name in ("trace_cov", "grad_sq_norm", "loss")
    )  # fmt: skip
    crossings: dict[float, float | None] = {}
    for index, goal in enumerate(context.goals):
        found = [crossing for record, _ in runs if (crossing := record.crossings[index]) is not None]
        crossings[goal] = min(math.exp(np.mean(np.log(found))), float(longest)) if found else None
    estimate = noise_scale(trace, grad, unit=unit)
    return Prediction(
        b_simple=Interval(value=estimate.b_simple, low=estimate.interval[0], high=estimate.interval[1]),
        resolved=estimate.resolved and estimate.b_simple is not None and estimate.b_simple > 0,
        reason=estimate.reason,
        num_runs=len(runs),
        windows=noise_windows(
            trace, grad, loss, unit=unit,
            windows=geometric_windows(longest, shortest=max(_SHORTEST, longest // 12), growth=_GROWTH),
        ),
        goals=predict_goals(trace, grad, batch=batch, crossings=crossings, unit=unit),
    )  # fmt: skip
