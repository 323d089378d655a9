"""A made-up study result with everything a report must cope with: censored runs, unresolved goals, divergence."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from largebatch.records.schema import (
    FrontierPoint,
    GoalFront,
    GoalPrediction,
    Interval,
    LargeRun,
    NoiseWindow,
    Recommendation,
    ResolvedNumber,
    StudyResult,
)

BATCHES = (8, 16, 32, 64, 128, 256, 512, 1024)
GOALS = (0.6, 0.3, 0.15, 0.08)
MIN_STEPS = (9.0, 26.0, 58.0, 101.0)
MIN_UNITS = (640.0, 2900.0, 9100.0, 20800.0)
REFERENCE = {"batch": 32, "lr": 0.1, "epochs": 20, "momentum": 0.9, "nesterov": True, "warmup_epochs": 2}
B_SIMPLE = 231.4
EPS_MAX = 0.1 * (1 + B_SIMPLE / 32)
WHY_UNRESOLVED = "every batch tried was past it, so only an upper bound is known"


def around(value: float, spread: float) -> Interval:
    """An interval that is symmetric in log."""
    return Interval(value=value, low=value / (1 + spread), high=value * (1 + spread))


def eps(batch: float) -> float:
    """The predicted learning rate."""
    return EPS_MAX / (1 + B_SIMPLE / batch)


def sample_windows(rng: np.random.Generator) -> tuple[NoiseWindow, ...]:
    """Thirty windows of 20 steps; two not resolved (one with a lower bound), one without an upper bound."""
    windows = []
    for index in range(30):
        progress = (index + 0.5) / 30
        value = 26 * math.exp(2.9 * progress) * math.exp(rng.normal(0, 0.12))
        spread = 0.25 + 0.5 * progress
        interval = around(value, spread)
        if index == 17:
            interval = Interval(value=None)
        elif index == 23:
            interval = Interval(value=None, low=value / 2)
        elif index == 28:
            interval = Interval(value=value, low=value / 2.2)
        windows.append(
            NoiseWindow(
                first_step=20 * index,
                last_step=20 * index + 19,
                loss=2.3 * math.exp(-4 * progress),
                trace_cov=3.1,
                grad_sq_norm=3.1 / value,
                b_simple=interval,
                resolved=interval.value is not None,
            )
        )
    return tuple(windows)


def sample_front(index: int, rng: np.random.Generator, sigma: float = 0.08) -> GoalFront:
    """One goal's front; the easiest is not resolved, the hardest has censored seeds and one censored cell."""
    min_steps, min_units, b_crit = MIN_STEPS[index], MIN_UNITS[index], MIN_UNITS[index] / MIN_STEPS[index]
    points = []
    for batch in BATCHES:
        lr = round(eps(batch) * float(np.exp(rng.normal(0, 0.1))), 5)
        true = min_steps + min_units / batch
        steps = [true * math.exp(rng.normal(0, sigma)) for _ in range(3)]
        bounds: list[float] = []
        if index == 3 and batch == 8:
            steps, bounds = [], [0.8 * true, 0.8 * true, 0.8 * true]
        elif index >= 2 and batch == 1024:
            steps, bounds = steps[:2], [1.05 * true]
        search = (
            (lr / 2, 1.2 * true, 1.2 * true),
            (lr, true, true),
            (lr * 2, 1.35 * true, 1.35 * true) if batch < 256 else (lr * 2, None, 0.4 * true),
            (lr * 4, None, 0.5 * true),
        )
        points.append(FrontierPoint(batch=batch, lr=lr, steps=tuple(steps), bounds=tuple(bounds), search=search))
    resolved = index > 0
    interval = around(b_crit, 0.22) if resolved else Interval(value=None, high=2 * b_crit)
    return GoalFront(
        goal=GOALS[index],
        definition="E_min/S_min of the fit S = S_min + E_min/B: the batch that needs twice the fewest steps",
        min_steps=around(min_steps, 0.12) if resolved else Interval(value=None),
        min_units=around(min_units, 0.1) if resolved else Interval(value=None),
        b_crit=interval,
        resolved=resolved,
        reason="" if resolved else WHY_UNRESOLVED,
        points=tuple(points),
        residual_std=sigma if resolved else None,
        b_simple_over_b_crit=around(B_SIMPLE / b_crit, 0.3) if resolved else Interval(value=None),
    )


def sample_prediction(index: int) -> GoalPrediction:
    """What the measured run alone predicts for a goal, somewhat off the front."""
    b_crit = 1.3 * MIN_UNITS[index] / MIN_STEPS[index]
    return GoalPrediction(
        goal=GOALS[index],
        min_steps=around(0.9 * MIN_STEPS[index], 0.2),
        min_units=around(1.17 * MIN_UNITS[index], 0.2),
        b_crit=around(b_crit, 0.3) if index else Interval(value=None),
        b_simple=around(1.1 * b_crit, 0.2) if index else Interval(value=None),
        resolved=index > 0,
        reason="" if index else "the goal was crossed within the first window",
    )


