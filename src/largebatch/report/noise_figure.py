"""How noisy are the gradients over training? B_simple window by window, beside the level of B_crit."""

from __future__ import annotations

from largebatch.records.schema import GoalFront, StudyResult
from largebatch.report.description import Axis, Band, Figure, Trace
from largebatch.report.window_marks import Known, arrows, boxes, known_windows, lost_marks, scale, window_words
from largebatch.report.words import NO_REASON, Part, counted, finite, number, say


def noise_figure(result: StudyResult) -> Figure:
    """The gradient noise scale over the measured run, a box a window, and the level of B_crit.

    Args:
        result: The study's typed result.
    Returns:
        The picture; windows that are not resolved show their bound only.
    """
    known, front = known_windows(result.windows), result.fronts[-1]
    last_step = max((window.last_step for window in result.windows), default=1)
    x = Axis(title="Optimizer step", log=False, low=-0.015 * last_step, high=1.015 * last_step)
    ends = [front.b_crit.low, front.b_crit.high] if front.resolved else [front.b_crit.low]
    y = scale(f"Noise scale B_simple ({result.unit})", result.windows, known, ends)
    traces: list[Trace] = []
    bands: list[Band] = []
    if known:
        baseline = result.reference.get("batch")
        at = f", measured at batch {number(baseline)}" if isinstance(baseline, int) else ", measured"
        bands.append(boxes(known, y))
        traces.append(
            Trace(
                name=f"B_simple{at}",
                x=tuple(one.middle for one in known),
                y=tuple(one.value for one in known),
                colour="accent",
                symbol="circle",
                size=8,
                hover=tuple(window_words(one.window) for one in known),
            )
        )
        traces += arrows(known, y)
    traces += lost_marks(result.windows, y)
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


def _caption(result: StudyResult, known: list[Known]) -> tuple[Part, ...]:
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
