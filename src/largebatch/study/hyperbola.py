"""What does S = S_min + E_min / B say at a batch size?

The arithmetic of the steps-examples front of one goal; `frontier` fits it and `predict` predicts it.
"""

from __future__ import annotations

import math

from largebatch.errors import ConfigError
from largebatch.records.schema import Interval


def steps_at(min_steps: float, min_units: float, batch: float) -> float:
    """Return the steps to the goal at `batch`: S_min + E_min / B. Source: McCandlish 2018, (2.11).

    >>> steps_at(100.0, 6400.0, 64)
    200.0
    """
    return min_steps + min_units / batch


def units_at(min_steps: float, min_units: float, batch: float) -> float:
    """Return the units to the goal at `batch`: E_min + S_min B. Source: McCandlish 2018, (2.11).

    >>> units_at(100.0, 6400.0, 64)
    12800.0
    """
    return min_units + min_steps * batch


def largest_worthwhile_batch(b_crit: float, reference_batch: int, extra: float = 0.2) -> float:
    """Return the largest batch that needs at most `extra` more units than the reference batch does.

    E(B) <= (1 + extra) E(B_ref) with E(B) = E_min (1 + B/B_crit) gives B = extra B_crit + (1 + extra) B_ref.

    Args:
        b_crit: critical batch size in units, >= 0.
        reference_batch: the baseline's batch, >= 1.
        extra: extra units allowed, as a fraction (0.2 = 20 %), >= 0.

    Returns:
        A real number of units; `round_down_batch` makes a batch of it.

    Raises:
        ConfigError: a value is out of range.

    Source: from McCandlish 2018, (2.11); Zhang 2024 allow 20 % too, but of steps against a linear extrapolation.

    >>> largest_worthwhile_batch(1000.0, 64)
    276.8
    """
    if not (b_crit >= 0 and math.isfinite(b_crit) and reference_batch >= 1 and extra >= 0):
        raise ConfigError(
            f"needs b_crit >= 0, reference_batch >= 1 and extra >= 0; got {b_crit!r}, {reference_batch!r}, {extra!r}."
        )
    return extra * b_crit + (1 + extra) * reference_batch


def round_down_batch(batch: float, reference_batch: int) -> int:
    """Return the largest reference_batch * 2**k, k >= 0, that is not above `batch` (at least reference_batch).

    >>> round_down_batch(276.8, 64)
    256
    """
    doublings = 0
    while reference_batch * 2 ** (doublings + 1) <= batch * (1 + 1e-12):
        doublings += 1
    return reference_batch * 2**doublings


def ratio_interval(b_simple: Interval, b_crit: Interval) -> Interval:
    """Return B_simple / B_crit with the two intervals combined on the log scale, as of independent numbers.

    The lower half-width of the log ratio is the root of the summed squares of b_simple's lower and b_crit's upper
    log half-widths, and the other way round. Where either is unbounded on the side that matters, so is the ratio.
    """
    if not b_simple.value or not b_crit.value or b_simple.value < 0 or b_crit.value < 0:
        return Interval(value=None)
    value = b_simple.value / b_crit.value
    down = _log_width(b_simple.value, b_simple.low), _log_width(b_crit.value, b_crit.high)
    up = _log_width(b_simple.value, b_simple.high), _log_width(b_crit.value, b_crit.low)
    return Interval(
        value=value,
        low=None if None in down else value * math.exp(-math.hypot(*down)),  # type: ignore[arg-type]
        high=None if None in up else value * math.exp(math.hypot(*up)),  # type: ignore[arg-type]
    )


def _log_width(value: float, end: float | None) -> float | None:
    return None if end is None or end <= 0 else abs(math.log(end / value))
