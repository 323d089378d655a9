"""How large a batch is worth it here, and what must change to use it? The whole main job, phase by phase.

Measure, predict, verify, train large, report. Every training run is a cell that is never run twice, and each
choice is a function of finished cells: killed anywhere, the same call goes on and ends in the same result.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]

from largebatch.errors import ConfigError
from largebatch.recipe.scaling import eps_max_from, noise_scale_lr
from largebatch.records.files import read_json, write_json
from largebatch.records.schema import GoalFront, StudyResult
from largebatch.study.conclude import recommend, summarise
from largebatch.study.context import Context
from largebatch.study.frontier import fit_front
from largebatch.study.identity import claim_folder, identity_of, locked
from largebatch.study.large import NoiseRule, train_large, winner
from largebatch.study.launch import Launcher, blame, cached_task
from largebatch.study.measure import Prediction, is_wide, measure, set_goals, tune_reference
from largebatch.study.plan import Protocol, batch_grid, microbatch_for, more_batches
from largebatch.study.sweep import Search, confirm, search_lrs

FEW_STEPS = 50
"""Steps to the hardest goal at the baseline below which the result carries a warning."""


Configure = Callable[[Context], None]


def study(
    task: str, *, out: Path, data: Path | None = None, seed: int = 0, jobs: int = 1, budget: float | None = None,
    device: str = "cpu", protocol: Protocol | None = None, configure: Configure | None = None,
) -> StudyResult:  # fmt: skip
    """Measure, predict, verify and train large; write `result.json` into `out` and return it.

    Args:
        task: a task's name, or the path of a Python file that defines one.
        out: the study's folder; a study already begun there goes on.
        data: where the task's files are; None for the usual places.
        seed: every draw of the study follows from it.
        jobs: cells trained side by side, at least 1; it changes no number of the result.
        budget: minutes the study should take at most, about; None is no limit.
        device: where models live.
        protocol: the study's rules; None for the usual ones.
        configure: called with the study's context before it begins, to attach callbacks.

    Raises:
        LargebatchError: bad input, a folder of another study, a disk that is full, no run that learns.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is at least 1; got {jobs}.")
    if budget is not None and not 0 < budget < math.inf:
        raise ConfigError(f"a budget is a number of minutes above 0; got {budget}.")
    rules = protocol or Protocol()
    loaded = cached_task(task, data)
    microbatch_for(loaded.recipe.reference_batch, rules, loaded)  # a batch of 1 is refused at once
    with blame(task):
        identity = identity_of(
            "study", task, loaded, seed=seed, budget_minutes=budget, device=device, protocol=asdict(rules)
        )
    with locked(out):
        claim_folder(out, identity)
        launcher = Launcher(task=task, data=data, out=out, jobs=jobs, device=device)
        context = Context(task=loaded, out=out, seed=seed, protocol=rules, launcher=launcher)
        if configure is not None:
            configure(context)
        result = _phases(context, budget)
        write_json(out / "result.json", result.to_json())
    return result


def _phases(context: Context, budget: float | None) -> StudyResult:
    task, protocol = context.task, context.protocol
    recipe = task.recipe
    reference = recipe.reference_batch
    warn_of_batch_norm(context)
    set_goals(context)
    context.on_phase("tune", f"learning-rate search at batch {reference}")
    reference_search, tuned_lr, reference_steps = tune_reference(context)
    if budget is not None:
        context.units_allowed = _units_allowed(context, budget)
    if reference_steps < FEW_STEPS:
        context.warn(
            f"The hardest goal takes only {reference_steps:.0f} steps at the baseline batch: a front of so few steps "
            "is coarse. State harder goals in the task, or use a smaller reference batch."
        )
    context.on_phase("measure", f"batch {reference}, learning rate {tuned_lr:.3g}, the monitor on")
    prediction = measure(context, tuned_lr, reference_steps)
    fronts = _verify(context, prediction, reference_search, tuned_lr, reference_steps)
    b_simple = prediction.b_simple.value if prediction.resolved else None
    if b_simple is None:
        context.warn(f"The noise scale is not resolved ({prediction.reason}), so no learning rate was taken from it.")
    recommendation = recommend(context, fronts, prediction)
    context.on_phase(
        "train large",
        f"full runs at {reference}, {recommendation.batch} and beyond, {protocol.num_large_seeds} seeds each",
    )
    eps_max = None if b_simple is None else eps_max_from(tuned_lr, b_simple, reference)
    large = train_large(context, recommendation.batch, None if eps_max is None else NoiseRule(eps_max, b_simple or 0.0))
    result = StudyResult(
        task=task.name, unit=task.unit, seed=context.seed, num_units=context.num_units,
        reference={"batch": reference, "lr": recipe.reference_lr, **asdict(recipe)},
        tuned_lr=tuned_lr, goals=context.goals,
        protocol={**asdict(protocol), "definitions": DEFINITIONS}, windows=prediction.windows,
        b_simple=prediction.b_simple, b_simple_resolved=prediction.resolved, b_simple_reason=prediction.reason,
        num_measured_runs=prediction.num_runs,
        eps_max=eps_max,
        predictions=prediction.goals, fronts=tuple(fronts), large=large, winner=winner(large, eps_max is not None),
        recommendation=recommendation, warnings=tuple(context.warnings),
    )  # fmt: skip
    return summarise(context, result)


