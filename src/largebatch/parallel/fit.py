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
    weights = {size: 1 / taken**2 for size, taken in seconds.items()}

    def mean(of: Mapping[int, float]) -> float:
        return sum(weights[size] * of[size] for size in seconds) / sum(weights.values())

    middle, level = mean({size: float(size) for size in seconds}), mean(seconds)
    away = {size: size - middle for size in seconds}
    per_byte = mean({size: away[size] * seconds[size] for size in seconds}) / mean({s: away[s] ** 2 for s in seconds})
    latency = level - per_byte * middle
    if per_byte < 0:
        latency, per_byte = level, 0.0
    elif latency < 0:
        along = mean({size: size * seconds[size] for size in seconds})
        latency, per_byte = 0.0, along / mean({size: float(size) ** 2 for size in seconds})
    return LinkCost(latency, per_byte, reduce_seconds_per_byte)
