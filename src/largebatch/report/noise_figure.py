"""How noisy are the gradients over training? B_simple window by window, beside the level of B_crit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from largebatch.records.schema import GoalFront, NoiseWindow, StudyResult
from largebatch.report.description import Axis, Band, Figure, Symbol, Trace, log_axis
from largebatch.report.words import NO_REASON, Part, counted, finite, number, say

ROOM = 5.0
"""An interval may widen the picture by this factor beyond the values; what is longer is cut and gets an arrow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """A window that is resolved."""

    window: NoiseWindow
    value: float
    low: float
    """0 where there is no lower bound."""
    high: float
    """inf where there is no upper bound."""

    @property
    def middle(self) -> float:
        return (self.window.first_step + self.window.last_step) / 2


def noise_figure(result: StudyResult) -> Figure:
    """The gradient noise scale over the measured run, a box a window, and the level of B_crit.

    Args:
        result: The study's typed result.
    Returns:
        The picture; windows that are not resolved show their bound only.
    """
    known, front = _known(result.windows), result.fronts[-1]
    last_step = max((window.last_step for window in result.windows), default=1)
    x = Axis(title="Optimizer step", log=False, low=-0.015 * last_step, high=1.015 * last_step)
    y = _scale(result, known)
    traces: list[Trace] = []
    bands: list[Band] = []
    if known:
        baseline = result.reference.get("batch")
        at = f", measured at batch {number(baseline)}" if isinstance(baseline, int) else ", measured"
        bands.append(_boxes(known, y))
        traces.append(
            Trace(
                name=f"B_simple{at}",
                x=tuple(one.middle for one in known),
                y=tuple(one.value for one in known),
                colour="accent",
                symbol="circle",
                size=8,
                hover=tuple(_window_words(one.window) for one in known),
            )
        )
        traces += _arrows(known, y)
    traces += _lost(result.windows, y)
    level_traces, level_bands = _level(front, x, y)
    return Figure(
        name="noise",
        title="Noise scale over training",
        caption=_caption(result, known),
        alt="Chart of the gradient noise scale against the optimizer step, with its 95 % interval in every window.",
        x=x,
        y=y,
        traces=(*traces, *level_traces),
        bands=(*bands, *level_bands),
    )


def _known(windows: tuple[NoiseWindow, ...]) -> list[_Known]:
    return [
        _Known(window=window, value=value, low=finite(window.b_simple.low) or 0.0, high=high or math.inf)
        for window in windows
        if window.resolved and (value := finite(window.b_simple.value)) is not None and value > 0
        for high in (finite(window.b_simple.high),)
    ]


def _scale(result: StudyResult, known: list[_Known]) -> Axis:
    """An axis for the values and the level of B_crit; intervals and stray bounds may stretch it only so far."""
    title = f"Noise scale B_simple ({result.unit})"
    front = result.fronts[-1]
    ends = [front.b_crit.low, front.b_crit.high] if front.resolved else [front.b_crit.low]
    core = [one.value for one in known] + [end for end in map(finite, ends) if end is not None and end > 0]
    bounds = [low for window in result.windows if not window.resolved and (low := finite(window.b_simple.low))]
    bounds = sorted(bound for bound in bounds if bound > 0)
    if not core:
        return log_axis(title, bounds, pad=1.4)
    floor, roof = min(core) / ROOM, max([*core, *bounds]) * ROOM
    stretch = [end for one in known for end in (one.low, one.high) if 0 < end < math.inf]
    shown = [*(min(max(end, floor), roof) for end in stretch), *(bound for bound in bounds if bound >= floor)]
    return log_axis(title, [*core, *shown], pad=1.3)


def _boxes(known: list[_Known], y: Axis) -> Band:
    """The 95 % interval of every window over the window's own steps, cut at the picture's edges."""
    x: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for one in known:
        x += [one.window.first_step, one.window.last_step + 1, None]
        low += [max(one.low, y.low)] * 2 + [None]
        high += [min(one.high, y.high)] * 2 + [None]
    return Band(x=tuple(x), low=tuple(low), high=tuple(high), colour="accent@0.18", name="95 % interval")