DEFINITIONS = {
    "b_simple": "tr(Sigma) / |G|^2 (McCandlish 2018, eq. 2.9), ratio of mean moments, empirical gradient",
    "b_crit": "E_min / S_min of the hyperbola S = S_min (1 + B_crit / B) (McCandlish 2018, eq. 2.11, 2.12)",
    "goal": "training loss on a fixed subset, first crossing, interpolated in log loss",
    "steps": "optimizer steps at a constant learning rate, searched at every batch and goal",
    "error": "median of the last 5 epochs' held-out error (Goyal 2017, sec. 5.1)",
}


def _verify(
    context: Context, prediction: Prediction, reference_search: Search, tuned_lr: float, reference_steps: float
) -> list[GoalFront]:
    """Sweep batch sizes around the prediction, add more where a side is missing, and fit every goal's front."""
    protocol, reference = context.protocol, context.task.recipe.reference_batch
    hardest = prediction.goals[-1]
    b_crit = _positive(hardest.b_crit.value) or float(2 * reference)
    b_simple = _positive(prediction.b_simple.value) or b_crit
    eps_max = eps_max_from(tuned_lr, b_simple, reference)
    # The reference batch has been searched already; it costs its fresh seeds only.
    wanted = sorted({*batch_grid(b_crit, context.num_units, protocol), reference})
    swept: dict[int, Search] = {}
    allowance: dict[int, int] = {}
    num_seeds = protocol.num_seeds
    while True:
        allowance |= {
            batch: math.ceil(protocol.step_allowance * reference_steps * max(1.0, reference / batch)) + 1
            for batch in wanted
        }
        starts = {batch: noise_scale_lr(eps_max, b_simple, batch) for batch in wanted if batch != reference}
        if starts:
            context.on_phase("verify", f"learning-rate search at batch {', '.join(map(str, starts))}")
            swept |= search_lrs(context, starts, allowance)
        if reference in wanted:
            swept[reference] = reference_search
        swept = dict(sorted(swept.items()))
        context.on_phase("confirm", f"{num_seeds} fresh seeds at each chosen learning rate")
        fronts = [
            fit_front(points, goal, b_simple=predicted.b_simple)
            for points, goal, predicted in zip(
                confirm(context, swept, allowance, num_seeds), context.goals, prediction.goals, strict=True
            )
        ]
        if context.units_allowed is not None and context.spent_units() > context.units_allowed / 2:
            context.warn("The budget ended the sweep: no more batch sizes or seeds were added.")
            return fronts
        wanted = more_batches(list(swept), fronts[-1].b_crit.value, context.num_units, protocol)
        if not wanted:
            if num_seeds >= protocol.max_seeds or not any(
                is_wide(front.b_crit, protocol.wide_ratio) for front in fronts
            ):
                return fronts
            num_seeds += 2


def warn_of_batch_norm(context: Context) -> None:
    """A batch-norm layer makes the microbatch part of the loss (Goyal 2017, sec. 2.3): say so."""
    with torch.random.fork_rng(devices=[]):
        model = context.task.model()
    if any(isinstance(module, BatchNorm) for module in model.modules()):
        context.warn(
            "The model has batch-norm layers, whose loss depends on how many examples share a forward: the measured "
            "run's microbatches and other batch sizes train slightly different losses. A study trains at no fixed "
            "n yet; largebatch.batchnorm_over fixes it in a loop of your own."
        )


def _positive(value: float | None) -> float | None:
    """The value where a learning rate can be made of it: an unresolved noise scale can be negative."""
    return value if value is not None and value > 0 else None


def _units_allowed(context: Context, budget: float) -> float:
    """Units that fit into the budget at the reference batch's speed, fixed once and kept: a resume agrees."""
    path = context.out / "budget.json"
    if not path.exists():
        record = next(iter(context.launcher.finished.values()))
        seconds = float(read_json(context.launcher.folder(record.spec) / "timing.json")["seconds"])
        write_json(path, {"units": budget * 60 * record.units / seconds * context.launcher.jobs})
    return float(read_json(path)["units"])
