"""Which learning rate goes with which batch? What was tried and won, beside the rules that predict it."""

from __future__ import annotations

import math

import numpy as np

from largebatch.records.schema import StudyResult
from largebatch.report.description import Figure, Note, Symbol, Trace, log_axis, tick_label
from largebatch.report.words import Part, counted, finite, number, say


def lr_figure(result: StudyResult) -> Figure:
    """The learning rate that was best at each batch, beside the two rules that predict it.

    Args:
        result: The study's typed result.
    Returns:
        The picture; the predicted curve is left out where the noise scale is not resolved.
    """
    points = result.fronts[-1].points
    batches = sorted({point.batch for point in points} | {result.recommendation.batch} | _reference(result)[0])
    wide = (min(batches) / 1.5, max(batches) * 1.5)
    grid = tuple(float(batch) for batch in np.geomspace(*wide, 80))
    lines = [*_linear(result, grid), *_predicted(result, grid)]
    marks = _tried(result)
    if points:
        marks.append(
            Trace(
                name="fastest to the hardest goal, constant rate",
                x=tuple(point.batch for point in points),
                y=tuple(point.lr for point in points),
                colour="ink",
                symbol="circle",
                size=10,
                hover=tuple(f"batch {point.batch:,}: constant lr {number(point.lr)} was fastest" for point in points),
            )
        )
    marks += _schedules(result)
    # The rules may leave the picture; what was tried may not.
    shown = [value for trace in marks for value in trace.y]
    y = log_axis("Learning rate", shown, pad=1.6)
    return Figure(
        name="learning_rate",
        title="Learning rate against batch",
        caption=_caption(result, lines),
        alt="Log-log chart of the learning rate against the batch: what was tried, what won, and the rules.",
        x=log_axis(f"Batch ({result.unit})", wide, pad=1.0, ticks=[float(batch) for batch in batches]),
        y=y,
        traces=(*lines, *marks),
        notes=_labels(result),
    )


def _reference(result: StudyResult) -> tuple[set[int], float | None]:
    """The baseline's batch, where it is known, and its peak learning rate."""
    batch, lr = result.reference.get("batch"), result.reference.get("lr")
    rate = finite(float(lr)) if isinstance(lr, int | float) else None
    return ({batch} if isinstance(batch, int) else set()), rate


def _linear(result: StudyResult, grid: tuple[float, ...]) -> list[Trace]:
    """The linear rule from the tuned constant rate."""
    if not _reference(result)[0] or not math.isfinite(result.tuned_lr):
        return []
    (batch,) = _reference(result)[0]
    rates = tuple(result.tuned_lr * size / batch for size in grid)
    return [Trace(name="linear rule", x=grid, y=rates, colour="second", line=True, dash="dash")]


def _predicted(result: StudyResult, grid: tuple[float, ...]) -> list[Trace]:
    b_simple, eps_max = finite(result.b_simple.value), finite(result.eps_max)
    if b_simple is None or eps_max is None or not say(result.b_simple).resolved:
        return []
    rates = tuple(eps_max / (1 + b_simple / batch) for batch in grid)
    return [Trace(name="predicted eps_max / (1 + B_simple/B)", x=grid, y=rates, colour="accent", line=True)]


def _tried(result: StudyResult) -> list[Trace]:
    search = [(point.batch, *trial) for point in result.fronts[-1].points for trial in point.search]
    outcomes: tuple[tuple[str, bool, Symbol], ...] = (
        ("tried, reached the goal", True, "circle"),
        ("tried, did not", False, "x"),
    )
    traces: list[Trace] = []
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
    return traces


def _schedules(result: StudyResult) -> list[Trace]:
    """The peak rates of the full schedules: the baseline's and the recommended one."""
    batches, lr = _reference(result)
    traces: list[Trace] = []
    for batch in batches:
        if lr is not None:
            said = f"baseline's schedule: batch {batch:,}, peak lr {number(lr)}"
            traces.append(
                Trace(
                    name="baseline, peak of its schedule",
                    x=(batch,),
                    y=(lr,),
                    colour="ink",
                    symbol="diamond",
                    size=12,
                    filled=False,
                    hover=(said,),
                )
            )
    chosen = result.recommendation
    traces.append(
        Trace(
            name="recommended, peak of its schedule",
            x=(chosen.batch,),
            y=(chosen.lr,),
            colour="accent",
            symbol="star",
            size=17,
            hover=(f"recommended: batch {chosen.batch:,}, peak lr {number(chosen.lr)}",),
        )
    )
    return traces


def _labels(result: StudyResult) -> tuple[Note, ...]:
    """The two peak rates in numbers, below their marks, where no dot of a constant rate is likely."""
    chosen, (batches, lr) = result.recommendation, _reference(result)
    marks = {(batch, lr): "ink" for batch in batches if lr is not None}
    marks[chosen.batch, chosen.lr] = "accent"
    return tuple(
        Note(x=batch, y=rate / 1.09, text=number(rate), colour=colour, anchor="center", below=True)
        for (batch, rate), colour in marks.items()
    )


def _caption(result: StudyResult, lines: list[Trace]) -> tuple[Part, ...]:
    drawn = {trace.name.split()[0] for trace in lines}
    parts = [Part("Each large dot is the constant rate that was fastest to the hardest goal at its batch. ")]
    eps_max = finite(result.eps_max)
    if "predicted" in drawn and eps_max is not None:
        parts += [Part("The predicted curve flattens towards "), counted(eps_max)]
        parts.append(Part(", while the linear rule keeps climbing" if "linear" in drawn else ""))
        parts.append(Part(f"; {apart}. " if (apart := _apart(result)) else ". "))
    else:
        parts.append(Part("The prediction is not drawn because the noise scale is not resolved. "))
    parts.append(
        Part(
            "The star is the peak rate of the recommended full schedule (warmup, then decay; Goyal 2017), "
            "which need not equal the best constant rate."
        )
    )
    return tuple(part for part in parts if part.text)


def _apart(result: StudyResult) -> str:
    """How far the rates that won lie from the predicted curve."""
    b_simple, eps_max, points = finite(result.b_simple.value), finite(result.eps_max), result.fronts[-1].points
    if b_simple is None or eps_max is None or not points:
        return ""
    ratios = [point.lr * (1 + b_simple / point.batch) / eps_max for point in points]
    worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    if max(worst, 1 / worst) < 1.1:
        return "the dots lie on the curve within 10 %"
    side = "above" if worst > 1 else "below"
    return f"the dot farthest from the curve is a factor {number(max(worst, 1 / worst), 2)} {side} it"


def _trial_words(batch: int, lr: float, steps: float | None, taken: float) -> str:
    end = f"stopped after {number(float(taken))} steps" if steps is None else f"{number(float(steps))} steps"
    return f"batch {tick_label(batch)}, lr {number(lr)}: {end}"
