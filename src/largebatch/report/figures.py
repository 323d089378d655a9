"""Which pictures does a study's result give? Noise over training, the front, and the learning rate."""

from __future__ import annotations

import math

import numpy as np

from largebatch.records.schema import FrontierPoint, GoalFront, StudyResult
from largebatch.report.description import Axis, Band, Figure, Note, Symbol, Trace, log_axis, tick_label
from largebatch.report.training_figures import curves_figure, error_figure
from largebatch.report.words import NO_REASON, Part, counted, finite, number, say

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


def noise_figure(result: StudyResult) -> Figure:
    """The gradient noise scale over the measured run, with its interval and the level of B_crit."""
    windows, unit = result.windows, result.unit
    middle = [(window.first_step + window.last_step) / 2 for window in windows]
    known = [window.b_simple.value if window.resolved else None for window in windows]
    front = result.fronts[-1]
    level = finite(front.b_crit.value) if front.resolved else finite(front.b_crit.low)
    bounds = [bound for window in windows for bound in (window.b_simple.low, window.b_simple.high)]
    y = log_axis(f"Gradient noise scale B_simple ({unit})", [*known, *bounds, level], pad=1.4)
    low = [
        None if value is None else window.b_simple.low or y.low for window, value in zip(windows, known, strict=True)
    ]
    high = [
        None if value is None else window.b_simple.high or y.high for window, value in zip(windows, known, strict=True)
    ]
    last_step = max((window.last_step for window in windows), default=1)
    x = Axis(title="Optimizer step", log=False, low=0, high=float(last_step) * 1.01)
    hover = tuple(
        f"steps {window.first_step:,} to {window.last_step:,}, loss {number(window.loss)}<br>B_simple "
        f"{say(window.b_simple, resolved=window.resolved)}"
        for window in windows
    )
    traces = [
        Trace(
            name=f"B_simple, measured at batch {result.reference.get('batch', '')}",
            x=tuple(middle),
            y=tuple(known),
            colour="accent",
            line=True,
            symbol="circle",
            size=6,
            hover=hover,
        )
    ]
    lost = [index for index, value in enumerate(known) if value is None]
    bounded = [index for index in lost if (windows[index].b_simple.low or 0) > 0]
    unknown = [index for index in lost if index not in bounded]
    marks: tuple[tuple[str, list[int], Symbol], ...] = (
        ("at least this much", bounded, "above"),
        ("window not resolved", unknown, "x"),
    )
    for name, indices, symbol in marks:
        if indices:
            traces.append(
                Trace(
                    name=name,
                    x=tuple(middle[index] for index in indices),
                    y=tuple((windows[index].b_simple.low if symbol == "above" else y.low * 1.08) for index in indices),
                    colour="danger",
                    symbol=symbol,
                    filled=False,
                    size=10,
                    hover=tuple(hover[index] for index in indices),
                )
            )
    bands = [Band(x=tuple(middle), low=tuple(low), high=tuple(high), colour="accent@0.16", name="95 % interval")]
    notes = []
    if level is not None:
        said = say(front.b_crit, resolved=front.resolved, reason=front.reason)
        label = f"B_crit {said.plain_headline} (loss {number(front.goal)})"
        traces.append(
            Trace(
                name="B_crit of the hardest goal",
                x=(0, x.high),
                y=(level, level),
                colour="second",
                line=True,
                dash="dash",
            )
        )
        notes.append(Note(x=0, y=level, text=label, colour="second"))
        if front.resolved and front.b_crit.low and front.b_crit.high:
            low_high = ((front.b_crit.low,) * 2, (front.b_crit.high,) * 2)
            bands.append(Band(x=(0, x.high), low=low_high[0], high=low_high[1], colour="second@0.10"))
    return Figure(
        name="noise",
        title="Noise scale over training",
        caption=_noise_caption(known, unit),
        alt="Line chart of the gradient noise scale against the optimizer step, with its 95 % interval.",
        x=x,
        y=y,
        traces=tuple(traces),
        bands=tuple(bands),
        notes=tuple(notes),
    )


def _noise_caption(known: list[float | None], unit: str) -> tuple[Part, ...]:
    values = [value for value in known if value is not None]
    if len(values) < 2:
        return (Part(f"The noise scale is not resolved over the measured run: {NO_REASON}."),)
    ratio = values[-1] / values[0]
    ends = (counted(values[0]), Part(" to "), counted(values[-1]))
    if ratio > 1.5:
        end = f" {unit} as the loss falls: the later in training, the larger the batch that pays."
        return (Part("The noise scale grows from "), *ends, Part(end))
    if ratio < 1 / 1.5:
        return (Part("The noise scale falls from "), *ends, Part(f" {unit} over the measured run."))
    return (
        Part("The noise scale stays between "),
        counted(min(values)),
        Part(" and "),
        counted(max(values)),
        Part(f" {unit}."),
    )


