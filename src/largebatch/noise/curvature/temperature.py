"""How hot does this training run: how far is its learning rate from the best single step, and is noise the reason?

T = eps / eps_opt(B), with eps_opt(B) = eps_max / (1 + B_noise/B), is one ratio of the measured moments:

    T = eps (G'HG + tr(H Sigma)/B) / |G|^2

A step of the quadratic model then takes T (2 - T) of the most that a step could: everything at T = 1, nothing at
T = 2. A loss that has settled at its learning rate has T = 2 whatever H, Sigma and B are, because only there a step
neither lowers nor raises it. So ordinary training, which crosses its valley back and forth while it slowly descends,
runs near 2 and not near 1. The noise scale that settled training shows is about inversely proportional to eps/B, the
paper's T of small batches, and not to this T, which stays at 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from largebatch.errors import ConfigError
from largebatch.noise.curvature.products import CurvatureMoments, columns, is_above_zero
from largebatch.noise.estimate import noise_scale
from largebatch.units import check_unit

_ALIKE = 0.35, 0.65
"""Shares of noise at which noise and curvature limit a step about alike."""
_HOLDS = 1.7, 2.3
"""Temperatures of steps that about hold the loss: they take less than T (2 - T) = 0.51 of the most, and lose no more
than 0.69 of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Temperature:
    """T = eps / eps_opt(B) with its 95 % interval, or why there is none; `str` of it is the sentence it implies."""

    value: float | None
    """T, not clamped. While unresolved the raw ratio, or None where mean |G|^2 is not positive."""
    interval: tuple[float | None, float | None]
    """95 % (low, high); None is unbounded on that side."""
    resolved: bool
    """Whether |G|^2 is told from 0 and the loss does not curve downwards along the steps."""
    reason: str
    """Why it is not resolved; empty if it is."""
    lr: float
    """The learning rate in use."""
    momentum: float
    """The momentum in use: the step is lr / (1 - momentum) long in the end."""
    batch: int
    """Units in a step."""
    unit: str
    """What a batch counts."""
    best_lr: float | None
    """The learning rate, at this batch and momentum, of the best single step: lr / T. None while unresolved."""
    best_lr_interval: tuple[float | None, float | None]
    """95 % (low, high) of it; None is unbounded on that side."""
    noise_share: float | None
    """(B_noise/B) / (1 + B_noise/B): the part of a step's cost that is noise's, the rest is the gradient's own
    curvature. None while unresolved."""
    noise_share_interval: tuple[float | None, float | None]
    """95 % (low, high) of it."""

    def __str__(self) -> str:
        what = f"the learning rate {self.lr:g} at batch {self.batch:,} {self.unit}"
        if self.momentum:
            what += f" and momentum {self.momentum:g}"
        if not self.resolved or self.value is None or self.best_lr is None:
            return f"Temperature unresolved for {what}: {self.reason}"
        low, high = ("unbounded" if end is None else f"{end:.2g}" for end in self.interval)
        return (
            f"Temperature {self.value:.2g} ({low} to {high}): {what} is {self.value:.2g} times the best single step "
            f"({self.best_lr:.2g}); {self._verdict()}; {self._cause()}."
        )

    def _verdict(self) -> str:
        low, high = self.interval
        if low is not None and low > 2:
            if self.momentum:
                return "taken at once such a step raises the loss; momentum takes it in parts and bears longer ones"
            return "in the quadratic model such a step raises the loss"
        if high is not None and high < 1:
            return "a longer step would lower the loss more"
        if low is not None and low > 1:
            if high is not None and high < 2:
                return "longer than the best, as in ordinary training, and it still lowers the loss"
            if high is not None and low >= _HOLDS[0] and high <= _HOLDS[1]:
                return "steps about hold the loss where it is, as where training has settled at its learning rate"
            return "longer than the best; whether it still lowers the loss is not told"
        return "it is not told from the best"

    def _cause(self) -> str:
        low, high = self.noise_share_interval
        if low is not None and high is not None and low >= _ALIKE[0] and high <= _ALIKE[1]:
            return "noise and curvature limit it about alike"
        if low is not None and low > 0.5:
            return "noise limits it more than curvature does, so a larger batch allows a larger learning rate"
        if high is not None and high < 0.5:
            return "curvature limits it more than noise does, so a larger batch allows little more"
        return "whether noise or curvature limits it is not told"


def temperature(
    blocks: Sequence[CurvatureMoments], *, lr: float, batch: int, momentum: float = 0.0, unit: str = "examples"
) -> Temperature:
    """The temperature of a training at the weights where `blocks` were measured.

    Assumes plain or momentum SGD, whose steps are lr / (1 - momentum) long in the end. Momentum takes that length in
    parts and sees new gradients on the way: where it is long for the curvature, T overstates how hot the training
    runs, and one above 2 does not mean that it diverges. G'HG need not be told from 0: it enters with the noise.

    Args:
        blocks: of `measure_curvature`, at one set of weights or along a stretch of a run.
        lr: learning rate of the run there, > 0.
        batch: units in one optimizer step, >= 1.
        momentum: 0 <= momentum < 1.
        unit: what a batch counts.

    Returns:
        Temperature; str() of it is a sentence.

    Raises:
        ConfigError: a number out of range, a moment that is not finite, or an unknown unit.

    >>> block = CurvatureMoments(trace_h_cov=60.0, grad_h_grad=2.0, trace_cov=9.0, grad_sq_norm=4.0,
    ...                          units_gradient=64, units_hessian=32)
    >>> print(temperature([block] * 8, lr=1.0, batch=10))
    Temperature 2 (2 to 2): the learning rate 1 at batch 10 examples is 2 times the best single step (0.5); ...

    Source: McCandlish et al. 2018, eq. 2.6, C.1 and C.2 (read with eps_opt for the eps_max it prints), app. E.1;
    momentum: Smith et al. 2017.
    """
    check_unit(unit)
    if not lr > 0:
        raise ConfigError(f"lr is above 0; got {lr!r}.")
    if not batch >= 1:
        raise ConfigError(f"a batch has at least 1 unit; got {batch!r}.")
    if not 0 <= momentum < 1:
        raise ConfigError(f"momentum is at least 0 and below 1; got {momentum!r}.")
    spread, curved, _, grad_sq_norm = columns(blocks)
    cost = curved + spread / batch
    ratio = noise_scale(lr / (1 - momentum) * cost, grad_sq_norm, unit=unit)
    reason = ""
    if len(blocks) < 8:
        reason = f"an interval needs at least 8 blocks; got {len(blocks)}."
    elif is_above_zero(-cost):
        reason = "the loss curves downwards along the steps, so that the quadratic model has no best one here."
    elif not is_above_zero(grad_sq_norm):
        reason = f"|G|^2 = {grad_sq_norm.mean():.3g} is not told from 0; give more or larger blocks."
    low, high = ratio.interval
    known = not reason and ratio.b_simple is not None and ratio.b_simple > 0
    share = noise_scale(spread / batch, cost, unit=unit)
    told = known and share.resolved
    return Temperature(
        value=ratio.b_simple,
        interval=ratio.interval,
        resolved=not reason,
        reason=reason,
        lr=lr,
        momentum=momentum,
        batch=batch,
        unit=unit,
        best_lr=lr / ratio.b_simple if known and ratio.b_simple else None,
        best_lr_interval=(lr / high if high else None, lr / low if low and low > 0 else None)
        if known
        else (None, None),
        noise_share=share.b_simple if told else None,
        noise_share_interval=share.interval if told else (None, None),
    )
