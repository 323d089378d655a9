"""What is the learning rate at a step: Goyal 2017 in exact fractions, the other shapes in float64 numpy?"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Rates = NDArray[np.float64]


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


def cosine_by_half_angles(start_lr: float, end_lr: float, num_steps: int, at: Sequence[int]) -> Rates:
    """Loshchilov 2017, eq. (5) without restarts, as the squared cosine of half the angle; level after the end."""
    progress = np.minimum(np.asarray(at, dtype=np.float64) / num_steps, 1.0)
    return end_lr + (start_lr - end_lr) * np.cos(np.pi / 2 * progress) ** 2


def by_knots(knots: Sequence[tuple[int, float]], at: Sequence[int]) -> Rates:
    """Straight lines between (step, rate) knots; level before the first and after the last."""
    steps, rates = zip(*knots, strict=True)
    return np.interp(np.asarray(at, dtype=np.float64), steps, rates)


def with_warmup(kind: str, start_lr: float, warmup_steps: int, after: Rates) -> Rates:
    """Goyal 2017, sec. 2.2: the rates of a warmup and then `after`, whose first rate is the peak."""
    if kind == "constant":
        return np.concatenate([np.full(warmup_steps, start_lr), after])
    return np.concatenate([np.linspace(start_lr, after[0], warmup_steps, endpoint=False), after])
