"""Where does a result become a page that a person can read, offline, on any screen?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from largebatch.records.schema import LargeRun, StudyResult
from largebatch.report.figures import study_figures
from largebatch.report.html import render, write_page
from largebatch.report.measured import baseline_facts, key_words, measured_facts, said_value
from largebatch.report.reading import typed_result
from largebatch.report.summary import has_number, key_numbers, next_steps, summary_rows
from largebatch.report.verdicts import recommended_run, rule_name
from largebatch.report.words import Part, Said, counted, finite, number, say, split_summary

__all__ = ["summary_rows", "write_report"]


def write_report(result: Mapping[str, Any], out: Path) -> Path:
    """Write report.html, one self-contained page, and figures/*.png.

    Args:
        result: The parsed result.json.
        out: The folder to write into.
    Returns:
        The path of report.html.
    Raises:
        RecordError: It is not a result of this schema.
        MissingExtraError: jinja2, plotly or matplotlib is not installed.
        StorageError: The disk refused a file.
    """
    study = typed_result(result)
    return write_page(render_page(study), study_figures(study), out / "report.html")


def render_page(study: StudyResult) -> str:
    """Render the page.

    Args:
        study: The study's typed result.
    Returns:
        The HTML, with plotly.js, styles and data inside.
    Raises:
        MissingExtraError: jinja2 or plotly is not installed.
    """
    figures = study_figures(study)
    headline, rest = split_summary(study.summary)
    return render(
        "template.html.j2",
        figures,
        study=study,
        headline=headline,
        rest=rest,
        key_numbers=key_numbers(study),
        goals=list(zip(study.fronts, study.predictions, strict=False))
        if len(study.fronts) == len(study.predictions)
        else [(front, None) for front in study.fronts],
        recipe=recommended_run(study),
        steps=next_steps(study),
        facts=measured_facts(study),
        reference=baseline_facts(study),
        match_points=study.protocol.get("match_points"),
        say=say,
        counted=counted,
        has_number=has_number,
        rule_name=rule_name,
        error_words=error_words,
        difference_words=difference_words,
        words=key_words,
        said_value=said_value,
    )


def error_words(run: LargeRun) -> Said:
    """Mean and standard deviation of a run's error, or how many seeds diverged."""
    lost = sum(error is None for error in run.errors)
    mean, std = finite(run.mean), finite(run.std)
    if mean is None:
        return Said((Part("diverged"),), (Part(f"{lost} of {len(run.errors)} seeds"),), resolved=False)
    spread = (Part(" ± "), Part(number(std, 2), std)) if std is not None else ()
    return Said((counted(mean), *spread, Part(" %")))


def difference_words(run: LargeRun) -> Said | None:
    """Error minus the baseline's in points; None for the baseline itself and for runs that diverged."""
    if run.role == "baseline" or finite(run.mean) is None:
        return None
    value, low, high = (finite(part) for part in (run.difference.value, run.difference.low, run.difference.high))
    if value is None or low is None or high is None:
        return say(run.difference)
    return Said((_points(value),), (Part("95 % interval "), _points(low), Part(" to "), _points(high)))


def _points(value: float) -> Part:
    """A difference of two percentages, signed."""
    return Part(f"{value:+.2f}".replace("-", "\u2212"), value)
