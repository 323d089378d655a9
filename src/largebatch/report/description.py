"""What is in a picture, before anyone draws it? Frozen descriptions that two renderers share.

Colours are roles ("ink", "muted", "accent", "second", "third", "danger"), with an optional opacity
("accent@0.5"), so that a light page, a dark page and a print can each choose their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from largebatch.report.words import Part, number

Values = tuple[float | None, ...]
Dash = Literal["solid", "dash", "dot"]
Symbol = Literal["circle", "square", "diamond", "triangle", "pentagon", "star", "x", "beyond", "above", "up", "down"]
"""`beyond` is a triangle to the upper right, `above` one upwards: the truth lies farther that way.
`up` and `down` stand at the picture's edge: what is drawn goes on beyond it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis: its title names the quantity and the unit."""

    title: str
    log: bool
    low: float
    high: float
    ticks: tuple[float, ...] = ()
    """Where labels stand; empty lets the renderer choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Points, joined by a line or not; None in x or y leaves a gap."""

    name: str
    x: Values
    y: Values
    colour: str
    line: bool = False
    dash: Dash = "solid"
    width: float = 2.0
    symbol: Symbol | None = None
    size: float = 8.0
    filled: bool = True
    spread: Values | None = None
    """Half the height of each point's error bar."""
    hover: tuple[str, ...] = ()
    """What to say at each point; empty lets a point say nothing."""
    legend: bool = True
    group: str = ""
    """Series of one group hide and show together; empty means a group of its own, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The region between two curves; None in low or high leaves a gap."""

    x: Values
    low: Values
    high: Values
    colour: str
    name: str = ""
    """Its legend entry; a band without one goes with the series of its group."""
    group: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A few words at a point of the picture."""

    x: float
    y: float
    text: str
    colour: str
    anchor: Literal["left", "right", "center"] = "left"
    """Which edge of the words is at x."""
    below: bool = False
    """Whether the words hang below the point instead of standing on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One picture with the sentence that says what to see in it."""

    name: str
    title: str
    caption: tuple[Part, ...]
    alt: str
    x: Axis
    y: Axis
    traces: tuple[Trace, ...]
    bands: tuple[Band, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def plain_caption(self) -> str:
        """The caption as text."""
        return "".join(part.text for part in self.caption)


SYMBOL = re.compile(r"\b(?:([BSE])_(simple|crit|min|noise)|eps_(max)|eps)\b")
"""B_simple and its like, which every renderer sets with a subscript in its own way."""


def log_axis(title: str, values: Iterable[float | None], *, pad: float = 1.25, ticks: Iterable[float] = ()) -> Axis:
    """A logarithmic axis that holds all positive `values`, with `pad` as a factor at both ends."""
    positive = [value for value in values if value is not None and math.isfinite(value) and value > 0] or [1.0, 10.0]
    low, high = min(positive) / pad, max(positive) * pad
    return Axis(title=title, log=True, low=low, high=high, ticks=tuple(ticks) or log_ticks(low, high))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Round numbers between low and high: decades, or 1-2-5 steps, or finer when the range is short.

    >>> log_ticks(8, 1200)
    (10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: tuple[float, ...] = ()
    for mantissas in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = tuple(
            float(f"{mantissa * 10.0**decade:.3g}")
            for decade in decades
            for mantissa in mantissas
            if low <= mantissa * 10.0**decade <= high
        )
        if len(ticks) >= 4:
            break
    return ticks


def tick_label(value: float) -> str:
    """A tick's number, thousands apart."""
    return number(int(value)) if float(value).is_integer() else number(value)
