"""Which pictures does a study's result give? All of them, and the steps-examples front of every goal."""

from __future__ import annotations

import numpy as np

from largebatch.records.schema import FrontierPoint, GoalFront, StudyResult
from largebatch.report.description import Axis, Dash, Figure, Note, Symbol, Trace, log_axis
from largebatch.report.noise_figure import noise_figure
from largebatch.report.rate_figure import lr_figure
from largebatch.report.training_figures import curves_figure, error_figure
from largebatch.report.words import Part, number

GOAL_SYMBOLS: tuple[Symbol, ...] = ("circle", "square", "triangle", "pentagon")


def study_figures(result: StudyResult) -> tuple[Figure, ...]:
    """Describe every picture of the report, in the page's order.

    Args:
        result: The study's typed result.
    Returns:
        Noise scale, front, learning rate, training curves, error against batch; the last two only
        where full runs were made.
    """
    training = (curves_figure(result), error_figure(result)) if result.large else ()
    return (noise_figure(result), front_figure(result), lr_figure(result), *training)


def front_figure(result: StudyResult) -> Figure:
    """The steps-examples front of every goal, with the fitted hyperbola and the two batches that matter."""
    traces: list[Trace] = []
    crossing: list[tuple[float, float]] = []
    baseline, recommended = result.reference.get("batch"), result.recommendation.batch
    wanted = (recommended, baseline) if isinstance(baseline, int) else (recommended,)
    for index, front in enumerate(result.fronts):
        traces += _front_traces(front, index, result, wanted, crossing)
    points = [(x, y) for trace in traces for x, y in zip(trace.x, trace.y, strict=True)]
    x = log_axis("Optimizer steps to the goal", [point[0] for point in points], pad=1.25)
    y = log_axis(f"{result.unit.capitalize()} to the goal", [point[1] for point in points], pad=1.4)
    if crossing:
        traces.append(
            Trace(
                name="B_crit: twice the fewest steps, twice the fewest " + result.unit,
                x=tuple(point[0] for point in crossing),
                y=tuple(point[1] for point in crossing),
                colour="ink",
                symbol="diamond",
                size=12,
                filled=False,
                hover=tuple(f"B_crit {number(point[1] / point[0])} {result.unit}" for point in crossing),
            )
        )
    marked: dict[int, list[str]] = {}
    for batch, label in ((baseline, "baseline"), (recommended, "recommended")):
        if isinstance(batch, int):
            marked.setdefault(batch, []).append(label)
    rays, notes = [], []
    for batch, labels in marked.items():
        ray, note = _marked_batch(batch, labels, upper=batch == max(marked), x=x, y=y)
        rays += ray
        notes += note
    return Figure(
        name="front",
        title=f"Steps against {result.unit}",
        caption=_front_caption(result, fitted=bool(crossing), beyond=any("measured" in one.name for one in traces)),
        alt=f"Log-log chart of {result.unit} against optimizer steps to each goal, with one fitted hyperbola a goal.",
        x=x,
        y=y,
        traces=(*rays, *traces),
        notes=tuple(notes),
    )


def _front_caption(result: StudyResult, *, fitted: bool, beyond: bool) -> tuple[Part, ...]:
    if not any(point.steps or point.bounds for front in result.fronts for point in front.points):
        return (Part("No run reached a goal, so there is no front to draw."),)
    if not fitted:
        text = f"Each point is one run: further left is fewer steps, higher is more {result.unit}. "
        return (Part(text + "No goal's fit is resolved, so no curve is drawn."),)
    text = (
        f"Each point is one run. Along a goal's curve larger batches lie further left (fewer steps) and higher (more "
        f"{result.unit}); at B_crit (diamond) it has doubled both its fewest steps and its fewest {result.unit}."
    )
    return (Part(text + (" Dotted: the fit beyond the batches measured." if beyond else "")),)