def _arrows(known: list[_Known], y: Axis) -> list[Trace]:
    """Marks where an interval goes on beyond the picture."""
    margin = (y.high / y.low) ** 0.02
    cut: tuple[tuple[Symbol, list[_Known], float], ...] = (
        ("up", [one for one in known if one.high > y.high], y.high / margin),
        ("down", [one for one in known if one.low < y.low], y.low * margin),
    )
    legend = True
    traces: list[Trace] = []
    for symbol, ones, at in cut:
        if ones:
            traces.append(
                Trace(
                    name="interval goes on",
                    x=tuple(one.middle for one in ones),
                    y=(at,) * len(ones),
                    colour="accent",
                    symbol=symbol,
                    size=9,
                    legend=legend,
                    hover=tuple(_window_words(one.window) for one in ones),
                )
            )
            legend = False
    return traces


def _lost(windows: tuple[NoiseWindow, ...], y: Axis) -> list[Trace]:
    """Windows that are not resolved: at their lower bound where the picture holds it, else a cross at the bottom."""
    lost = [window for window in windows if not window.resolved]
    groups: tuple[tuple[str, bool, Symbol], ...] = (
        ("not resolved: at least this much", True, "above"),
        ("not resolved", False, "x"),
    )
    bottom = y.low * (y.high / y.low) ** 0.02
    traces: list[Trace] = []
    for name, bounded, symbol in groups:
        chosen = [window for window in lost if ((finite(window.b_simple.low) or 0.0) >= bottom) == bounded]
        if chosen:
            traces.append(
                Trace(
                    name=name,
                    x=tuple((window.first_step + window.last_step) / 2 for window in chosen),
                    y=tuple(window.b_simple.low if bounded else bottom for window in chosen),
                    colour="danger@0.75",
                    symbol=symbol,
                    filled=False,
                    size=9,
                    hover=tuple(_window_words(window) for window in chosen),
                )
            )
    return traces


def _level(front: GoalFront, x: Axis, y: Axis) -> tuple[list[Trace], list[Band]]:
    """The critical batch of the hardest goal: a line with its interval, or its lower bound."""
    level = finite(front.b_crit.value) if front.resolved else finite(front.b_crit.low)
    if level is None or level <= 0:
        return [], []
    said = say(front.b_crit, resolved=front.resolved, reason=front.reason)
    name = f"B_crit {said.plain_headline} (loss {number(front.goal)})"
    line = Trace(name=name, x=(x.low, x.high), y=(level, level), colour="second", line=True, dash="dash")
    low, high = finite(front.b_crit.low), finite(front.b_crit.high)
    if not front.resolved or low is None or high is None:
        return [line], []
    ends = (max(low, y.low),) * 2, (min(high, y.high),) * 2
    return [line], [Band(x=(x.low, x.high), low=ends[0], high=ends[1], colour="second@0.10", group=name)]


def _window_words(window: NoiseWindow) -> str:
    return (
        f"steps {window.first_step:,} to {window.last_step:,}, loss {number(window.loss)}<br>B_simple "
        f"{say(window.b_simple, resolved=window.resolved)}"
    )


def _caption(result: StudyResult, known: list[_Known]) -> tuple[Part, ...]:
    """Say growth or fall only where the first and the last interval lie apart."""
    unit, count = result.unit, len(result.windows)
    if not known:
        return (Part(f"The noise scale is not resolved in any window of the measured run: {NO_REASON}."),)
    first, last = known[0], known[-1]
    some = "" if len(known) == count else f" (resolved in {len(known)} of {count} windows)"
    if len(known) == 1:
        return (Part("The noise scale is resolved in one window only: "), counted(first.value), Part(f" {unit}."))
    ends = (counted(first.value), Part(" to "), counted(last.value))
    if last.low > first.high:
        falls = " as the loss falls" if last.window.loss < first.window.loss else ""
        pays = ": a larger batch pays later in training, and B_crit agrees" if falls and _front_grows(result) else ""
        return (Part("The noise scale grows from "), *ends, Part(f" {unit}{falls}{pays}{some}."))
    if last.high < first.low:
        return (Part("The noise scale falls from "), *ends, Part(f" {unit} over the measured run{some}."))
    values = [one.value for one in known]
    return (
        Part("The noise scale lies between "),
        counted(min(values)),
        Part(" and "),
        counted(max(values)),
        Part(f" {unit}{some}; the first and the last interval overlap, so no trend is shown."),
    )


def _front_grows(result: StudyResult) -> bool:
    """Whether B_crit of the hardest goal lies above that of the easiest, intervals and all."""
    easy, hard = result.fronts[0], result.fronts[-1]
    high, low = finite(easy.b_crit.high), finite(hard.b_crit.low)
    return easy.resolved and hard.resolved and high is not None and low is not None and low > high
