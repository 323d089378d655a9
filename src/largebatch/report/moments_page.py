"""Where does a moments log become a page that a person can read, offline, on any screen?"""

from __future__ import annotations

from pathlib import Path

from largebatch.records.moments_history import MomentsHistory
from largebatch.report.html import render, write_page
from largebatch.report.moments_figures import moments_figures
from largebatch.report.summary import KeyNumber, has_number
from largebatch.report.words import Part, Said, counted, finite, number, percent, say, split_summary


def write_moments_report(history: MomentsHistory, out: Path, *, name: str) -> Path:
    """Write NAME.html, one self-contained page, and figures/NAME-*.png.

    Args:
        history: What the log says.
        out: The folder to write into.
        name: The log's file name without .jsonl.
    Returns:
        The path of the page.
    Raises:
        MissingExtraError: jinja2, plotly or matplotlib is not installed.
        StorageError: The disk refused a file.
    """
    html = render_moments_page(history, name=name)
    return write_page(html, moments_figures(history), out / f"{name}.html", prefix=f"{name}-")


def render_moments_page(history: MomentsHistory, *, name: str) -> str:
    """Render the page; arguments as `write_moments_report`."""
    headline, rest = split_summary(history.advice)
    return render(
        "moments.html.j2",
        moments_figures(history),
        history=history,
        name=name,
        headline=headline,
        rest=rest,
        key_numbers=_key_numbers(history),
        facts=_facts(history),
        say=say,
        counted=counted,
        group_share=group_share,
        has_number=has_number,
        number=number,
    )


def _key_numbers(history: MomentsHistory) -> tuple[KeyNumber, ...]:
    unit, total, last = history.header.unit, history.total, history.total.windows[-1]
    resolved = sum(window.resolved for window in total.windows)
    first, final = history.advice_from
    numbers = [
        KeyNumber(
            label="B_simple, last window", said=say(last.b_simple, resolved=last.resolved), unit=unit, primary=True,
            note=f"steps {last.first_step:,} to {last.last_step:,}",
        ),
        KeyNumber(
            label="B_simple, whole log", said=say(total.b_simple, resolved=total.resolved, reason=total.reason),
            unit=unit, note=f"{history.num_steps:,} measured steps",
        ),
        KeyNumber(
            label="Typical batch", said=Said((counted(history.typical_batch),)), unit=unit,
            note=f"median of the last 31 measured steps; the advice rests on steps {first:,} to {final:,}",
        ),
        KeyNumber(
            label="Windows", said=Said((counted(resolved), Part(" of "), counted(len(total.windows)))), unit="resolved",
            note="where |G|² is told from 0",
        ),
    ]  # fmt: skip
    if history.preconditioned is not None:
        other = history.preconditioned
        numbers.append(
            KeyNumber(
                label="B_simple in the optimizer's metric", unit=unit, note="whole log",
                said=say(other.b_simple, resolved=other.resolved, reason=other.reason),
            )
        )  # fmt: skip
    return tuple(numbers)


def _facts(history: MomentsHistory) -> list[tuple[str, tuple[Part, ...]]]:
    header = history.header
    said = {
        "Unit": header.unit,
        "Workers": None if header.world_size is None else number(header.world_size),
        "Optimizer": header.optimizer,
        "Loss scaling": header.loss_scaling,
        "Examples drawn without replacement from": None if header.dataset_size is None else number(header.dataset_size),
    }
    windows = history.total.windows
    return [
        ("B_simple", (Part("tr(Σ) / |G|², the ratio of the mean moments of a window (McCandlish et al. 2018, 2.9)."),)),
        ("Intervals", (Part("95 %, Fieller's, from differences of successive measured steps."),)),
        (
            "Windows",
            (
                Part("At most 32 of equal length; fewer and longer ones while less than half are resolved. Here "),
                counted(len(windows)),
                Part(". Curves are means of bins, so that no step is left out."),
            ),
        ),
        *((key, (Part(value if value is not None else "not said"),)) for key, value in said.items()),
    ]


def group_share(share: float | None) -> Part:
    """A group's share of tr(Sigma)."""
    return Part("–") if share is None or finite(share) is None else percent(share)