def _marked_batch(batch: int, labels: list[str], *, upper: bool, x: Axis, y: Axis) -> tuple[list[Trace], list[Note]]:
    """The ray of one batch with its label, above the upper ray and below the lower one."""
    ends = _ray(batch, x, y)
    if ends is None:
        return [], []
    recommended = "recommended" in labels
    colour = "accent" if recommended else "muted"
    ray = Trace(
        name=f"batch {batch:,} ({', '.join(labels)})",
        x=tuple(end[0] for end in ends),
        y=tuple(end[1] for end in ends),
        colour=f"{colour}@0.8",
        line=True,
        dash="dash" if recommended else "dot",
        width=1.5,
    )
    at = ends[1][0] / (x.high / x.low) ** (0.03 if upper else 0.16)
    words = f"B = {batch:,} "
    anchor = "right" if upper else "left"
    return [ray], [Note(x=at, y=at * batch, text=words, colour=colour, anchor=anchor, below=not upper)]


def goal_colour(index: int, count: int) -> str:
    """Paler for an easier goal; the hardest has the accent in full."""
    return f"accent@{0.4 + 0.6 * (index + 1) / count:.2f}"


def hyperbola(front: GoalFront, batches: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Steps and units of the fit S = S_min + E_min/B, E = B S, at each batch. Needs a resolved front."""
    min_steps, min_units = front.min_steps.value, front.min_units.value
    assert min_steps is not None and min_units is not None
    return (
        tuple(min_steps + min_units / batch for batch in batches),
        tuple(batch * min_steps + min_units for batch in batches),
    )


def _front_traces(
    front: GoalFront, index: int, result: StudyResult, wanted: tuple[int, ...], crossing: list[tuple[float, float]]
) -> list[Trace]:
    """One goal's runs and its fit, dotted outside the batches measured where it has to reach a `wanted` batch."""
    colour, symbol = goal_colour(index, len(result.fronts)), GOAL_SYMBOLS[index % 4]
    name, unit = f"loss {number(front.goal)}", result.unit
    traces: list[Trace] = []
    batches = [point.batch for point in front.points]
    fitted = front.resolved and front.min_steps.value is not None and front.min_units.value is not None and batches
    reached = [(point, steps) for point in front.points for steps in point.steps]
    traces.append(
        Trace(
            name=name if fitted else f"{name}: fit not resolved",
            x=tuple(steps for _, steps in reached),
            y=tuple(steps * point.batch for point, steps in reached),
            colour=colour,
            symbol=symbol,
            size=8,
            group=name,
            hover=tuple(_run_words(point, steps, unit, "reached in") for point, steps in reached),
        )
    )
    if fitted:
        ends, outer = (min(batches), max(batches)), (min(*batches, *wanted) / 1.15, max(*batches, *wanted) * 1.15)
        pieces: list[tuple[str, Dash, tuple[float, float]]] = [("fit", "solid", ends)]
        if outer[0] < ends[0] / 1.2:
            pieces.append(("fit, below the batches measured", "dot", (outer[0], ends[0])))
        if outer[1] > ends[1] * 1.2:
            pieces.append(("fit, above the batches measured", "dot", (ends[1], outer[1])))
        for what, dash, (low, high) in pieces:
            steps, units = hyperbola(front, tuple(float(b) for b in np.geomspace(low, high, 80)))
            traces.append(
                Trace(
                    name=f"{name} {what}",
                    x=steps,
                    y=units,
                    colour=colour,
                    line=True,
                    dash=dash,
                    width=2.5,
                    legend=False,
                    group=name,
                )
            )
        min_steps, min_units = front.min_steps.value or 0.0, front.min_units.value or 0.0
        crossing.append((2 * min_steps, 2 * min_units))
    stopped = [(point, bound) for point in front.points for bound in point.bounds]
    if stopped:
        traces.append(
            Trace(
                name=f"{name}: stopped, needs more",
                x=tuple(bound for _, bound in stopped),
                y=tuple(bound * point.batch for point, bound in stopped),
                colour=colour,
                symbol="beyond",
                size=11,
                filled=False,
                hover=tuple(_run_words(point, bound, unit, "stopped; needs more than") for point, bound in stopped),
            )
        )
    return traces


def _run_words(point: FrontierPoint, steps: float, unit: str, verb: str) -> str:
    return (
        f"batch {point.batch:,}, lr {number(point.lr)}<br>{verb} {number(float(steps))} steps, "
        f"{number(float(steps * point.batch))} {unit}"
    )


def _ray(batch: int, x: Axis, y: Axis) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """The ends of the line E = batch * S inside the picture."""
    start, end = max(x.low, y.low / batch), min(x.high, y.high / batch)
    return ((start, start * batch), (end, end * batch)) if start < end else None
