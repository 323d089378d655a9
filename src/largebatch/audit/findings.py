"""What can an audit find, and what does each finding say?

One code is one mistake. A finding carries what was seen in this set-up; why it matters, what to do and when the
finding is wrong belong to its code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: the training is not what was asked for. warning: it is known to cost accuracy at a large batch. note: it
differs from what the paper did, and may be meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """One mistake that an audit knows."""

    name: str
    """Short name, words joined by "-"."""
    severity: Severity
    """How bad it is."""
    why: str
    """Why it matters, with its source."""
    fix: str
    """What to do."""
    wrong_when: str
    """When the finding is none."""


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


CODES: dict[str, Code] = {}
"""Every mistake by its code, "LB1xx" of the optimizer and schedule at rest, "LB2xx" of the model, "LB3xx" of the data
order, "LB4xx" of what only steps show."""
