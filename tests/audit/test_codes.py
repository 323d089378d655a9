"""Does every code say why it matters, what to do and when it is wrong, and is none renumbered?"""

import re

import pytest

from audit.setups import FAULTS
from largebatch.audit.findings import CODES, Finding, sort_findings

NAMES = {
    "LB101": ("decay-on-norms", "warning"),
    "LB102": ("decay-on-biases", "note"),
    "LB103": ("no-zero-gamma", "note"),
    "LB104": ("lr-not-scaled", "error"),
    "LB105": ("lr-scaled-twice", "error"),
    "LB106": ("no-warmup", "warning"),
    "LB107": ("momentum-correction", "error"),
    "LB108": ("batch-beyond-b-crit", "warning"),
    "LB109": ("parameter-not-in-optimizer", "error"),
    "LB201": ("bn-size-differs", "warning"),
    "LB202": ("sync-bn-over-all", "warning"),
    "LB203": ("eval-in-training-statistics", "error"),
    "LB301": ("sampler-without-set-epoch", "error"),
    "LB302": ("overlapping-shuffles", "error"),
    "LB303": ("padding-repeats", "note"),
    "LB304": ("no-shuffle", "warning"),
    "LB401": ("schedule-per-microbatch", "error"),
    "LB402": ("schedule-per-process", "error"),
    "LB403": ("loss-over-uneven-microbatches", "warning"),
    "LB404": ("loss-over-uneven-workers", "warning"),
    "LB405": ("loss-not-divided-by-accumulation", "error"),
    "LB406": ("clipping-before-measuring", "warning"),
    "LB407": ("optimizer-per-microbatch", "error"),
}
"""Users write these numbers into their ignore lists: one that was given stays."""
SEEN_IN_STEPS = {"LB203", "LB301", "LB401", "LB402", "LB403", "LB404", "LB405", "LB406", "LB407"}


def test_the_codes_are_these_with_these_severities():
    assert {key: (code.name, code.severity) for key, code in CODES.items()} == NAMES
    assert list(CODES) == sorted(CODES)


@pytest.mark.parametrize("key", CODES)
def test_a_code_says_why_with_its_source_what_to_do_and_when_it_is_none(key: str):
    code = CODES[key]
    for text in (code.why, code.fix, code.wrong_when):
        assert text.endswith("."), text
        assert "  " not in text
    if key != "LB109":  # which needs no paper
        assert re.search(r"(Goyal 2017|McCandlish 2018|Malladi 2022)[,)]? ?", code.why), code.why
    assert code.why[0].isupper() and code.fix[0].isupper() and code.wrong_when[0].islower()


def test_every_code_that_is_seen_at_rest_has_faults_that_trigger_it():
    # test_fault_injection puts each of FAULTS into sane set-ups, which have no finding without it.
    assert set(FAULTS) == set(CODES) - SEEN_IN_STEPS


def test_a_finding_reads_as_a_paragraph_with_what_was_seen_in_it():
    text = str(Finding(code="LB106", seen="The scheduler starts at its peak of 3.2."))
    assert text.startswith("LB106 no-warmup (warning): The scheduler starts at its peak of 3.2. Early in training")
    assert "What to do: Raise the rate" in text
    assert "Wrong when: the rate is raised by hand" in text


def test_findings_are_sorted_by_severity_then_code():
    codes = ["LB102", "LB304", "LB302", "LB101", "LB104"]
    assert [f.code for f in sort_findings(Finding(code=code, seen="") for code in codes)] == [
        "LB104", "LB302", "LB101", "LB304", "LB102",
    ]  # fmt: skip
