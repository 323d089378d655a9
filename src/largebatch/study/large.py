"""Does a large batch, trained by Goyal's rules and nothing else, lose accuracy?

Full runs at the recommended batch, at several times the reference batch and past the elbow, beside the baseline:
same number of epochs, learning rate from a rule, nothing tuned (Goyal 2017, sec. 2 and 5).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from largebatch.errors import DivergedError
from largebatch.recipe.resolved import ResolvedRecipe
from largebatch.recipe.scaling import noise_scale_lr
from largebatch.records.schema import Interval, LargeRun, RunRecord, RunSpec
from largebatch.study.context import Context

LAST_EPOCHS = 5
"""A run's error is the median of this many last epochs' (Goyal 2017, sec. 5.1)."""
RULES_DIFFER = 0.1
"""Relative difference between the two rules' learning rates from which on both are trained."""

Choice = tuple[int, str, str]
"""(batch, rule, role)."""


@dataclass(frozen=True, slots=True)
class NoiseRule:
    """eps(B) = eps_max / (1 + B_simple / B), through the tuned rate (McCandlish 2018, eq. 2.6)."""

    eps_max: float
    b_simple: float

    def lr_at(self, batch: int) -> float:
        """Learning rate at `batch`."""
        return noise_scale_lr(self.eps_max, self.b_simple, batch)


def resolve(context: Context, batch: int, rule: str, noise: NoiseRule | None) -> ResolvedRecipe:
    """The recipe at `batch` by one of the two rules."""
    recipe = context.task.recipe
    if rule != "noise":
        return recipe.resolve(batch, context.num_units)
    assert noise is not None
    return recipe.resolve(
        batch, context.num_units, lr=noise.lr_at(batch),
        rule=f"eps_max / (1 + B_simple / B), eps_max {noise.eps_max:.4g} from the tuned rate, B_simple "
        f"{noise.b_simple:.4g} (McCandlish 2018, eq. 2.6)",
    )  # fmt: skip


def train_large(context: Context, recommended: int, noise: NoiseRule | None) -> tuple[LargeRun, ...]:
    """Train the baseline, the recommended batch, a fixed multiple and a batch that visibly fails.

    Args:
        recommended: the recommended batch.
        noise: the second learning-rate rule; None leaves it out.

    Returns:
        One LargeRun per (batch, rule), the baseline first, then by batch.
    """
    protocol, reference = context.protocol, context.task.recipe.reference_batch
    limit = context.num_units // 2
    choices: list[Choice] = [(reference, "baseline", "baseline")]
    if recommended > reference:
        choices.append((recommended, "linear", "recommended"))
    large = min(protocol.large_factor * reference, limit)
    if large not in (recommended, reference):
        choices.append((large, "linear", "large"))
    choices += [
        (batch, "noise", role)
        for batch, _, role in choices[1:]
        if noise is not None and abs(noise.lr_at(batch) / resolve(context, batch, "linear", None).lr - 1) > RULES_DIFFER
    ]
    if context.units_allowed is not None:
        choices = _within_budget(context, choices)
    runs = _train(context, choices, noise)
    if not _errors(runs[reference, "baseline"]):
        raise DivergedError(
            f"every full run at the baseline (batch {reference}, learning rate {context.task.recipe.reference_lr:g}) "
            "diverged. Lower reference_lr in the task's recipe."
        )
    roles = {(batch, rule): role for batch, rule, role in choices}
    elbow = protocol.elbow_factor * reference
    while elbow <= limit and not _over_budget(context):
        rules = ("linear", "noise") if noise is not None else ("linear",)
        runs |= _train(context, [(elbow, rule, "large") for rule in rules], noise)
        if visibly_fails(runs[elbow, "linear"], runs[reference, "baseline"], protocol.fail_points):
            roles |= {(elbow, rule): "past the elbow" for rule in rules}
            break
        elbow *= 2
    else:
        tried = max(batch for batch, rule in runs if rule in ("linear", "baseline"))
        context.warn(
            f"No batch visibly failed by the linear rule; the largest one trained was {tried} (half the training data, "
            f"{limit}, or the budget ended the search)."
        )
    summaries = [_summary(context, key, runs, roles.get(key, "large"), noise) for key in runs]
    return tuple(sorted(summaries, key=lambda run: (run.rule != "baseline", run.batch, run.rule)))


def visibly_fails(records: Sequence[RunRecord], baseline: Sequence[RunRecord], points: float) -> bool:
    """Whether at least half of the seeds diverged or ended more than `points` above the baseline's mean error."""
    limit = statistics.fmean(_errors(baseline)) + points
    failed = [record for record in records if (error := error_of(record)) is None or error > limit]
    return 2 * len(failed) >= len(records)


