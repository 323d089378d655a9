"""What does it all come to: which batch, at which learning rate, and in one paragraph why?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from largebatch.records.schema import GoalFront, Interval, LargeRun, Recommendation, StudyResult
from largebatch.study.context import Context
from largebatch.study.frontier import largest_worthwhile_batch, round_down_batch, steps_at, units_at
from largebatch.study.measure import Prediction


def recommend(context: Context, fronts: Sequence[GoalFront], prediction: Prediction) -> Recommendation:
    """The largest batch whose units to the hardest goal stay within the allowance of the baseline's.

    The fitted front decides where it is resolved, else the prediction from the noise scale, else the baseline stays.
    """
    recipe, extra = context.task.recipe, context.protocol.extra_units
    reference = recipe.reference_batch
    hardest = len(context.goals) - 1
    front = fronts[hardest] if fronts else None
    forecast = prediction.goals[hardest]
    if front is not None and front.resolved:
        source, fit = "front", front
    elif forecast.resolved:
        source, fit = "noise", forecast
    else:
        why = front.reason if front is not None else forecast.reason
        return Recommendation(
            batch=reference, lr=recipe.reference_lr, source="baseline", extra_units=0.0, fewer_steps=1.0,
            reason=f"Neither the front nor the noise scale was resolved ({why}), so the baseline batch stays.",
        )  # fmt: skip
    b_crit, steps, units = fit.b_crit.value, fit.min_steps.value, fit.min_units.value
    assert b_crit is not None and steps is not None and units is not None
    if source == "noise" and front is not None and _contradicts(front.b_crit, forecast.b_crit):
        bound, predicted = (_worded(interval, context.task.unit) for interval in (front.b_crit, forecast.b_crit))
        context.warn(
            f"The sweep bounds B_crit at {bound}, outside what the noise scale predicted, {predicted}: trust the "
            "bound, and take the recommended batch for one end of a range."
        )
    exact = min(largest_worthwhile_batch(b_crit, reference, extra), context.num_units / 2)
    batch = max(reference, round_down_batch(exact, reference))
    return Recommendation(
        batch=batch,
        lr=recipe.resolve(batch, context.num_units).lr,
        source=source,
        reason=(
            f"The largest power-of-two multiple of the reference batch {reference} within {exact:.0f}, "
            + (
                "half the training data "
                if exact == context.num_units / 2
                else f"where the {context.task.unit} to the hardest goal reach {percent(extra)} over the baseline's "
            )
            + f"({'fitted front' if source == 'front' else 'noise-scale prediction'}, B_crit {b_crit:.4g})."
        ),
        extra_units=units_at(steps, units, batch) / units_at(steps, units, reference) - 1,
        fewer_steps=steps_at(steps, units, batch) / steps_at(steps, units, reference),
    )


def summarise(context: Context, result: StudyResult) -> StudyResult:
    """Write the summary: what to do, what was measured, what was predicted, what large batches did."""
    unit, recommendation = result.unit, result.recommendation
    reference = int(result.reference["batch"])
    front, forecast = result.fronts[-1], result.predictions[-1]
    at_best = next((run for run in result.large if run.batch == recommendation.batch and run.rule == "linear"), None)
    if recommendation.batch > reference and at_best is not None and at_best.verdict in ("worse", "diverged"):
        first = (
            f"Do not train {result.task} at batch {recommendation.batch} by the linear rule yet: the front allows it, "
            f"but its full runs are {at_best.verdict if at_best.verdict == 'worse' else 'diverging'}, so tune the "
            f"learning rate there first or stay at {reference}."
        )
    elif recommendation.batch > reference:
        basis = "" if recommendation.source == "front" else " (predicted from the noise scale alone)"
        first = (
            f"Train {result.task} at batch {recommendation.batch} instead of {reference}: "
            f"{1 / recommendation.fewer_steps:.1f} times fewer steps to the same loss for "
            f"{percent(recommendation.extra_units)} more {unit}{basis}."
        )
    elif recommendation.source == "baseline":
        first = f"Keep {result.task} at batch {reference}: {recommendation.reason}"
    else:
        first = (
            f"Keep {result.task} at batch {reference}: twice that batch would cost more than "
            f"{percent(context.protocol.extra_units)} extra {unit}."
        )
    goal = f"training loss {result.goals[-1]:.3g}"
    crit = _worded(front.b_crit, unit) if front.resolved else f"not resolved ({front.reason.rstrip('.')})"
    noise = _worded(forecast.b_crit, unit) if forecast.resolved else f"nothing resolved ({forecast.reason.rstrip('.')})"
    sentences = [
        first,
        f"The critical batch size at the hardest goal ({goal}) is {crit};",
        f"{'one run' if result.num_measured_runs == 1 else f'{result.num_measured_runs} runs'} had predicted {noise}.",
        *_large_sentences(result.large, recommendation.batch, reference),
    ]
    return replace(result, summary=" ".join(sentences))


def _contradicts(bound: Interval, forecast: Interval) -> bool:
    """Whether a one-sided bound lies wholly beyond the predicted interval."""
    above = bound.low is not None and forecast.high is not None and bound.low > forecast.high
    return above or (bound.high is not None and forecast.low is not None and bound.high < forecast.low)


def percent(fraction: float) -> str:
    """A fraction in whole percent.

    >>> percent(0.2)
    '20 %'
    """
    return f"{100 * fraction:.0f} %"


def _worded(interval: Interval, unit: str) -> str:
    if interval.value is None:
        low = f"at least {interval.low:.3g}" if interval.low is not None else None
        high = f"at most {interval.high:.3g}" if interval.high is not None else None
        return f"{' and '.join(filter(None, (low, high))) or 'unknown'} {unit}"
    ends = f"{_end(interval.low)} to {_end(interval.high)}"
    return f"{interval.value:.3g} {unit} (95 % interval {ends})"


def _end(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.3g}"


def _large_sentences(large: Sequence[LargeRun], recommended: int, reference: int) -> list[str]:
    baseline = next(run for run in large if run.rule == "baseline")
    at_best = next((run for run in large if run.batch == recommended and run.rule == "linear"), None)
    sentences: list[str] = []
    if at_best is not None and at_best.mean is not None and baseline.mean is not None:
        gap = at_best.difference
        sentences.append(
            f"Trained by the linear rule at {recommended} the held-out error is {at_best.mean:.2f} % against "
            f"{baseline.mean:.2f} % at {reference} "
            f"(difference {gap.value:+.2f} points, {gap.low:+.2f} to {gap.high:+.2f})."
        )
    elif at_best is not None and at_best.verdict == "diverged":
        sentences.append(f"Trained by the linear rule at {recommended} it diverged.")
    failed = next((run for run in large if run.rule == "linear" and run.role == "past the elbow"), None)
    if failed is not None:
        errors = sorted(error for error in failed.errors if error is not None)
        diverged = len(failed.errors) - len(errors)
        how = [f"{diverged} of {len(failed.errors)} seeds diverge"] if diverged else []
        how += [f"the errors are {errors[0]:.1f} to {errors[-1]:.1f} %"] if errors else []
        sentences.append(f"At {failed.batch} the linear rule fails: {' and '.join(how)}.")
    return sentences
