"""Does the page of a moments log say what the log says, and does it work in a real browser, offline?"""

import dataclasses
import re
from typing import Any

import pytest
from tests.report.moments_sample import SHARES, write_log
from tests.report.test_browser import LOW_CONTRAST, SMALL_TEXT, browser, opened  # noqa: F401
from tests.report.test_page import Page

from largebatch.noise.history import history
from largebatch.records.moments_log import read_moments
from largebatch.report.moments_figures import LOOKS, moments_figures
from largebatch.report.moments_page import render_moments_page, write_moments_report
from largebatch.report.plotly_page import plotly_figure


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return history(read_moments(write_log(tmp_path_factory.mktemp("log") / "moments.jsonl")))


def lost(tmp_path):
    return history(read_moments(write_log(tmp_path / "lost.jsonl", 100, noise=60.0)))


def test_every_number_on_the_page_is_one_of_the_log(said):
    page = Page(render_moments_page(said, name="moments"))
    last = said.total.windows[-1]
    values = {float(value) for value, _ in page.data}
    for interval in (last.b_simple, said.total.b_simple, *(group.b_simple for group in said.groups.values())):
        assert {interval.value, interval.low, interval.high} <= values
    assert {float(said.num_steps), float(said.typical_batch)} <= values
    for value, text in page.data:
        shown = float(text.replace(",", "").replace("\u2212", "-").rstrip("% ").strip())
        exact = float(value) * (100 if "%" in text else 1)
        assert shown == pytest.approx(exact, rel=6e-3, abs=0.5 if "%" in text else 0)


def test_the_advice_comes_first_and_what_is_not_known_is_on_the_page(said):
    text = Page(render_moments_page(said, name="moments")).text
    assert re.sub(r"\s|_", "", said.advice)[:200] in re.sub(r"\s|_", "", text)
    assert text.startswith("Batch 64 examples is")
    assert "What is not known" in text
    assert "Typical batch" in text
    assert "last measured step;" not in text
    for name in SHARES:
        assert name in text


def test_windows_and_the_batch_are_in_the_picture(said):
    noise, moments, groups = moments_figures(said)
    names = [trace.name for trace in noise.traces]
    assert names[:2] == ["batch", "B_simple, a window"]
    assert noise.traces[1].y == tuple(window.b_simple.value for window in said.total.windows)
    assert set(noise.traces[0].y) == {64.0}
    assert noise.y.low < 64 < noise.y.high
    trace, left, grad = moments.traces
    assert trace.y == said.curve.trace_cov
    assert grad.y == said.curve.grad_sq_norm
    assert left.y == pytest.approx([value / 64 for value in said.curve.trace_cov])
    assert [one.name for one in groups.traces] == list(SHARES)
    assert "grows" in noise.plain_caption


def test_unresolved_windows_are_marked_as_such_and_never_as_numbers(tmp_path):
    said = lost(tmp_path)
    noise, moments, _ = moments_figures(said)
    marked = [trace for trace in noise.traces if trace.name.startswith("not resolved")]
    assert sum(len(trace.x) for trace in marked) == len(said.total.windows)
    assert not any(trace.name.startswith("B_simple") for trace in noise.traces)
    assert "not resolved in any window" in noise.plain_caption
    assert any(value is None for value in moments.traces[-1].y), "a mean below 0 has no place on a log axis"
    text = Page(render_moments_page(said, name="lost")).text
    assert text.startswith("Nothing is advised after 100 measured steps")
    assert "Raise" not in text


def test_many_groups_are_all_in_the_table_and_no_two_lines_look_alike(said):
    many = dataclasses.replace(said, groups={f"layer{n}": said.groups["rest"] for n in range(40)})
    figure = moments_figures(many)[-1]
    looks = {(trace.colour, trace.dash, trace.symbol) for trace in figure.traces}
    assert len(looks) == len(figure.traces) == len(LOOKS)
    assert "25 more are in the table" in figure.plain_caption
    page = Page(render_moments_page(many, name="moments")).text
    assert all(f"layer{n} " in page for n in range(40))


def test_a_groups_name_is_text_and_never_markup(said):
    page = render_moments_page(
        dataclasses.replace(said, groups={"<img src=x onerror=alert(1)>": said.groups["rest"]}), name="<b>"
    )
    assert "<img src=x" not in page
    assert "<title><b>" not in page


def test_a_million_steps_make_no_larger_pictures_than_a_thousand(said):
    for figure in moments_figures(said):
        drawn = plotly_figure(figure)
        assert sum(len(trace["x"]) for trace in drawn["data"]) <= 1000


def test_the_page_and_its_figures_lie_beside_each_other_under_the_logs_name(tmp_path, said):
    page = write_moments_report(said, tmp_path / "out", name="night")
    assert page == tmp_path / "out" / "night.html"
    assert sorted(file.name for file in (tmp_path / "out" / "figures").iterdir()) == [
        "night-groups.png", "night-moments.png", "night-noise.png",
    ]  # fmt: skip
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in (tmp_path / "out" / "figures").iterdir())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("kind", ["resolved", "lost", "young"])
def test_the_page_is_whole_and_readable(
    browser: Any,  # noqa: F811
    said: Any, tmp_path: Any, width: int, scheme: str, kind: str,
) -> None:  # fmt: skip
    young = {"young": 1}.get(kind)
    shown = said if kind == "resolved" else lost(tmp_path)
    if young:
        shown = history(read_moments(write_log(tmp_path / "young.jsonl", young)))
    report = write_moments_report(shown, tmp_path, name="moments")
    page, trouble = opened(browser, report, width, scheme)
    drawn = page.evaluate(
        "() => [...document.querySelectorAll('.plot')].map((plot) => [plot.dataset.figure, "
        "plot.querySelectorAll('.trace path').length, "
        "plot.querySelector('.main-svg').getBoundingClientRect().width <= plot.clientWidth + 1])"
    )
    assert [name for name, *_ in drawn] == ["noise", "moments", "groups"]
    assert all(fits for *_, fits in drawn)
    if kind == "resolved":
        assert all(marks >= 3 for _, marks, _ in drawn)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(SMALL_TEXT) == []
    assert page.evaluate(LOW_CONTRAST) == []
    assert trouble == []
    page.context.close()