def winner(runs: Sequence[LargeRun], noise_resolved: bool) -> str:
    """One sentence: which learning-rate rule did better, at every batch where both were trained."""
    parts: list[str] = []
    for linear in runs:
        noise = next((run for run in runs if run.batch == linear.batch and run.rule == "noise"), None)
        if linear.rule != "linear" or noise is None:
            continue
        gap = welch(_finite(noise), _finite(linear))
        at = f"at batch {linear.batch}"
        if linear.mean is None or noise.mean is None:
            ended = [name for name, run in (("linear", linear), ("noise-scale", noise)) if run.mean is None]
            parts.append(f"{at} the {' and the '.join(ended)} rule diverged")
        elif gap.value is None or gap.low is None or gap.high is None:
            parts.append(f"{at} there are too few seeds to compare")
        elif gap.low <= 0 <= gap.high:
            parts.append(f"{at} they cannot be told apart ({gap.value:+.2f} points, {gap.low:+.2f} to {gap.high:+.2f})")
        else:
            better, sign = ("linear", 1) if gap.low > 0 else ("noise-scale", -1)
            ends = sorted((sign * gap.low, sign * gap.high))
            parts.append(
                f"{at} the {better} rule won by {sign * gap.value:.2f} points ({ends[0]:.2f} to {ends[1]:.2f})"
            )
    if not noise_resolved:
        return "The noise scale was not resolved, so only the linear rule was trained."
    if not parts:
        return "No batch was trained by both rules: their learning rates lay within 10 %, or the budget left one out."
    return "Linear rule against noise-scale rule: " + "; ".join(parts) + "."


def welch(first: Sequence[float], second: Sequence[float], least_std: float = 0.0) -> Interval:
    """First mean minus second, with Welch's 95 % interval; unbounded when a side has fewer than 2 values.

    No standard deviation is taken to be below `least_std`.
    """
    if not first or not second:
        return Interval(value=None)
    value = statistics.fmean(first) - statistics.fmean(second)
    if len(first) < 2 or len(second) < 2:
        return Interval(value=value)
    terms = [max(statistics.variance(side), least_std**2) / len(side) for side in (first, second)]
    total = sum(terms)
    if total == 0:
        return Interval(value=value, low=value, high=value)
    freedom = total**2 / sum(term**2 / (len(side) - 1) for term, side in zip(terms, (first, second), strict=True))
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(total)
    return Interval(value=value, low=value - half, high=value + half)


def _specs(context: Context, batch: int, rule: str, noise: NoiseRule | None) -> list[RunSpec]:
    resolved = resolve(context, batch, rule, noise)
    role = f"large-{rule}"
    return [
        context.spec(
            role, batch, resolved.lr, number, schedule="goyal", max_steps=resolved.num_steps, evaluate_epochs=True
        )
        for number in range(_num_seeds(context))
    ]


def _train(
    context: Context, choices: Sequence[Choice], noise: NoiseRule | None
) -> dict[tuple[int, str], list[RunRecord]]:
    specs = {(batch, rule): _specs(context, batch, rule, noise) for batch, rule, _ in choices}
    records = iter(context.run([spec for group in specs.values() for spec in group]))
    return {key: [next(records) for _ in group] for key, group in specs.items()}


def error_of(record: RunRecord) -> float | None:
    """Median of the last epochs' held-out error, in percent; None when the run diverged."""
    if record.status == "diverged" or not record.epochs:
        return None
    return 100 * statistics.median(row["error"] for row in record.epochs[-LAST_EPOCHS:])


def _errors(records: Sequence[RunRecord]) -> list[float]:
    return [error for record in records if (error := error_of(record)) is not None]


def _finite(run: LargeRun) -> list[float]:
    return [error for error in run.errors if error is not None]


def _summary(
    context: Context, key: tuple[int, str], runs: dict[tuple[int, str], list[RunRecord]], role: str,
    noise: NoiseRule | None,
) -> LargeRun:  # fmt: skip
    (batch, rule), records = key, runs[key]
    resolved = resolve(context, batch, rule, noise)
    errors = [error_of(record) for record in records]
    finite = [error for error in errors if error is not None]
    baseline = _errors(runs[context.task.recipe.reference_batch, "baseline"])
    diverged = len(finite) < len(errors)
    # One held-out example is the grain of an error; equal seeds do not mean that there is no spread.
    grain = 100 / len(context.task.held_out) / math.sqrt(12)
    difference = Interval(value=None) if diverged else welch(finite, baseline, grain)
    verdict = "baseline" if rule == "baseline" else _verdict(difference, diverged, context.protocol.match_points)
    return LargeRun(
        batch=batch, rule=rule, role=role,
        lr=resolved.lr, errors=tuple(errors),
        mean=None if diverged else statistics.fmean(finite),
        std=None if diverged or len(finite) < 2 else statistics.stdev(finite),
        difference=difference if rule != "baseline" else Interval(value=0.0, low=0.0, high=0.0),
        verdict=verdict,
        recipe=resolved.numbers,
        curves=tuple(record.epochs for record in records),
    )  # fmt: skip


def _verdict(difference: Interval, diverged: bool, match_points: float) -> str:
    if diverged:
        return "diverged"
    if difference.high is not None and difference.high < match_points:
        return "matches"
    if difference.low is not None and difference.low > 0:
        return "worse"
    return "unresolved"


def _num_seeds(context: Context) -> int:
    return context.protocol.num_large_seeds if context.units_allowed is None else 3


def _over_budget(context: Context) -> bool:
    return context.units_allowed is not None and context.spent_units() > context.units_allowed


def _within_budget(context: Context, choices: list[Choice]) -> list[Choice]:
    """Leave out full runs, the second rule first, until the rest fits what is left of the budget."""
    assert context.units_allowed is not None
    cost = context.task.recipe.epochs * context.num_units * _num_seeds(context)
    room = max(2, int((context.units_allowed - context.spent_units()) / cost))
    if room < len(choices):
        kept = choices[:room]
        left_out = ", ".join(f"{batch} by the {rule} rule" for batch, rule, _ in choices[room:])
        context.warn(f"The budget left out the full runs at {left_out}.")
        return kept
    return choices
