"""How does a window of steps look in a picture: resolved, cut at the edge, or not resolved?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from largebatch.records.schema import NoiseWindow
from largebatch.report.description import Axis, Band, Symbol, Trace, log_axis
from largebatch.report.words import finite, number, say

ROOM = 5.0
"""An interval may widen the picture by this factor beyond the values; what is longer is cut and gets an arrow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A window that is resolved."""

    window: NoiseWindow
    value: float
    low: float
    """0 where there is no lower bound."""
    high: float
    """inf where there is no upper bound."""

    @property
    def middle(self) -> float:
        """Where it is marked."""
        return (self.window.first_step + self.window.last_step) / 2


def known_windows(windows: Iterable[NoiseWindow]) -> list[Known]:
    """The windows that are resolved."""
    return [
        Known(window=window, value=value, low=finite(window.b_simple.low) or 0.0, high=high or math.inf)
        for window in windows
        if window.resolved and (value := finite(window.b_simple.value)) is not None and value > 0
        for high in (finite(window.b_simple.high),)
    ]


def scale(title: str, windows: Iterable[NoiseWindow], known: Sequence[Known], levels: Iterable[float | None]) -> Axis:
    """An axis for the values and `levels`; intervals and stray bounds may stretch it only so far."""
    core = [one.value for one in known] + [end for end in map(finite, levels) if end is not None and end > 0]
    bounds = [low for window in windows if not window.resolved and (low := finite(window.b_simple.low))]
    bounds = sorted(bound for bound in bounds if bound > 0)
    if not core:
        return log_axis(title, bounds, pad=1.4)
    floor, roof = min(core) / ROOM, max([*core, *bounds]) * ROOM
    stretch = [end for one in known for end in (one.low, one.high) if 0 < end < math.inf]
    shown = [*(min(max(end, floor), roof) for end in stretch), *(bound for bound in bounds if bound >= floor)]
    return log_axis(title, [*core, *shown], pad=1.3)


def boxes(known: list[Known], y: Axis) -> Band:
    """The 95 % interval of every window over the window's own steps, cut at the picture's edges."""
    x: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for one in known:
        x += [one.window.first_step, one.window.last_step + 1, None]
        low += [max(one.low, y.low)] * 2 + [None]
        high += [min(one.high, y.high)] * 2 + [None]
    return Band(x=tuple(x), low=tuple(low), high=tuple(high), colour="accent@0.18", name="95 % interval")


def arrows(known: list[Known], y: Axis) -> list[Trace]:
    """Marks where an interval goes on beyond the picture."""
    margin = (y.high / y.low) ** 0.02
    cut: tuple[tuple[Symbol, list[Known], float], ...] = (
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
                    hover=tuple(window_words(one.window) for one in ones),
                )
            )
            legend = False
    return traces


def lost_marks(windows: Sequence[NoiseWindow], y: Axis) -> list[Trace]:
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
                    hover=tuple(window_words(window) for window in chosen),
                )
            )
    return traces


def window_words(window: NoiseWindow) -> str:
    """What to say at a window; a loss that is not known is left out."""
    loss = "" if finite(window.loss) is None else f", loss {number(window.loss)}"
    return (
        f"steps {window.first_step:,} to {window.last_step:,}{loss}<br>B_simple "
        f"{say(window.b_simple, resolved=window.resolved)}"
    )
