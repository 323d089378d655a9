"""How is a measured number said so that nobody takes it for more than it is?

A number is marked up as `<data value="...">` with all its digits, and shown rounded. What is not
resolved is never shown as a number; what is bounded on one side is "at least" or "at most".
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from largebatch.records.schema import Interval

NO_REASON = "the gradient is lost in its noise; more steps are needed"


def number(value: float, digits: int = 3) -> str:
    """Round for reading: whole numbers in full, others to `digits` significant digits, thousands apart.

    >>> number(1024), number(0.05), number(212.34), number(1.618)
    ('1,024', '0.05', '212', '1.62')
    """
    if value < 0:
        return "\u2212" + number(-value, digits)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "none"
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if 0 < value < 1e-4:
        return f"{value:.{digits - 1}e}"
    return f"{float(f'{value:.{digits}g}'):.12f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of text, or a number with its exact value behind it."""

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """One measured quantity in words: the headline, and the interval or reason that goes with it."""

    headline: tuple[Part, ...]
    detail: tuple[Part, ...] = ()
    resolved: bool = True

    @property
    def is_interval(self) -> bool:
        """Whether the detail is an interval and not a reason."""
        return self.resolved and any(part.value is not None for part in self.detail)

    @property
    def plain_headline(self) -> str:
        """The headline as text."""
        return "".join(part.text for part in self.headline)

    @property
    def plain_detail(self) -> str:
        """The detail as text."""
        return "".join(part.text for part in self.detail)

    def __str__(self) -> str:
        return f"{self.plain_headline} ({self.plain_detail})" if self.detail else self.plain_headline


def counted(value: float) -> Part:
    """A number that carries its exact value."""
    return Part(number(value), value)


def say(interval: Interval, *, resolved: bool = True, reason: str = "") -> Said:
    """Say an interval: value with bounds, "at least", "at most", or "not resolved" with the reason.

    Args:
        interval: The quantity; None means unbounded on that side.
        resolved: What the study said about it.
        reason: Why it is not resolved.
    Returns:
        The words, with exact values behind the rounded numbers.

    >>> str(say(Interval(value=212.0, low=150.0, high=310.0)))
    '212 (95 % interval 150 to 310)'
    >>> str(say(Interval(value=900.0, low=640.0), resolved=False, reason="every batch was below it"))
    'at least 640 (every batch was below it)'
    >>> str(say(Interval(value=None), resolved=False, reason="no run reached the goal"))
    'not resolved (no run reached the goal)'
    """
    value, low, high = finite(interval.value), finite(interval.low), finite(interval.high)
    reason = tidy(reason).rstrip(". ")
    why = (Part(reason),) if reason else ()
    if resolved and value is not None and (low is None) == (high is None):
        if low is None or high is None:
            return Said((counted(value),), (Part("no interval"),))
        return Said((counted(value),), (Part("95 % interval "), counted(low), Part(" to "), counted(high)))
    if low is not None and high is None and low > 0:
        return Said((Part("at least "), counted(low)), why or (Part("no upper bound"),), resolved=False)
    if high is not None and (low is None or low <= 0):
        return Said((Part("at most "), counted(high)), why or (Part("no lower bound"),), resolved=False)
    return Said((Part("not resolved"),), (Part(reason or NO_REASON),), resolved=False)


def finite(value: float | None) -> float | None:
    """The value, or None when it is not a finite number."""
    return None if value is None or not math.isfinite(value) else value


def percent(fraction: float, *, signed: bool = False) -> Part:
    """A fraction as per cent, with its exact fraction behind it."""
    if not math.isfinite(fraction):
        return Part("not resolved")
    whole = round(100 * fraction)
    return Part(tidy(f"{whole:{'+' if signed and whole else ''}d} %"), fraction)


def tidy(text: str) -> str:
    """Set per cent signs and minus signs in a sentence as everywhere else.

    >>> tidy("20% more, -0.5 to 1e-05")
    '20 % more, −0.5 to 1e-05'
    """
    return re.sub(r"(?<![\w.)\]-])-(?=\d)", "\u2212", re.sub(r"(?<=\d)%", " %", text))


def split_summary(text: str) -> tuple[str, str]:
    """Cut a paragraph after its first sentence, which is the headline; a stop within brackets ends none.

    >>> split_summary("Keep digits at batch 4: 1.8 is no gain. B_crit is 36.2 examples.")
    ('Keep digits at batch 4: 1.8 is no gain.', 'B_crit is 36.2 examples.')
    """
    text = text.strip()
    for stop in re.finditer(r"[.!?]+\s+(?=[^\W\d_a-z])", text):
        first = text[: stop.end()].rstrip()
        if first.count("(") == first.count(")"):
            return first, text[stop.end() :]
    return text, ""


def listed(items: Sequence[str]) -> str:
    """Join words as a sentence does.

    >>> listed(["8", "16", "32"])
    '8, 16 and 32'
    """
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))
