"""Which pictures does a moments log give? The noise scale along the steps, its two moments, and its groups."""

from __future__ import annotations

from itertools import product

from largebatch.records.moments_history import MomentsHistory, NoiseHistory
from largebatch.report.description import Axis, Dash, Figure, Symbol, Trace, Values, log_axis
from largebatch.report.window_marks import Known, arrows, boxes, known_windows, lost_marks, scale, window_words
from largebatch.report.words import NO_REASON, Part, counted, number

LOOKS: tuple[tuple[Dash, tuple[str, Symbol]], ...] = tuple(
    product(
        ("solid", "dash", "dot"),
        (("accent", "circle"), ("second", "square"), ("third", "triangle"), ("ink", "diamond"), ("muted", "pentagon")),
    )
)
"""How the groups' lines are told apart; there are no more lines than these."""


def moments_figures(history: MomentsHistory) -> tuple[Figure, ...]:
    """Every picture of the page, in its order; that of groups only where there are any."""
    groups = (groups_figure(history),) if history.groups else ()
    return (noise_figure(history), moments_figure(history), *groups)


def noise_figure(history: MomentsHistory) -> Figure:
    """B_simple window by window with its intervals, the batch as a line, and B_simple in the optimizer's metric."""
    windows, unit = history.total.windows, history.header.unit
    known = known_windows(windows)
    other = [] if history.preconditioned is None else known_windows(history.preconditioned.windows)
    levels = (*history.curve.batch, *(one.value for one in other))
    y = scale(f"Noise scale B_simple ({unit})", windows, known, levels)
    traces = [
        Trace(
            name="batch", x=history.curve.step, y=history.curve.batch, colour="ink", line=True, dash="dash", width=1.8,
            hover=tuple(f"batch {number(round(batch))} {unit}" for batch in history.curve.batch),
        )
    ]  # fmt: skip
    if known:
        traces.append(
            Trace(
                name="B_simple, a window", x=tuple(one.middle for one in known), y=tuple(one.value for one in known),
                colour="accent", symbol="circle", hover=tuple(window_words(one.window) for one in known),
            )
        )  # fmt: skip
        traces += arrows(known, y)
    traces += lost_marks(windows, y)
    if other:
        traces.append(
            Trace(
                name="in the optimizer's metric", x=tuple(one.middle for one in other),
                y=tuple(one.value for one in other), colour="third", symbol="diamond", filled=False,
                hover=tuple(window_words(one.window) for one in other),
            )
        )  # fmt: skip
    return Figure(
        name="noise",
        title="Noise scale over training",
        caption=_trend(known, len(windows), unit),
        alt="Chart of the gradient noise scale by optimizer step, in windows with 95 % intervals, and of the batch.",
        x=_steps(history),
        y=y,
        traces=tuple(traces),
        bands=(boxes(known, y),) if known else (),
    )


def moments_figure(history: MomentsHistory) -> Figure:
    """tr(Sigma), |G|^2 and the noise that is left in a batch's gradient, as means of bins."""
    curve = history.curve
    left = tuple(trace / batch for trace, batch in zip(curve.trace_cov, curve.batch, strict=True))
    lines: tuple[tuple[str, tuple[float, ...], str, Dash], ...] = (
        (f"tr(Σ), the noise of one of the {history.header.unit}", curve.trace_cov, "second", "solid"),
        ("tr(Σ) / batch, the noise of a step", left, "second", "dot"),
        ("|G|², the gradient", curve.grad_sq_norm, "accent", "solid"),
    )
    gaps = sum(value <= 0 for _, values, _, _ in lines for value in values)
    caption = "Where the dotted line lies above |G|², a step is more noise than gradient: the batch is below B_simple."
    if gaps:
        caption += (
            " A gap: the mean of these steps is not positive, as it may be where the gradient is lost in its noise."
        )
    return Figure(
        name="moments",
        title="Gradient and noise over training",
        caption=(Part(caption),),
        alt="Log chart of the trace of the gradient's covariance and of the squared gradient norm against the step.",
        x=_steps(history),
        y=log_axis("Squared gradient norm", [value for _, values, _, _ in lines for value in values], pad=1.4),
        traces=tuple(
            Trace(
                name=name, x=curve.step, y=_positive(values), colour=colour, line=True, dash=dash,
                symbol="circle" if len(values) == 1 else None,
                hover=tuple(
                    f"step {number(round(step))}: {number(value)}"
                    for step, value in zip(curve.step, values, strict=True)
                ),
            )
            for name, values, colour, dash in lines
        ),
    )  # fmt: skip


def groups_figure(history: MomentsHistory) -> Figure:
    """B_simple of each group of parameters, a line a group; those with most of tr(Sigma) where there are many."""
    unit = history.header.unit
    chosen = sorted(history.groups.items(), key=lambda one: -(one[1].trace_share or 0.0))[: len(LOOKS)]
    values = [one.value for _, group in chosen for one in known_windows(group.windows)]
    left_out = len(history.groups) - len(chosen)
    caption = "A gap is a window in which the group is not resolved; the table has their intervals over the whole log."
    if left_out:
        caption += f" Drawn are the {len(chosen)} groups with most of tr(Σ); {left_out} more are in the table."
    return Figure(
        name="groups",
        title="Noise scale by group of parameters",
        caption=(Part(caption),),
        alt="Chart of the gradient noise scale of each group of parameters against the optimizer step.",
        x=_steps(history),
        y=log_axis(f"Noise scale B_simple ({unit})", [*values, float(history.typical_batch)], pad=1.4),
        traces=tuple(_group(name, group, *look) for (name, group), look in zip(chosen, LOOKS, strict=False)),
    )


def _group(name: str, group: NoiseHistory, dash: Dash, look: tuple[str, Symbol]) -> Trace:
    known = {one.window.first_step: one.value for one in known_windows(group.windows)}
    return Trace(
        name=name,
        x=tuple((window.first_step + window.last_step) / 2 for window in group.windows),
        y=tuple(known.get(window.first_step) for window in group.windows),
        colour=look[0],
        line=True,
        dash=dash,
        symbol=look[1],
        size=6,
        hover=tuple(f"{name}<br>{window_words(window)}" for window in group.windows),
    )


def _steps(history: MomentsHistory) -> Axis:
    span = max(history.last_step - history.first_step, 1)
    return Axis(
        title="Optimizer step", log=False, low=history.first_step - 0.015 * span, high=history.last_step + 0.015 * span
    )


def _positive(values: tuple[float, ...]) -> Values:
    return tuple(value if value > 0 else None for value in values)


def _trend(known: list[Known], count: int, unit: str) -> tuple[Part, ...]:
    """Say growth or fall only where the first and the last interval lie apart."""
    if not known:
        return (Part(f"The noise scale is not resolved in any window: {NO_REASON}."),)
    some = "" if len(known) == count else f" (resolved in {len(known)} of {count} windows)"
    first, last = known[0], known[-1]
    if len(known) == 1:
        return (Part("The noise scale is resolved in one window: "), counted(first.value), Part(f" {unit}{some}."))
    ends = (counted(first.value), Part(" to "), counted(last.value))
    for verb, apart in (("grows", last.low > first.high), ("falls", last.high < first.low)):
        if apart:
            return (Part(f"The noise scale {verb} from "), *ends, Part(f" {unit}{some}."))
    low, high = min(one.value for one in known), max(one.value for one in known)
    overlap = Part(f" {unit}{some}; the first and the last interval overlap, so no trend is shown.")
    return (Part("The noise scale lies between "), counted(low), Part(" and "), counted(high), overlap)
