"""What is the learning rate of Goyal 2017 at a step, in exact fractions?"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def nearest_step(epochs: Fraction, batch: int, units_per_epoch: int) -> int:
    """The step nearest to the end of that many epochs; half a step rounds up."""
    return int(epochs * units_per_epoch / batch + Fraction(1, 2))


def lr_by_counting(
    num_steps: int,
    reference_lr: Fraction,
    target_lr: Fraction,
    warmup_steps: int,
    decay_steps: Sequence[int],
    decay_factor: Fraction,
) -> list[Fraction]:
    """Sec. 2.2 and 5.1, as a running sum: each warmup iteration adds the same increment; each decay multiplies."""
    lr = reference_lr if warmup_steps else target_lr
    rates = []
    for step in range(num_steps):
        for decay_step in decay_steps:
            if step == decay_step:
                lr *= decay_factor
        rates.append(lr)
        if step < warmup_steps:
            lr += (target_lr - reference_lr) / warmup_steps
    return rates
