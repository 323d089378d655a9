"""How late is the last of k workers? The expected maximum of k normal delays, in closed form up to one integral."""

from __future__ import annotations

import math
from functools import lru_cache

from largebatch.errors import ConfigError

_STEPS = 4000
_REACH = 9.0  # beyond it a normal delay has a probability of 1e-19: none of 16,384 workers gets there


@lru_cache(maxsize=1024)
def expected_latest(num_workers: int, late: float = 0.0) -> float:
    """Expected maximum of independent standard normal delays.

    Args:
        num_workers: k >= 1.
        late: what is added to one of them, in standard deviations, >= 0: a straggler.

    Returns:
        E[max], in standard deviations: 0 for one worker, 1.42 for 8, 2.83 for 256, 3.97 for 16,384. It grows like
        sqrt(2 ln k), and no faster network makes it smaller.

    Raises:
        ConfigError: a number is out of its range.

    >>> round(expected_latest(2), 6) == round(1 / math.sqrt(math.pi), 6)
    True
    >>> round(expected_latest(256), 2)
    2.83
    """
    if num_workers < 1 or not (late >= 0 and math.isfinite(late)):
        raise ConfigError(f"there is 1 worker or more, late by 0 or more; got {num_workers} and {late!r}.")
    if num_workers == 1:
        return late
    # E[max] = a + the integral from a of 1 - F, where F(a) = 0; F is the product of the workers' own.
    low, high = late - _REACH, late + _REACH  # before it the late one is not there yet
    width = (high - low) / _STEPS
    points = [low + step * width for step in range(_STEPS + 1)]
    values = [1 - _normal(x) ** (num_workers - 1) * _normal(x - late) for x in points]
    return low + width * (math.fsum(values) - (values[0] + values[-1]) / 2)


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
