"""Has every code its section on the pitfalls page, each with its fault found and mended, and no section without one?"""

import re
from pathlib import Path

import pytest

from largebatch.audit.findings import CODES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "pitfalls.md"
SECTION = re.compile(r"^## (LB\d+) (\S+)\n(.*?)(?=^## |\Z)", flags=re.DOTALL | re.MULTILINE)
ROW = re.compile(r"^\| \[(LB\d+)\]\(#(\S+)\) \| (\S+) \| (\w+) \| ([\w ]+) \|$", flags=re.MULTILINE)
SECTIONS = {code: (name, text) for code, name, text in SECTION.findall(PAGE.read_text())}
ROWS = {code: row for code, *row in ROW.findall(PAGE.read_text())}


def shown(text: str) -> str:
    """How a section's code looks for its fault."""
    if "on_two_workers(" in text:
        return "on workers"
    return "in steps" if "in_steps(" in text else "at rest"


def test_every_code_has_a_section_and_every_section_a_code():
    sections = [(code, name) for code, (name, _) in SECTIONS.items()]
    assert sections == [(code, about.name) for code, about in CODES.items()]


def test_the_table_says_what_the_codes_say():
    assert list(ROWS) == list(CODES)
    for code, (anchor, name, severity, way) in ROWS.items():
        about = CODES[code]
        assert (name, severity) == (about.name, about.severity)
        assert anchor == f"{code.lower()}-{about.name}"
        assert way == shown(SECTIONS[code][1]), code


@pytest.mark.parametrize("code", CODES)
def test_a_section_says_why_and_finds_its_code_alone_and_then_nothing(code: str):
    # That the asserts hold is tests/test_docs.py's: it runs the page.
    why, _, block = SECTIONS[code][1].partition("```python\n")
    assert len(re.findall(r"[.:?](?=\s)", why)) >= 2, why
    asserts = re.findall(r"^ *assert .* == (\[.*?\])(?:  #.*)?$", block, flags=re.MULTILINE)
    assert asserts[0] == f'["{code}"]'
    assert "[]" in asserts[1:] and set(asserts) == {f'["{code}"]', "[]"}
