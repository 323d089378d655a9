"""What number is meant by "50gbit", "20us" or "25MB"? One sentence where none is."""

from __future__ import annotations

import math
import re

from largebatch.errors import ConfigError

_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Z/%]*)\s*", re.IGNORECASE)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES_PER_SECOND = {
    "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9, "kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9, "tb/s": 1e12,
}  # fmt: skip
_BYTES = {"b": 1.0, "kb": 2.0**10, "mb": 2.0**20, "gb": 2.0**30}

_MOST_SECONDS, _MOST_BYTES, _MOST_COUNT = 1e6, 1e15, 10**9
_RATES = (1e-6, 1e18)


def seconds(text: str, name: str) -> float:
    """Seconds of a text such as "120ms" or "20us"; `name` is who asks.

    >>> seconds("120ms", "--backward")
    0.12
    """
    return _at_most(
        _quantity(text, name, _SECONDS, "a time such as 120ms, 20us or 0.2s"), _MOST_SECONDS, " s", text, name
    )


def bytes_per_second(text: str, name: str) -> float:
    """Bytes a second of a text such as "50gbit" or "6.25GB/s"; kilo is 1,000.

    >>> bytes_per_second("50gbit", "--network")
    6250000000.0
    """
    rates = _quantity(text, name, _BYTES_PER_SECOND, "a bandwidth such as 50gbit, 800mbit or 6.25GB/s")
    if rates <= 0:
        raise ConfigError(f"{name} is a bandwidth above 0; got {text!r}.")
    if not _RATES[0] <= rates <= _RATES[1]:
        raise ConfigError(f"{name} is a bandwidth from {_RATES[0]:g} to {_RATES[1]:g} bytes a second; got {text!r}.")
    return rates


def num_bytes(text: str, name: str) -> float:
    """Bytes of a text such as "25MB"; kilo is 1,024, as in DistributedDataParallel's buckets.

    >>> num_bytes("25MB", "--bucket") == 25 * 2**20
    True
    """
    return _at_most(_quantity(text, name, _BYTES, "a size such as 25MB or 512KB"), _MOST_BYTES, " bytes", text, name)


def share(text: str, name: str) -> float:
    """A part of one, of a text such as "9%" or "0.09".

    >>> share("9%", "--jitter")
    0.09
    """
    return _at_most(_quantity(text, name, {"%": 0.01, "": 1.0}, "a part such as 9% or 0.09"), 1.0, "", text, name)


def counts(text: str, name: str) -> list[int]:
    """Whole numbers of 1 or more, ascending, of a text such as "8,64,256".

    >>> counts("256,8", "--gpus")
    [8, 256]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and part.strip("0") for part in parts):
        raise ConfigError(f"{name} is a list of whole numbers of 1 or more, such as 8,64,256; got {text!r}.")
    if any(len(part) > 4000 for part in parts):  # what Python itself refuses to read
        raise ConfigError(f"{name} is a list of numbers of {_MOST_COUNT:,} at most; one has more than 4,000 digits.")
    return sorted({count(int(part), name) for part in parts})


def count(value: int, name: str) -> int:
    """The same whole number, where it is one that can be reckoned with.

    >>> count(1000, "--concurrency")
    1000
    """
    if value > _MOST_COUNT:
        raise ConfigError(f"{name} is {_MOST_COUNT:,} at most; got {value}.")
    return value


def _at_most(value: float, most: float, unit: str, text: str, name: str) -> float:
    if value > most:
        raise ConfigError(f"{name} is {most:g}{unit} at most; got {text!r}.")
    return value


def _quantity(text: str, name: str, units: dict[str, float], example: str) -> float:
    match = _NUMBER.fullmatch(text.replace("µ", "u"))
    if match is None or match[2].lower() not in units:
        raise ConfigError(f"{name} is {example}; got {text!r}.")
    try:
        value = float(match[1])
    except ValueError:
        raise ConfigError(f"{name} is {example}; got {text!r}.") from None
    if not math.isfinite(value):
        raise ConfigError(f"{name} is {example}; got {text!r}.")
    return float(f"{value * units[match[2].lower()]:.12g}")