def front_figure(result: StudyResult) -> Figure:
    """The steps-examples front of every goal, with the fitted hyperbola and the two batches that matter."""
    traces: list[Trace] = []
    crossing: list[tuple[float, float]] = []
    for index, front in enumerate(result.fronts):
        traces += _front_traces(front, index, len(result.fronts), result.unit, crossing)
    shown = [trace for trace in traces if trace.symbol is not None]
    points = [(x, y) for trace in shown for x, y in zip(trace.x, trace.y, strict=True)]
    x = log_axis("Optimizer steps to the goal", [point[0] for point in points], pad=1.5)
    y = log_axis(f"{result.unit.capitalize()} to the goal", [point[1] for point in points], pad=1.5)
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
    notes = []
    marked = {result.reference.get("batch"): "baseline", result.recommendation.batch: "recommended"}
    for batch, label in marked.items():
        if isinstance(batch, int) and (ends := _ray(batch, x, y)):
            colour = "accent" if label == "recommended" else "muted"
            xs, ys = tuple(end[0] for end in ends), tuple(end[1] for end in ends)
            dash = "dash" if label == "recommended" else "dot"
            traces.append(
                Trace(
                    name=f"batch {batch:,} ({label})",
                    x=xs,
                    y=ys,
                    colour=f"{colour}@0.8",
                    line=True,
                    dash=dash,
                    width=1.5,
                )
            )
            upper = batch == max(mark for mark in marked if isinstance(mark, int))
            at = xs[1] / (1.3 if upper else 2.6)
            anchor = "right" if upper else "left"
            words = f"B = {batch:,} "
            notes.append(Note(x=at, y=at * batch, text=words, colour=colour, anchor=anchor, below=not upper))
    baseline, recommended = result.reference.get("batch"), result.recommendation.batch
    caption = (
        Part("Each point is one run at one batch; moving along a curve trades "),
        Part(f"{result.unit} for steps, and going from batch "),
        *((counted(baseline),) if isinstance(baseline, int) else (Part("the baseline"),)),
        Part(" to "),
        counted(recommended),
        Part(" takes the steps before the curve turns flat." if recommended != baseline else " gains nothing."),
    )
    return Figure(
        name="front",
        title=f"Steps against {result.unit}",
        caption=caption,
        alt=f"Log-log chart of {result.unit} against optimizer steps to each goal, with one fitted hyperbola a goal.",
        x=x,
        y=y,
        traces=tuple(traces),
        notes=tuple(notes),
    )


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
    front: GoalFront, index: int, count: int, unit: str, crossing: list[tuple[float, float]]
) -> list[Trace]:
    colour, symbol, name = goal_colour(index, count), GOAL_SYMBOLS[index % 4], f"loss {number(front.goal)}"
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
        grid = tuple(float(b) for b in np.geomspace(min(batches) / 1.4, max(batches) * 1.4, 80))
        steps, units = hyperbola(front, grid)
        traces.append(
            Trace(name=f"{name} fit", x=steps, y=units, colour=colour, line=True, width=2, legend=False, group=name)
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


def lr_figure(result: StudyResult) -> Figure:
    """The learning rate that was best at each batch, beside the two rules that predict it."""
    points = result.fronts[-1].points
    reference = result.reference.get("batch")
    batches = sorted({point.batch for point in points} | {result.recommendation.batch})
    wide = (min(batches) / 1.3, max(batches) * 1.3)
    grid = tuple(float(batch) for batch in np.geomspace(*wide, 80))
    traces: list[Trace] = []
    search = [(point.batch, *trial) for point in points for trial in point.search]
    outcomes: tuple[tuple[str, bool, Symbol], ...] = (
        ("tried, reached the goal", True, "circle"),
        ("tried, did not", False, "x"),
    )
    for name, wanted, symbol in outcomes:
        tried = [trial for trial in search if (trial[2] is not None) == wanted]
        if tried:
            traces.append(
                Trace(
                    name=name,
                    x=tuple(trial[0] for trial in tried),
                    y=tuple(trial[1] for trial in tried),
                    colour="muted@0.55",
                    symbol=symbol,
                    size=6,
                    hover=tuple(_trial_words(*trial) for trial in tried),
                )
            )
    if isinstance(reference, int) and math.isfinite(result.tuned_lr):
        linear = tuple(result.tuned_lr * batch / reference for batch in grid)
        traces.append(Trace(name="linear rule", x=grid, y=linear, colour="second", line=True, dash="dash"))
    b_simple, eps_max = finite(result.b_simple.value), finite(result.eps_max)
    caption: tuple[Part, ...] = (Part("The prediction is not drawn because the noise scale is not resolved."),)
    if b_simple is not None and eps_max is not None:
        curve = tuple(eps_max / (1 + b_simple / batch) for batch in grid)
        caption = (
            Part("The best rate first grows with the batch, then flattens towards "),
            counted(eps_max),
            Part(" once the batch passes the noise scale; the linear rule keeps climbing."),
        )
        traces.append(Trace(name="predicted eps_max / (1 + B_simple/B)", x=grid, y=curve, colour="accent", line=True))
    traces.append(
        Trace(
            name="fastest to the hardest goal",
            x=tuple(point.batch for point in points),
            y=tuple(point.lr for point in points),
            colour="ink",
            symbol="circle",
            size=10,
            hover=tuple(f"batch {point.batch:,}: lr {number(point.lr)} was fastest" for point in points),
        )
    )
    chosen = result.recommendation
    traces.append(
        Trace(
            name="recommended",
            x=(chosen.batch,),
            y=(chosen.lr,),
            colour="accent",
            symbol="star",
            size=17,
            hover=(f"recommended: batch {chosen.batch:,}, lr {number(chosen.lr)}",),
        )
    )
    # The rules may leave the picture; what was tried may not.
    shown = [value for trace in traces if not trace.line for value in trace.y]
    return Figure(
        name="learning_rate",
        title="Learning rate against batch",
        caption=caption,
        alt="Log-log chart of the learning rate against the batch: linear rule, predicted curve and what was tried.",
        x=log_axis(f"Batch ({result.unit})", wide, pad=1.0, ticks=[float(batch) for batch in batches]),
        y=log_axis("Learning rate", shown, pad=1.6),
        traces=tuple(traces),
    )


def _trial_words(batch: int, lr: float, steps: float | None, taken: float) -> str:
    end = f"stopped after {number(float(taken))} steps" if steps is None else f"{number(float(steps))} steps"
    return f"batch {tick_label(batch)}, lr {number(lr)}: {end}"
