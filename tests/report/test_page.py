"""Does the page say what the result says: every number, no invented one, and no foreign markup?"""

import dataclasses
import json
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.report.sample import WHY_UNRESOLVED, sample_result, sample_study

from largebatch.errors import RecordError
from largebatch.records.files import plain
from largebatch.records.schema import Interval, StudyResult
from largebatch.report.page import render_page, summary_rows, write_report
from largebatch.report.reading import read_result, typed_result


class Page(HTMLParser):
    """Collects the visible text and every <data value>."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.data: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.order: list[str] = []
        self._open: list[str] = []
        self._value = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link"):
            self._open.append(tag)
            self.words.append("" if tag in ("i", "sub", "data", "span") else " ")
            self.order.append(tag)
        if tag == "data":
            self._value = dict(attrs)["value"] or ""

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style", "title", "head"} & set(self._open):
            self.words.append(data)
            if self._open[-1:] == ["data"]:
                self.data.append((self._value, data))

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@cache
def sample_html() -> str:
    return render_page(sample_study())


def numbers_in(value: Any) -> set[float]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return set()
    if isinstance(value, int | float):
        return {float(value)}
    items = value.values() if isinstance(value, dict) else value
    return set().union(*(numbers_in(item) for item in items))


def test_every_marked_number_on_the_page_is_in_the_result() -> None:
    known = numbers_in(sample_result())
    page = Page(sample_html())
    assert len(page.data) > 100
    assert [value for value, _ in page.data if float(value) not in known] == []


def test_every_shown_number_is_its_exact_value_rounded() -> None:
    for value, shown in Page(sample_html()).data:
        exact, text = float(value), shown.replace(",", "").replace("\u2212", "-").replace("%", "").strip()
        if "%" in shown and not shown.startswith("+"):
            exact = 100 * (1 - exact)
        elif "%" in shown:
            exact = 100 * exact
        # three significant digits (two for a std), whole per cent, hundredths of a point for a difference
        assert float(text) == pytest.approx(exact, rel=0.03, abs=0.51 if "%" in shown else 0.0051), (value, shown)


def test_the_summary_is_the_first_content_and_headings_are_in_order() -> None:
    page = Page(sample_html())
    assert page.text.startswith(sample_study().summary)
    levels = [int(tag[1]) for tag in page.order if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_the_headline_is_the_first_sentence_and_the_rest_a_paragraph() -> None:
    first = "Train digits at batch 8 instead of 4 (see sec. 2. Then 3.): 1.8 times fewer steps for 10% more examples."
    html = render_page(
        dataclasses.replace(sample_study(), summary=f"{first} B_crit is 36.2. At 128 it ends at 16.2 %.")
    )
    title = re.search(r"<h1>(.*?)</h1>", html)
    assert title is not None
    assert Page(title[1]).text == first.replace("10%", "10 %")
    assert '<p class="lead">B<sub>crit</sub> is 36.2. At 128 it ends at 16.2\u00a0%.</p>' in html


def test_per_cent_signs_stand_apart_everywhere() -> None:
    study = sample_study()
    front = dataclasses.replace(study.fronts[-1], resolved=False, reason="only 20% of the seeds, -3.5 to 2.")
    study = dataclasses.replace(
        study,
        fronts=(*study.fronts[:-1], front),
        summary="It costs 10% more. Or 20%.",
        winner="By 3% to 4%.",
        warnings=("5% is missing",),
        recommendation=dataclasses.replace(study.recommendation, reason="within 20% of it"),
    )
    assert re.findall(r"\d%", Page(render_page(study)).text) == []
    rows = summary_rows(study.to_json())
    assert rows[2][2].startswith("only 20 % of the seeds, \u22123.5 to 2; goal")
    assert [part for row in rows for part in row if re.search(r"\d%", part)] == []


def test_the_protocol_reads_as_sentences_and_unknown_rules_keep_their_key() -> None:
    definitions = {"b_simple": "tr(Sigma) / |G|^2, ratio of mean moments", "goal": "training loss, first crossing"}
    protocol = {"lr_factor": 2.0, "extra_units": 0.2, "num_moons": 7, "definitions": definitions}
    reference = {"batch": 32, "lr": 0.1, "reference_batch": 32, "reference_lr": 0.1, "units_per_epoch": 999}
    study = dataclasses.replace(sample_study(), unit="tokens", protocol=protocol, reference=reference)
    text = Page(render_page(study)).text
    assert "A goal Training loss, first crossing." in text
    assert "It costs one run. tr(Σ) / |G|², ratio of mean moments." in text
    assert "Learning-rate search Steps by a factor of 2." in text
    assert "Allowed extra tokens A fraction of 0.2 over the baseline's, for the recommended batch." in text
    assert "Number of moons 7" in text
    assert "Tokens per epoch 999" in text
    assert "Reference batch" not in text


def variants() -> dict[str, StudyResult]:
    """Results that a real study can come to."""
    study = sample_study()
    unresolved = tuple(
        dataclasses.replace(
            front,
            resolved=False,
            reason="the goal was reached at 2 batch sizes; the hyperbola needs at least 3.",
            **dict.fromkeys(("b_crit", "min_steps", "min_units", "b_simple_over_b_crit"), Interval(value=None)),
            residual_std=None,
        )
        for front in study.fronts
    )
    empty = tuple(dataclasses.replace(front, points=()) for front in unresolved)
    kept = dataclasses.replace(
        study.recommendation, batch=32, lr=0.1, source="baseline", extra_units=0.0, fewer_steps=1.0
    )
    return {
        "unresolved": dataclasses.replace(study, fronts=unresolved, recommendation=kept),
        "nothing reached": dataclasses.replace(study, fronts=empty, recommendation=kept, windows=()),
        "no eps_max": dataclasses.replace(study, eps_max=None, b_simple=Interval(value=None)),
        "no elbow": dataclasses.replace(study, large=study.large[:3]),
        "baseline alone": dataclasses.replace(study, large=study.large[:1], recommendation=kept),
        "tokens": dataclasses.replace(study, unit="tokens"),
        "one goal": dataclasses.replace(
            study, fronts=study.fronts[3:], predictions=study.predictions[3:], goals=(0.08,)
        ),
    }


@pytest.mark.parametrize("name", variants())
def test_every_result_a_study_can_come_to_is_drawn_and_says_no_nonsense(name: str, tmp_path: Path) -> None:
    study = variants()[name]
    (tmp_path / "result.json").write_text(json.dumps(plain(study.to_json())))
    page = write_report(read_result(tmp_path / "result.json"), tmp_path)
    text = Page(page.read_text()).text
    assert re.findall(r"\b(?:nan|None|inf)\b|\.\.|\{\}", text) == []
    assert len(list((tmp_path / "figures").iterdir())) == (5 if study.large else 3)
    if name == "tokens":
        assert "examples" not in text.replace(study.summary, "").replace(study.recommendation.reason, "").replace(
            "1,024 fixed training examples", ""
        )
        assert 'unit="tokens"' in text


def test_a_baseline_that_stays_is_not_said_to_rest_on_the_noise_scale() -> None:
    study = variants()["unresolved"]
    text = Page(render_page(study)).text
    assert "from the noise scale alone" not in text
    assert "nothing that was measured shows that a larger one pays" in text
    assert "costs more" not in text
    assert summary_rows(study.to_json())[5][1] == "0 %"


def test_a_recommended_batch_whose_full_run_is_unresolved_says_so() -> None:
    study = sample_study()
    assert "In the full runs here" not in Page(render_page(study)).text
    large = tuple(dataclasses.replace(run, verdict="unresolved") if run.batch == 64 else run for run in study.large)
    text = Page(render_page(dataclasses.replace(study, large=large))).text
    assert "In the full runs here this batch is unresolved" in text


def test_where_it_breaks_is_not_said_of_a_batch_that_one_rule_keeps() -> None:
    # at 256 the linear rule matches and the other is worse; at 1,024 none matches
    text = Page(sample_html()).text
    assert "At batch 1,024 the linear rule diverges and predicted ε(B) ends worse, and no rule" in text
    assert "Some run at batch 256" not in text


def test_what_is_not_resolved_is_said_with_its_reason_and_never_as_a_number() -> None:
    study = sample_study()
    hidden = Interval(value=987654.0, low=None, high=None)
    front = dataclasses.replace(
        study.fronts[-1], resolved=False, reason="too few seeds", b_crit=hidden, min_steps=hidden, min_units=hidden
    )
    study = dataclasses.replace(study, fronts=(*study.fronts[:-1], front), b_simple=Interval(value=None, low=44.0))
    html = render_page(study)
    text = Page(html).text
    assert "987654" not in html
    assert "987,654" not in html
    assert "not resolved too few seeds" in text
    assert "at least 44" in text
    assert "at most 142 " + WHY_UNRESOLVED in text


@pytest.mark.parametrize("low, high, words", [(44.0, None, "at least 44"), (None, 90.0, "at most 90")])
def test_a_one_sided_interval_is_a_bound_in_the_summary(low: float | None, high: float | None, words: str) -> None:
    front = dataclasses.replace(
        sample_study().fronts[-1], resolved=False, reason="one side", b_crit=Interval(value=60.0, low=low, high=high)
    )
    rows = summary_rows(sample_result(fronts=(*sample_study().fronts[:-1], front)))
    assert ("Critical batch B_crit", f"{words} examples", "one side; goal: loss 0.08, the hardest") in rows


def test_the_terminal_table_says_the_same_as_the_tiles() -> None:
    rows = summary_rows(sample_result())
    text = Page(sample_html()).text
    assert rows[0] == ("Recommended batch", "64 examples", "learning rate 0.2; from the measured front")
    assert rows[3][:2] == ("B_simple / B_crit", "1.12")
    for _, value, _ in rows:
        assert value in text


def test_names_from_the_task_cannot_become_markup(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script>"
    large = tuple(dataclasses.replace(run, rule=nasty, role=nasty) for run in sample_study().large)
    html = write_report(
        sample_result(task=nasty, summary=f"{nasty} is fine", warnings=(nasty,), winner=nasty, large=large), tmp_path
    ).read_text()
    assert nasty not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; is fine" in html


def test_the_order_of_the_page() -> None:
    html = sample_html()
    wanted = ["numbers", "noise", "front", "rate", "curves", "error", "recipe", "next", "warnings", "how"]
    assert re.findall(r'<h2 id="(\w+)"', html) == wanted


def test_every_recipe_number_has_its_reason_and_source() -> None:
    study = sample_study()
    text = Page(render_page(study)).text
    for row in study.large[1].recipe:
        assert f"{row.rule} {row.source}" in text


def test_the_page_names_nothing_outside_itself() -> None:
    html = re.sub(r"(?s)<script>.*?</script>", "", sample_html())
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', html) == []
    assert "http://" not in html
    assert "https://" not in html


def test_report_and_pngs_are_written_and_nothing_else(tmp_path: Path) -> None:
    page = write_report(sample_result(), tmp_path)
    assert page == tmp_path / "report.html"
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    names = ["curves", "error", "front", "learning_rate", "noise"]
    assert written == [*(f"figures/{name}.png" for name in names), "report.html"]


def test_a_result_survives_the_way_over_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(plain(sample_result())))
    assert typed_result(read_result(path)) == sample_study()


def test_a_missing_or_corrupt_result_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="does not exist"):
        read_result(tmp_path / "result.json")
    (tmp_path / "result.json").write_text('{"schema_version": 1, "task"')
    with pytest.raises(RecordError, match="cannot be read as JSON"):
        read_result(tmp_path / "result.json")
    with pytest.raises(RecordError, match="schema version 99"):
        write_report({**sample_result(), "schema_version": 99}, tmp_path)
    with pytest.raises(RecordError, match=r"lacks fronts\[0\]\.b_crit"):
        fronts = [{key: item for key, item in front.items() if key != "b_crit"} for front in sample_result()["fronts"]]
        write_report({**sample_result(), "fronts": fronts}, tmp_path)
    with pytest.raises(RecordError, match="task should be a str and is 3"):
        write_report({**sample_result(), "task": 3}, tmp_path)
    with pytest.raises(RecordError, match="unknown key colour"):
        write_report({**sample_result(), "colour": "red"}, tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_the_report_is_importable_without_torch_or_any_plotting_package() -> None:
    # The package's front door may offer what needs torch; asked here is what this room itself loads.
    code = (
        "import sys, types, importlib.util; package = types.ModuleType('largebatch'); "
        "package.__path__ = importlib.util.find_spec('largebatch').submodule_search_locations; "
        "sys.modules['largebatch'] = package; import largebatch.report.page; "
        "print([name for name in ('torch', 'plotly', 'matplotlib', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
