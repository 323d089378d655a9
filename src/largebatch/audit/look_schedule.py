"""Do the learning rate, its warmup and the batch go together?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from torch.optim import Optimizer

from largebatch.audit.findings import Finding
from largebatch.audit.look_setup import Setup
from largebatch.errors import ConfigError

WARMUP_FROM = 4.0
"""Times the reference batch from which a missing warmup is reported."""
_SCALING_FROM = 1.5  # times the reference batch, or its inverse, from which a rate can be told from an unscaled one
_CLEARLY = 1.2  # times what a rule gives; less may have been tuned


def look(setup: Setup) -> Iterator[Finding]:
    """Find LB104, LB105, LB106 and LB108."""
    yield from _scaling(setup)
    yield from _warmup(setup)
    if setup.b_crit is not None and setup.batch is not None and setup.batch > setup.b_crit:
        needs = 1 + setup.batch / setup.b_crit
        yield Finding(
            code="LB108",
            seen=f"the batch of {setup.batch:g} is {setup.batch / setup.b_crit:.3g} times the critical batch size of "
            f"{setup.b_crit:g}: a goal takes {needs:.3g} times the fewest examples there, and 2 times at b_crit.",
        )


def _scaling(setup: Setup) -> Iterator[Finding]:
    factor, reference_lr, rates = setup.factor, setup.reference_lr, setup.rates
    if factor is None or reference_lr is None or rates is None or not rates.settled or rates.peak <= 0:
        return
    times = rates.peak / reference_lr
    at = (
        f"the batch is {setup.batch:g}, {factor:.4g} times the reference batch of {setup.reference_batch}, and the "
        f"peak learning rate {rates.peak:.4g}, {times:.4g} times the reference rate of {reference_lr:g}"
    )
    extra = _extra_factor(setup, times / factor)
    if max(factor, 1 / factor) >= _SCALING_FROM:
        low, high = _bounds(setup, factor)
        exponent = math.log(times) / math.log(factor)  # 0 is not scaled, 0.5 sqrt, 1 linear, 2 linear twice
        if exponent < low:
            yield Finding(code="LB104", seen=f"{at}.")
        elif exponent > high:
            yield Finding(code="LB105", seen=f"{at}{f', {extra}' if extra else ''}.")
        elif extra:
            yield Finding(code="LB105", seen=f"{at}, {extra}.")
    elif extra:
        yield Finding(code="LB105", seen=f"{at}, {extra}.")


def _bounds(setup: Setup, factor: float) -> tuple[float, float]:
    """Exponents of the batch between which a rate may have been scaled once."""
    clear = math.log(_CLEARLY) / abs(math.log(factor))
    if setup.recipe is not None and setup.batch is not None:
        try:
            # Its learning rate alone: what else may stand against this batch is not asked here.
            recipe = dataclasses.replace(setup.recipe, batchnorm_n=None, adam_rule="none")
            whole = round(setup.batch)
            examples = (setup.order.num_examples if setup.order else None) or 1
            lr = recipe.resolve(whole, max(whole, examples), b_crit=setup.b_crit).lr
        except ConfigError:
            return -math.inf, math.inf  # the recipe cannot say what the rate should be
        exponent = math.log(lr / setup.recipe.reference_lr) / math.log(factor)
        return (0.3 * exponent, max(1.5 * exponent, exponent + clear)) if exponent > 0.1 else (-math.inf, math.inf)
    return 0.15, max(1.2 if _is_adaptive(setup.optimizer) else 1.5, 1 + clear)


def _is_adaptive(optimizer: Optimizer) -> bool:
    return any("betas" in group or "beta2" in group for group in optimizer.param_groups)


def _extra_factor(setup: Setup, over: float) -> str | None:
    """What else the rate was multiplied by, if that is what it is too high by."""
    for name, number in (
        ("world_size", setup.world_size),
        ("accumulation", setup.accumulation),
        ("world_size * accumulation", setup.world_size * setup.accumulation),
    ):
        if number >= 2 and math.isclose(over, number, rel_tol=0.03):
            return f"which is {over:.4g} = {name} times what the linear rule gives"
    return None


def _warmup(setup: Setup) -> Iterator[Finding]:
    factor, rates = setup.factor, setup.rates
    if factor is None or rates is None or factor < WARMUP_FROM or rates.warms_up:
        return
    if setup.reference_lr is not None and rates.peak <= setup.reference_lr:
        return  # the rate does not rise: there is nothing to climb
    how = (
        f"the scheduler starts at its peak of {rates.peak:.4g}"
        if setup.scheduled
        else f"no scheduler was given, so that training starts at {rates.peak:.4g}"
    )
    yield Finding(
        code="LB106",
        seen=f"the batch of {setup.batch:g} is {factor:.4g} times the reference batch of {setup.reference_batch}, and "
        f"{how}.",
    )
