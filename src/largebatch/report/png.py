"""How does a picture's description become a PNG? Matplotlib's Agg canvas, no global state."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from largebatch.errors import MissingExtraError
from largebatch.report.description import SYMBOL, Axis, Figure, Trace, tick_label
from largebatch.report.palette import LIGHT, role_and_opacity
from largebatch.report.plotly_page import stretches
from largebatch.report.words import tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS: dict[str, Any] = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle": "^",
    "pentagon": "p",
    "star": "*",
    "x": "x",
    "beyond": (3, 0, -45),
    "above": "^",
    "up": "^",
    "down": "v",
}
_DASHES: dict[str, Any] = {"solid": "-", "dash": (0, (5, 2.5)), "dot": (0, (1.5, 2))}


def png_bytes(figure: Figure, *, width: float = 9.0, height: float = 5.4, dots_per_inch: int = 144) -> bytes:
    """Draw a description as PNG on white.

    Args:
        figure: What is in the picture.
        width: Inches.
        height: Inches.
        dots_per_inch: Pixels an inch.
    Returns:
        The file's bytes.
    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError("matplotlib", "study", "drawing PNG figures") from error
    canvas = Canvas(figsize=(width, height), dpi=dots_per_inch, layout="constrained", facecolor=LIGHT["card"])
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    for band in figure.bands:
        for index, (xs, lows, highs) in enumerate(stretches(band)):
            label = _plain(band.name) if band.name and index == 0 else None
            axes.fill_between(xs, lows, highs, color=_rgba(band.colour), linewidth=0, label=label)
    for trace in figure.traces:
        _draw_trace(axes, trace)
    for note in figure.notes:
        axes.annotate(
            _plain(note.text),
            (note.x, note.y),
            xytext=(0, -4 if note.below else 4),
            textcoords="offset points",
            ha=note.anchor,
            va="top" if note.below else "bottom",
            color=_rgba(note.colour),
        )
    _draw_axes(axes, figure)
    if any(axes.get_legend_handles_labels()):
        canvas.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=LIGHT["ink"])
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", metadata={"Title": figure.title, "Description": figure.alt, "Software": ""})
    return buffer.getvalue()


def _draw_trace(axes: Axes, trace: Trace) -> None:
    colour = _rgba(trace.colour)
    x = [float("nan") if value is None else value for value in trace.x]
    y = [float("nan") if value is None else value for value in trace.y]
    axes.plot(
        x,
        y,
        color=colour,
        linestyle=_DASHES[trace.dash] if trace.line else "none",
        linewidth=trace.width * 0.9,
        marker=_MARKERS[trace.symbol] if trace.symbol else "",
        markersize=trace.size * 0.8,
        markerfacecolor=colour if trace.filled else "none",
        markeredgewidth=1.5 if trace.symbol == "x" or not trace.filled else 0,
        label=_plain(trace.name) if trace.legend else None,
    )
    if trace.spread is not None:
        spread = [value or 0.0 for value in trace.spread]
        axes.errorbar(x, y, yerr=spread, fmt="none", ecolor=colour, elinewidth=1.4, capsize=4)


def _draw_axes(axes: Axes, figure: Figure) -> None:
    _draw_axis(axes, figure.x, "x")
    _draw_axis(axes, figure.y, "y")
    axes.grid(color=LIGHT["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(_plain(figure.title), loc="left", color=LIGHT["ink"], fontweight="bold", fontsize=13, pad=12)
    axes.tick_params(colors=LIGHT["muted"], length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_axis(axes: Axes, axis: Axis, which: str) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator, StrMethodFormatter

    backend = axes.xaxis if which == "x" else axes.yaxis
    if axis.log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(axis.low, axis.high)
    if axis.ticks:
        backend.set_minor_locator(NullLocator())
        backend.set_minor_formatter(NullFormatter())
        backend.set_ticks(list(axis.ticks), labels=[tick_label(tick) for tick in axis.ticks])
    elif not axis.log:
        backend.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    backend.set_label_text(_plain(axis.title), color=LIGHT["muted"])


def _plain(text: str) -> str:
    """Keep matplotlib from reading a dollar sign as mathematics; set B_simple and its like with a subscript."""
    return SYMBOL.sub(_subscript, tidy(text).replace("$", r"\$"))


def _subscript(match: re.Match[str]) -> str:
    if match.group(1):
        return rf"$\mathregular{{{match.group(1)}_{{{match.group(2)}}}}}$"
    return r"$\mathregular{ε_{max}}$" if match.group(3) else "ε"


def _rgba(colour: str) -> tuple[float, float, float, float]:
    role, opacity = role_and_opacity(colour)
    digits = LIGHT[role].removeprefix("#")
    red, green, blue = (int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4))
    return red, green, blue, opacity
