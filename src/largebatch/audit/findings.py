"""What was found, and what does each finding say?

One code is one mistake. A finding carries what was seen in this set-up; why it matters, what to do and when the
finding is wrong belong to its code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from largebatch.audit.codes import CODES, Code, Severity

__all__ = ["CODES", "Code", "Finding", "Severity", "sort_findings"]

_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One mistake in one set-up."""

    code: str
    """Key of CODES."""
    seen: str
    """What was seen, with names and values."""

    @property
    def about(self) -> Code:
        """What its code says."""
        return CODES[self.code]

    def __str__(self) -> str:
        """All of it, as a paragraph."""
        about = self.about
        return (
            f"{self.code} {about.name} ({about.severity}): {self.seen} {about.why} What to do: {about.fix} "
            f"Wrong when: {about.wrong_when}"
        )


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, errors first, then warnings and notes, each by code.

    >>> notes_last = sort_findings([Finding(code="LB102", seen=""), Finding(code="LB104", seen="")])
    >>> [finding.code for finding in notes_last]
    ['LB104', 'LB102']
    """
    return sorted(findings, key=lambda finding: (_ORDER[finding.about.severity], finding.code))
