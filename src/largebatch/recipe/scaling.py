"""Which learning rate goes with which batch?

Pure functions of numbers. The first three rules answer from the batch alone; the noise-scale rule needs a measured
`b_simple`, the surge rule a measured critical batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from largebatch.errors import ConfigError

ScalingRule = Callable[[float, int, int], float]
"""(reference_lr, reference_batch, batch) -> lr."""


def linear(reference_lr: float, reference_batch: int, batch: int) -> float:
    """Learning rate in proportion to the batch: k times the batch goes with k times the rate.

    Assumes plain or momentum SGD whose gradients change little over the k small steps that one large step
    replaces; it holds down to k < 1 as well, and breaks early in training (hence warmup) and beyond a largest batch.

    Args:
        reference_lr: rate tuned at `reference_batch`, > 0.
        reference_batch: units in a step of the baseline, >= 1.
        batch: units in a step now, >= 1.

    Returns:
        The rate at `batch`.

    Raises:
        ConfigError: a number is out of its range.

    >>> linear(0.1, 256, 8192)
    3.2

    Source: Goyal 2017, sec. 2.1, linear scaling rule.
    """
    _check(reference_batch=reference_batch, batch=batch, reference_lr=reference_lr)
    return reference_lr * (batch / reference_batch)


def sqrt(reference_lr: float, reference_batch: int, batch: int) -> float:
    """Learning rate in proportion to the square root of the batch: keeps the variance of an update.

    Args, Returns, Raises: as `linear`.

    >>> sqrt(0.1, 64, 1024)
    0.4

    Source: Krizhevsky 2014 (theory, not what it used); worse than linear for SGD in Goyal 2017, Table 2a.
    """
    _check(reference_batch=reference_batch, batch=batch, reference_lr=reference_lr)
    return reference_lr * math.sqrt(batch / reference_batch)


def none(reference_lr: float, reference_batch: int, batch: int) -> float:
    """Learning rate left as it was tuned, whatever the batch.

    Args, Returns, Raises: as `linear`.

    >>> none(0.1, 256, 8192)
    0.1

    Source: the control of Goyal 2017, Table 2a.
    """
    _check(reference_batch=reference_batch, batch=batch, reference_lr=reference_lr)
    return reference_lr


RULES: dict[str, ScalingRule] = {"linear": linear, "sqrt": sqrt, "none": none}
"""The rules that ask for nothing but the batch."""

MEASURED_RULES = ("noise", "surge")
"""The rules that ask for a measured noise scale or critical batch as well."""

SOURCES: dict[str, str] = {
    "linear": "Goyal 2017, sec. 2.1",
    "sqrt": "Krizhevsky 2014; Goyal 2017, Table 2a",
    "none": "Goyal 2017, Table 2a",
    "noise": "McCandlish 2018, eq. (2.6)",
    "surge": "Li 2024, surge phenomenon",
}
"""Where each rule comes from."""

SHOWN_FOR: dict[str, tuple[str, ...]] = {
    "linear": ("sgd", "velocity_sgd", "lars"),
    "sqrt": ("adam", "adamw", "lamb"),
    "noise": ("sgd", "velocity_sgd"),
    "surge": ("adam", "adamw"),
}
"""The optimizers that each rule was derived or shown for: Goyal 2017 (linear), You 2017 (linear, LARS), Malladi 2022
(sqrt, Adam), You 2019 (sqrt, LAMB), McCandlish 2018 (noise), Li 2024 (surge)."""


def scaled_lr(
    rule: str,
    reference_lr: float,
    reference_batch: int,
    batch: int,
    *,
    b_simple: float | None = None,
    b_crit: float | None = None,
) -> float:
    """Learning rate at `batch` by the rule of that name.

    Args:
        rule: one of `RULES` or `MEASURED_RULES`.
        reference_lr, reference_batch, batch: as `linear`.
        b_simple: measured noise scale in the unit of `batch`; the rule "noise" needs it.
        b_crit: measured critical batch in the unit of `batch`; the rule "surge" peaks there, and at `b_simple` where
            `b_crit` is not known.

    Returns:
        The rate at `batch`.

    Raises:
        ConfigError: the rule is not known (the sentence names those that are), what it needs was not measured, or a
            number is out of its range.

    >>> scaled_lr("linear", 0.02, 64, 512)
    0.16
    >>> scaled_lr("noise", 0.1, 64, 128, b_simple=64)  # half of eps_max = 0.2 at 64, two thirds of it at 128
    0.13333333333333333
    """
    if check_rule(rule) in RULES:
        return RULES[rule](reference_lr, reference_batch, batch)
    _check(reference_batch=reference_batch, batch=batch, reference_lr=reference_lr)
    if rule == "noise":
        if b_simple is None:
            raise ConfigError(
                "learning-rate rule 'noise' needs a measured noise scale; got b_simple=None. "
                "Measure it (NoiseScaleMonitor) and give b_simple=, or use another rule."
            )
        return noise_scale_lr(eps_max_from(reference_lr, b_simple, reference_batch), b_simple, batch)
    b_noise = b_simple if b_crit is None else b_crit
    if b_noise is None:
        raise ConfigError(
            "learning-rate rule 'surge' needs the batch at which the rate peaks; got b_crit=None and b_simple=None. "
            "Give the measured critical batch as b_crit=, or use another rule."
        )
    return surge_lr(reference_lr / surge_lr(1.0, b_noise, reference_batch), b_noise, batch)


def check_rule(rule: str) -> str:
    """Return `rule` if it is the name of a scaling rule, else raise ConfigError."""
    if rule not in RULES and rule not in MEASURED_RULES:
        raise ConfigError(
            f"learning-rate rule {rule!r} is not known. Use one of: {', '.join((*RULES, *MEASURED_RULES))}; "
            f"or give the learning rate itself with the name of the rule that chose it."
        )
    return rule


def noise_scale_lr(eps_max: float, b_simple: float, batch: int) -> float:
    """Learning rate that makes the most of one step when the noise scale is `b_simple`.

    Linear in the batch far below the noise scale, flat at `eps_max` far above it, half of it where they are equal.
    Assumes SGD on a loss that is quadratic over one step, with the Hessian in proportion to the identity
    (`b_simple` stands for the exact noise scale).

    Args:
        eps_max: the best rate of a step without noise, > 0.
        b_simple: gradient noise scale in the unit of `batch`, >= 0.
        batch: units in a step, >= 1.

    Returns:
        eps_max / (1 + b_simple / batch).

    Raises:
        ConfigError: a number is out of its range.

    >>> noise_scale_lr(0.27, 96, 96)
    0.135

    Source: McCandlish 2018, eq. (2.6), with b_simple of (2.9) for b_noise.
    """
    _check(batch=batch, eps_max=eps_max)
    _check_noise_scale(b_simple)
    return eps_max / (1.0 + b_simple / batch)


def eps_max_from(lr: float, b_simple: float, batch: int) -> float:
    """The rate of a step without noise, from the rate `lr` tuned at `batch`: the inverse of `noise_scale_lr`.

    Args:
        lr: rate tuned at `batch`, > 0.
        b_simple: gradient noise scale in the unit of `batch`, >= 0.
        batch: units in a step, >= 1.

    Returns:
        lr * (1 + b_simple / batch).

    Raises:
        ConfigError: a number is out of its range.

    >>> eps_max_from(0.135, 96, 96)
    0.27

    Source: McCandlish 2018, eq. (2.6), solved for eps_max.
    """
    _check(batch=batch, lr=lr)
    _check_noise_scale(b_simple)
    return lr * (1.0 + b_simple / batch)


def surge_lr(eps_max: float, b_noise: float, batch: int) -> float:
    """Learning rate that makes the most of one step of an optimizer that follows the gradient's sign, such as Adam.

    As the square root of the batch far below `b_noise`, largest there, and falling beyond: past it a larger batch
    asks for a smaller rate. Assumes a loss that is quadratic over one step, noise that is normal and large in each
    coordinate (batch far below sigma_i^2 / mu_i^2), and Adam near to sign descent; the flat end that the source
    derives for still larger batches is left out.

    Args:
        eps_max: the rate at its peak, > 0.
        b_noise: the batch at the peak, where examples and steps trade evenly (the critical batch), > 0.
        batch: units in a step, >= 1.

    Returns:
        2 eps_max / (sqrt(b_noise / batch) + sqrt(batch / b_noise)).

    Raises:
        ConfigError: a number is out of its range.

    >>> [round(surge_lr(1.0, 1000.0, batch), 3) for batch in (100, 250, 1000, 4000, 10_000)]
    [0.575, 0.8, 1.0, 0.8, 0.575]

    Source: Li 2024, "Surge phenomenon in optimal learning rate and batch size scaling".
    """
    _check(batch=batch, eps_max=eps_max, b_noise=b_noise)
    ratio = math.sqrt(batch / b_noise)
    return 2.0 * eps_max / (ratio + 1.0 / ratio)


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if name.endswith("batch") and not value >= 1:
            raise ConfigError(f"{name} counts the units of a step and is at least 1; got {value!r}.")
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} is a finite number above 0; got {value!r}.")


def _check_noise_scale(b_simple: float) -> None:
    if not (b_simple >= 0 and math.isfinite(b_simple)):
        raise ConfigError(
            f"b_simple is a finite number of at least 0; got {b_simple!r}. "
            f"An unresolved noise scale gives no learning rate: measure for more steps."
        )


def check_rule_for(rule: str, optimizer: str) -> str:
    """Return `rule` if it is known and may be used with `optimizer`, else raise ConfigError."""
    check_rule(rule)
    if rule == "surge" and optimizer not in SHOWN_FOR["surge"]:
        raise ConfigError(
            f"learning-rate rule 'surge' is for optimizers that follow the gradient's sign "
            f"({', '.join(SHOWN_FOR['surge'])}); got {optimizer!r}, whose rate does not fall at a larger batch. "
            f"Use 'noise' or 'linear' for SGD."
        )
    return rule


def is_number(value: object) -> bool:
    """Whether `value` is a real number: not None, a tensor, or the text that YAML makes of 1e-4.

    >>> is_number(1e-4), is_number("1e-4")
    (True, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def check_count(name: str, value: int) -> None:
    """Raise ConfigError unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is a whole number of at least 1; got {value!r}.")
