"""How many of what? Batch sizes and durations that carry their unit.

A batch of 64 sequences is not a batch of 64 tokens. Every batch size, noise scale and fit names its
unit, and arithmetic across units is an error instead of a number that means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from largebatch.errors import ConfigError

Unit = Literal["examples", "tokens", "frames", "sequences"]
UNITS: tuple[str, ...] = get_args(Unit)
DURATION_UNITS = (*UNITS, "steps", "epochs")


def check_unit(unit: str) -> str:
    """Return `unit` if it is one a batch can be counted in, else raise ConfigError."""
    if unit not in UNITS:
        raise ConfigError(f"unit {unit!r} is not known. Use one of: {', '.join(UNITS)}.")
    return unit


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The number of units in one optimizer step, over all workers and accumulations (Goyal's kn).

    >>> BatchSize(32) * 8
    BatchSize(count=256, unit='examples')
    >>> BatchSize(256) / BatchSize(32)
    8.0
    """

    count: int
    unit: str = "examples"

    def __post_init__(self) -> None:
        check_unit(self.unit)
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ConfigError(f"a batch size is a whole number of at least 1; got {self.count!r}.")

    def __mul__(self, factor: int) -> BatchSize:
        return BatchSize(self.count * factor, self.unit)

    def __truediv__(self, other: BatchSize) -> float:
        if self.unit != other.unit:
            raise ConfigError(f"cannot divide {self} by {other}: one counts {self.unit}, the other {other.unit}.")
        return self.count / other.count

    def __str__(self) -> str:
        return f"{self.count:,} {self.unit}"


@dataclass(frozen=True, slots=True)
class Duration:
    """How long something lasts: steps, epochs, or units.

    >>> Duration(5, "epochs").in_steps(batch=8192, units_per_epoch=1_281_167)
    781.9...
    """

    count: float
    unit: str = "steps"

    def __post_init__(self) -> None:
        if self.unit not in DURATION_UNITS:
            raise ConfigError(f"duration unit {self.unit!r} is not known. Use one of: {', '.join(DURATION_UNITS)}.")
        if not self.count >= 0:
            raise ConfigError(f"a duration is not negative; got {self.count!r} {self.unit}.")

    def in_steps(self, *, batch: int, units_per_epoch: int) -> float:
        """Return the length in optimizer steps of `batch` units (a real number, not rounded)."""
        match self.unit:
            case "steps":
                return float(self.count)
            case "epochs":
                return self.count * units_per_epoch / batch
            case _:
                return self.count / batch
