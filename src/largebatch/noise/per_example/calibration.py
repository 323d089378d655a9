"""By what factor is the noise scale of the norm layers alone off that of the whole model?

Gray et al. 2024 find that the gradients of a transformer's LayerNorms, a thousandth of its parameters, tell the noise
scale of all of them up to a factor near 1. That factor is the model's own: measure both over some steps
(`PerExampleCollector` with `group_of`), then `only="norm layers"` and the factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from largebatch.errors import ConfigError
from largebatch.noise.estimate import noise_scale
from largebatch.noise.moments import StepMoments


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """B_simple of the whole model over that of its norm layers, or the reason why it is not known."""

    ratio: float | None
    """Multiply the norm layers' B_simple by it; None while it is unresolved."""
    interval: tuple[float | None, float | None]
    """95 % (low, high); None while it is unresolved."""
    resolved: bool
    """Whether both noise scales are, and the ratio with them."""
    reason: str
    """Why it is not resolved; empty if it is."""
    num_steps: int
    """Steps in which both were measured."""


def calibrate(norm_layers: Sequence[StepMoments], whole: Sequence[StepMoments]) -> Calibration:
    """Compare the noise scale of the norm layers with that of the whole model over the same steps.

    Assumes that the errors of neighbouring steps are independent, and no drift of the ratio itself: repeat it when
    the learning rate or the phase of training changes. Both come from the same examples, so their errors go
    together, and the ratio is surer than either.

    Args:
        norm_layers: moments of each step, from the norm layers' norms; shape (num_steps,).
        whole: moments of the same steps, from all norms; shape (num_steps,).

    Returns:
        Calibration, resolved or with the reason why not.

    Raises:
        ConfigError: the two do not have the same steps.

    >>> from largebatch.noise.moments import solve_per_example
    >>> steps = [solve_per_example([1.0 + 0.1 * (i % 3), 3.0], 1.5) for i in range(12)]
    >>> calibration = calibrate(steps, steps)
    >>> calibration.ratio, calibration.interval
    (1.0, (1.0, 1.0))

    Source: Gray et al. 2024 (arXiv:2411.00999), section 5; the interval is ours: the delta method in logarithms, on
    the differences of successive steps that `noise_scale` uses.
    """
    if len(norm_layers) != len(whole):
        raise ConfigError(
            f"a calibration compares the same steps; got {len(norm_layers)} of the norm layers and {len(whole)} of the "
            "whole model."
        )

    def unresolved(reason: str) -> Calibration:
        return Calibration(ratio=None, interval=(None, None), resolved=False, reason=reason, num_steps=len(whole))

    series = [
        np.array([value(moments) for moments in steps], dtype=np.float64)
        for steps in (whole, norm_layers)
        for value in (_trace_cov, _grad_sq_norm)
    ]
    for name, (trace_cov, grad_sq_norm) in (("the whole model", series[:2]), ("the norm layers", series[2:])):
        scale = noise_scale(trace_cov, grad_sq_norm)
        if not scale.resolved:
            return unresolved(f"of {name}: {scale.reason}")
        if trace_cov.mean() <= 0:
            return unresolved(f"of {name}: tr(Sigma) = {trace_cov.mean():.3g} is not told from 0.")
    means = [float(values.mean()) for values in series]
    ratio = means[0] / means[1] / (means[2] / means[3])
    # log(ratio) moves with each step by this much; the interval of its mean is that of a ratio to a constant.
    moved = sum(sign * values / mean for sign, values, mean in zip((1, -1, -1, 1), series, means, strict=True))
    low, high = noise_scale(1.0 + moved, np.ones(len(whole))).interval
    assert low is not None and high is not None, "a ratio to a constant is bounded"
    return Calibration(
        ratio=ratio,
        interval=(ratio * math.exp(low - 1.0), ratio * math.exp(high - 1.0)),
        resolved=True,
        reason="",
        num_steps=len(whole),
    )


def _trace_cov(moments: StepMoments) -> float:
    return moments.trace_cov


def _grad_sq_norm(moments: StepMoments) -> float:
    return moments.grad_sq_norm