def sample_recipe(batch: int, lr: float, rule: str) -> tuple[ResolvedNumber, ...]:
    """The resolved recipe of one large run."""
    goyal = "Goyal 2017"
    how = "reference lr x batch / reference batch" if rule == "linear" else "eps_max / (1 + B_simple / batch)"
    return (
        ResolvedNumber(name="batch", value=batch, rule="chosen", source="this study"),
        ResolvedNumber(name="peak_lr", value=lr, rule=how, source="McCandlish 2018, 2.6" if rule == "noise" else goyal),
        ResolvedNumber(
            name="warmup", value="2 epochs", rule="gradual: 0.1 to the peak, a step at a time", source=goyal
        ),
        ResolvedNumber(name="decay", value="0.1 at epochs 10, 15, 18", rule="counted from epoch 0", source=goyal),
        ResolvedNumber(name="epochs", value=20, rule="the same number as the baseline", source=goyal),
        ResolvedNumber(name="momentum", value=0.9, rule="unchanged; corrected when the rate changes", source=goyal),
        ResolvedNumber(name="weight_decay", value=0.0001, rule="unchanged; none on biases", source=goyal),
        ResolvedNumber(name="loss_scaling", value=f"1/{batch}", rule="the step's total, not a worker's", source=goyal),
    )


def sample_large(batch: int, rule: str, role: str, final: float, rng: np.random.Generator) -> LargeRun:
    """Five seeds of full training that end near `final` per cent, or diverge when it is nan."""
    lr = {"baseline": 0.1, "linear": 0.1 * batch / 32, "noise": round(eps(batch), 4)}[rule]
    curves, errors = [], []
    for seed in range(5):
        diverged = math.isnan(final) and (seed != 1 or rule == "linear")
        end = (9.5 if math.isnan(final) else final) + rng.normal(0, 0.15)
        curve, delay = [], 1 + math.log2(batch / 32) / 6
        for epoch in range(1, 21):
            if diverged and epoch > 3:
                break
            drop = 0.0 if epoch < 10 else 1.0
            error = end + 55 * math.exp(-epoch / (2 * delay)) + (1 - drop) * 0.9 + abs(rng.normal(0, 0.12))
            error = 90 + rng.normal(0, 0.4) if diverged else error
            curve.append({"epoch": epoch, "train_loss": error / 30, "error": error / 100, "held_out_loss": error / 28})
        curves.append(tuple(curve))
        errors.append(None if diverged else float(np.median([100 * row["error"] for row in curve[-5:]])))
    whole = [error for error in errors if error is not None]
    mean = float(np.mean(whole)) if len(whole) == 5 else None
    difference = Interval(value=None)
    if mean is not None:
        gap = mean - 3.1
        difference = Interval(value=gap, low=gap - 0.22, high=gap + 0.22)
    verdict = "diverged" if mean is None else "matches" if mean < 3.6 else "worse"
    return LargeRun(
        batch=batch,
        rule=rule,
        role=role,
        lr=lr,
        errors=tuple(errors),
        mean=mean,
        std=float(np.std(whole, ddof=1)) if mean is not None else None,
        difference=difference,
        verdict=verdict,
        recipe=sample_recipe(batch, lr, rule),
        curves=tuple(curves),
    )


def sample_study(seed: int = 0) -> StudyResult:
    """A whole synthetic study of 1,437 digits, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return StudyResult(
        task="digits",
        unit="examples",
        seed=seed,
        num_units=1437,
        reference=dict(REFERENCE),
        tuned_lr=0.1,
        goals=GOALS,
        protocol={
            "goals": "losses of the baseline run at 30, 55, 75 and 90 % of its steps, on 1,024 fixed training examples",
            "lr_search": "start at eps(B), factor 2, extended while the best is at an edge",
            "fresh_seeds": 3,
            "search_seed": 0,
            "batches": list(BATCHES),
            "evaluate_every": 0.02,
            "interval": "95 %, pooled log residuals with a small-sample correction",
        },
        windows=sample_windows(rng),
        b_simple=around(B_SIMPLE, 0.18),
        b_simple_resolved=True,
        b_simple_reason="",
        num_measured_runs=1,
        eps_max=EPS_MAX,
        predictions=tuple(sample_prediction(index) for index in range(4)),
        fronts=tuple(sample_front(index, rng) for index in range(4)),
        large=(
            sample_large(32, "baseline", "baseline", 3.1, rng),
            sample_large(64, "linear", "recommended", 3.15, rng),
            sample_large(64, "noise", "recommended", 3.2, rng),
            sample_large(256, "linear", "large", 3.35, rng),
            sample_large(256, "noise", "large", 3.9, rng),
            sample_large(1024, "linear", "past the elbow", math.nan, rng),
            sample_large(1024, "noise", "past the elbow", 6.3, rng),
        ),
        winner="At batch 256 the linear rule did better: 3.35 % against 3.90 % error.",
        recommendation=Recommendation(
            batch=64,
            lr=0.2,
            source="front",
            reason="The largest batch whose predicted extra examples stay within 20 % of the baseline's.",
            extra_units=(1 + 64 / 205.9) / (1 + 32 / 205.9) - 1,
            fewer_steps=(1 + 205.9 / 64) / (1 + 205.9 / 32),
        ),
        warnings=("At batch 1,024 the linear rule diverged for every seed.",),
        summary=(
            "A batch of 64 examples is worth it for digits: 43 % fewer steps for 13 % more examples than batch 32, "
            "and held-out error that matches the baseline's."
        ),
    )


def sample_result(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """The sample study as the JSON form of result.json, with fields replaced."""
    return dataclasses.replace(sample_study(seed), **changes).to_json()
