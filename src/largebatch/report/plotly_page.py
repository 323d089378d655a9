"""How does a picture's description become something plotly.js can draw?

Colours stay roles ("$accent@0.5"); the page's script puts in those of the light or the dark palette.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from html import escape
from typing import Any

from largebatch.report.description import SYMBOL, Axis, Band, Figure, Note, Trace, tick_label
from largebatch.report.words import tidy

_SYMBOLS = {
    "circle": "circle",
    "square": "square",
    "diamond": "diamond",
    "triangle": "triangle-up",
    "pentagon": "pentagon",
    "star": "star",
    "x": "x-thin",
    "beyond": "triangle-ne",
    "above": "triangle-up",
    "up": "triangle-up",
    "down": "triangle-down",
}


def plotly_figure(figure: Figure) -> dict[str, Any]:
    """Turn a description into plotly's data and layout.

    Args:
        figure: What is in the picture.
    Returns:
        {"name", "data", "layout"}, plain JSON with colours as "$role@opacity".
    """
    data = [polygon for band in figure.bands for polygon in _band(band)]
    data += [_trace(trace) for trace in figure.traces]
    notes = [_note(note, figure) for note in figure.notes]
    layout = {"xaxis": _axis(figure.x), "yaxis": _axis(figure.y), "annotations": notes}
    return {"name": figure.name, "data": data, "layout": layout}


def _trace(trace: Trace) -> dict[str, Any]:
    mode = "+".join(part for part, wanted in (("lines", trace.line), ("markers", trace.symbol is not None)) if wanted)
    drawn: dict[str, Any] = {
        "type": "scatter",
        "mode": mode,
        "name": markup(trace.name),
        "x": trace.x,
        "y": trace.y,
        "showlegend": trace.legend,
        "legendgroup": trace.group or trace.name,
        "connectgaps": False,
    }
    if trace.line:
        drawn["line"] = {"color": f"${trace.colour}", "width": trace.width, "dash": trace.dash}
    if trace.symbol is not None:
        open_mark = not trace.filled or trace.symbol == "x"
        edge = 2 if open_mark else 0
        drawn["marker"] = {
            "symbol": _SYMBOLS[trace.symbol] + ("-open" if open_mark else ""),
            "size": trace.size,
            "color": f"${trace.colour}",
            "line": {"width": edge, "color": f"${trace.colour}"},
        }
    if trace.spread is not None:
        drawn["error_y"] = {"array": trace.spread, "color": f"${trace.colour}", "thickness": 1.5, "width": 5}
    if trace.hover:
        drawn |= {"text": [_escape_hover(words) for words in trace.hover], "hovertemplate": "%{text}<extra></extra>"}
    else:
        drawn["hoverinfo"] = "skip"
    return drawn


def markup(text: str) -> str:
    """Escape, set B_simple and its like with a subscript, and keep a per cent sign with its number.

    >>> markup("B_simple < 3")
    'B<sub>simple</sub> &lt; 3'
    """
    return re.sub(r"(?<=\d) %", "\u00a0%", SYMBOL.sub(_subscript, escape(tidy(text))))


def _subscript(match: re.Match[str]) -> str:
    if match.group(1):
        return f"{match.group(1)}<sub>{match.group(2)}</sub>"
    return "ε<sub>max</sub>" if match.group(3) else "ε"


def _escape_hover(words: str) -> str:
    return markup(words).replace("&lt;br&gt;", "<br>")


def _band(band: Band) -> Iterator[dict[str, Any]]:
    """One closed polygon for each stretch without a gap."""
    named = False
    for xs, lows, highs in stretches(band):
        yield {
            "type": "scatter",
            "mode": "lines",
            "x": [*xs, *reversed(xs)],
            "y": [*lows, *reversed(highs)],
            "fill": "toself",
            "fillcolor": f"${band.colour}",
            "line": {"width": 0, "color": f"${band.colour}"},
            "hoverinfo": "skip",
            "name": markup(band.name),
            "showlegend": bool(band.name) and not named,
            "legendgroup": band.group or band.name,
        }
        named = True


def stretches(band: Band) -> Iterator[tuple[list[float], list[float], list[float]]]:
    """Cut a band at its gaps into (x, low, high) lists of at least one point; a lone point gets some width."""
    rows = zip(band.x, band.low, band.high, strict=True)
    stretch: list[tuple[float, float, float]] = []
    width = min(
        (b - a for a, b in zip(band.x, band.x[1:], strict=False) if a is not None and b is not None), default=1.0
    )
    for x, low, high in [*rows, (None, None, None)]:
        if x is not None and low is not None and high is not None:
            stretch.append((x, low, high))
            continue
        if len(stretch) == 1:
            (at, bottom, top), half = stretch[0], width / 4
            stretch = [(at - half, bottom, top), (at + half, bottom, top)]
        if stretch:
            yield [row[0] for row in stretch], [row[1] for row in stretch], [row[2] for row in stretch]
        stretch = []


def _axis(axis: Axis) -> dict[str, Any]:
    ends = (math.log10(axis.low), math.log10(axis.high)) if axis.log else (axis.low, axis.high)
    drawn: dict[str, Any] = {
        "title": {"text": markup(axis.title)},
        "type": "log" if axis.log else "linear",
        "range": ends,
    }
    if axis.ticks:
        drawn |= {"tickvals": axis.ticks, "ticktext": [tick_label(tick) for tick in axis.ticks]}
    elif not axis.log:
        drawn["tickformat"] = ","
    return drawn


def _note(note: Note, figure: Figure) -> dict[str, Any]:
    return {
        "x": math.log10(note.x) if figure.x.log else note.x,
        "y": math.log10(note.y) if figure.y.log else note.y,
        "text": markup(note.text),
        "font": {"color": f"${note.colour}"},
        "showarrow": False,
        "xanchor": note.anchor,
        "yanchor": "top" if note.below else "bottom",
    }
