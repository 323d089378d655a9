"""What does a wire cost, by the times of messages over it?"""

from __future__ import annotations

from collections.abc import Mapping

from largebatch.errors import ConfigError
from largebatch.parallel.cost import LinkCost


def fit_link(seconds: Mapping[int, float], *, reduce_seconds_per_byte: float = 0.0) -> LinkCost:
    """Latency and bandwidth of the line through times of messages, by least squares of the relative errors.

    Args:
        seconds: bytes of a message -> seconds it took; two sizes or more.
        reduce_seconds_per_byte: measured apart; goes into the result as it is.

    Returns:
        LinkCost: neither is below 0; where the best line's would be, the best line without it.

    Raises:
        ConfigError: fewer than two sizes, or a time that is not above 0.

    >>> link = fit_link({1000: 2e-5, 101_000: 12e-5})
    >>> round(link.latency, 9), round(link.seconds_per_byte, 15)
    (1.9e-05, 1e-09)
    """
    if len(seconds) < 2 or not all(taken > 0 for taken in seconds.values()):
        raise ConfigError(f"a wire is fitted to positive times of two sizes or more; got {dict(seconds)}.")
    # Minimise the sum of (a x + b y - 1)^2 with x = 1/t, y = n/t.
    points = [(1 / taken, size / taken) for size, taken in seconds.items()]
    xx, xy, yy = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(p[i] for p in points) for i in (0, 1))
    determinant = xx * yy - xy * xy
    latency, per_byte = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if latency < 0:
        latency, per_byte = 0.0, y / yy
    elif per_byte < 0:
        latency, per_byte = x / xx, 0.0
    return LinkCost(latency, per_byte, reduce_seconds_per_byte)
