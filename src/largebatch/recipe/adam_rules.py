"""What becomes of Adam's betas and epsilon when the batch changes?

Both rules keep a length that is counted in units (examples, tokens) instead of steps. Malladi 2022 keeps the horizon
of both averages and the weight of epsilon beside the gradient's noise; Marek 2025 keeps the half-life of the second
moment alone. The learning rate has its own rule (scaling.py): Malladi's is the square root.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from largebatch.errors import ConfigError
from largebatch.recipe.scaling import is_number

Betas = tuple[float, float]
"""(first moment's, second moment's) decay a step."""
AdamRule = Callable[[Betas, float, float], tuple[Betas, float]]
"""(betas, eps, k) -> (betas, eps) at k times the batch."""

_LEAST_BETA = 1e-12  # what is left of a 0 when 1 - k (1 - beta) is rounded


def malladi(betas: Betas, eps: float, k: float) -> tuple[Betas, float]:
    """Each 1 - beta times k, epsilon over sqrt(k): the averages then look back over as many units as before.

    Goes with a learning rate times sqrt(k). Derived for gradients that are mostly noise, and for k (1 - beta) < 1.
    A beta1 of 0 (RMSprop) has no horizon and stays 0.

    Args:
        betas: tuned at the reference batch, each in [0, 1).
        eps: tuned at the reference batch, > 0.
        k: batch / reference batch, > 0.

    Returns:
        (betas, eps) at k times the batch.

    Raises:
        ConfigError: a beta leaves (0, 1), which the sentence says how to avoid.

    >>> (beta1, beta2), eps = malladi((0.9, 0.99), 1e-8, 4)
    >>> round(beta1, 12), round(beta2, 12), eps
    (0.6, 0.96, 5e-09)

    Source: Malladi 2022, Adam scaling rule (RMSprop where beta1 is 0).
    """
    first = 0.0 if betas[0] == 0 else _same_horizon("beta1", betas[0], k)
    return (first, _same_horizon("beta2", betas[1], k)), eps / math.sqrt(k)


def _same_horizon(name: str, tuned: float, k: float) -> float:
    beta = 1 - k * (1 - tuned)
    if not _LEAST_BETA < beta < 1:
        raise ConfigError(
            f"{name} of {tuned:g} becomes 1 - {k:g} (1 - {tuned:g}) = {beta:.4g} at {k:g} times the reference batch, "
            f"outside (0, 1). Let the batch grow less than {1 / (1 - tuned):.4g}-fold, or use adam_rule='marek' or "
            f"'none'."
        )
    return beta


def marek(betas: Betas, eps: float, k: float) -> tuple[Betas, float]:
    """beta2 to the power k, so that the second moment's half-life in units stays; beta1 and epsilon stay.

    Args, Returns, Raises: as `malladi`.

    >>> marek((0.9, 0.95), 1e-8, 2)
    ((0.9, 0.9025), 1e-08)

    Source: Marek 2025, the rule for beta2; half-lives as in `half_life`.
    """
    beta2 = betas[1] ** k
    if not 0 < beta2 < 1:
        raise ConfigError(
            f"beta2 of {betas[1]:g} becomes {betas[1]:g}^{k:g} = {beta2:g} at {k:g} times the reference batch, "
            f"outside (0, 1). Use a batch nearer to the reference, or adam_rule='none'."
        )
    return (betas[0], beta2), eps


def unchanged(betas: Betas, eps: float, k: float) -> tuple[Betas, float]:
    """Betas and epsilon as they were tuned, whatever the batch. Args, Returns: as `malladi`."""
    return betas, eps


ADAM_RULES: dict[str, AdamRule] = {"malladi": malladi, "marek": marek, "none": unchanged}
"""The rules a recipe can name."""

ADAM_SOURCES: dict[str, str] = {
    "malladi": "Malladi 2022, Adam scaling rule",
    "marek": "Marek 2025, half-life of the second moment",
    "none": "as tuned",
}
"""Where each rule comes from."""


def scaled_adam(rule: str, betas: Betas, eps: float, k: float) -> tuple[Betas, float]:
    """Adam's betas and epsilon at k times the batch, by the rule of that name.

    Args:
        rule: one of `ADAM_RULES`.
        betas, eps, k: as `malladi`. At k = 1 nothing changes, to the last bit.

    Returns:
        (betas, eps).

    Raises:
        ConfigError: the rule is not known, or a number is or gets out of its range.

    >>> scaled_adam("none", (0.9, 0.999), 1e-8, 32)
    ((0.9, 0.999), 1e-08)
    """
    check_adam_rule(rule)
    check_adam(betas, eps)
    if not (k > 0 and math.isfinite(k)):
        raise ConfigError(f"k is the batch over the reference batch, a finite number above 0; got {k!r}.")
    if k == 1 or rule == "none":
        return betas, eps
    if betas[1] == 0:
        raise ConfigError(
            f"beta2 of 0 remembers nothing, so there is no memory to keep at {k:g} times the reference batch. Use "
            "adam_rule='none', or a beta2 above 0."
        )
    return ADAM_RULES[rule](betas, eps, k)


def half_life(beta: float, batch: int) -> float:
    """Units after which a moment has forgotten half of what it knew.

    Args:
        beta: decay a step, in (0, 1).
        batch: units in a step, >= 1.

    Returns:
        batch ln 2 / ln(1 / beta).

    Raises:
        ConfigError: a number is out of its range.

    >>> round(half_life(0.95, 512), 1) == round(half_life(0.95**2, 1024), 1)
    True

    Source: Marek 2025, t_half = B ln 2 / ln(1 / beta2).
    """
    if not 0 < beta < 1:
        raise ConfigError(f"a moment with a half-life has a beta in (0, 1); got {beta!r}.")
    if not batch >= 1:
        raise ConfigError(f"batch counts the units of a step and is at least 1; got {batch!r}.")
    return batch * math.log(2) / -math.log(beta)


def check_adam(betas: Betas, eps: float) -> None:
    """Raise ConfigError unless both betas are in [0, 1) and `eps` is finite and above 0."""
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas are two numbers in [0, 1); got {betas!r}.")
    if not (is_number(eps) and eps > 0 and math.isfinite(eps)):
        raise ConfigError(f"eps is a finite number above 0; got {eps!r}.")


def check_adam_rule(rule: str) -> None:
    """Raise ConfigError unless `rule` is the name of a rule for Adam's betas and epsilon."""
    if rule not in ADAM_RULES:
        raise ConfigError(f"adam_rule {rule!r} is not known. Use one of: {', '.join(ADAM_RULES)}.")
