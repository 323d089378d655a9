"""What is the noise scale, and how sure is that?

B_simple = tr(Sigma) / |G|^2 (McCandlish et al. 2018, eq. 2.9) is a ratio of two noisy numbers. Averaging
ratios is wrong at any length (gradients 1 and 3, one each: the ratios average -19/7 for a true 1/4), so both
moments are averaged first, in one core of weighted sums that serves the whole run, an exponential average and
windows alike, on line (`RunningNoiseScale`) and from recorded moments (`noise_scale`, `windows`).

The interval is Fieller's: all ratios r that the data do not reject, |T - r G| <= t sd(T - r G). The covariance
of the two means comes from differences of successive steps, half their mean square: slow drift cancels in
them, where a variance about the mean would call the drift noise. It assumes that the errors of neighbouring
steps are independent. Every weight enters squared, next to its own step's difference, so noise may change
along the run.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from largebatch.errors import CheckpointError, ConfigError
from largebatch.units import Duration, check_unit

MIN_FREEDOM = 5.0
"""Degrees of freedom of the variance below which no interval is given (about 8 equally weighted steps)."""
NO_NOISE = 1e-3
"""A trace this far below 0, as a multiple of |G|^2 (a thousandth of one unit), is rounding and no sign of trouble."""
NORMAL_QUANTILE = 1.959963984540054
"""97.5 % quantile of the normal distribution."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseScale:
    """B_simple with its 95 % interval, or the reason why there is none yet."""

    b_simple: float | None
    """Mean tr(Sigma) over mean |G|^2, in `unit`, not clamped. While unresolved it is the raw ratio, or None where
    mean |G|^2 is not positive."""
    interval: tuple[float | None, float | None]
    """95 % (low, high) in `unit`; None is unbounded on that side."""
    resolved: bool
    """Whether |G|^2 is told from 0, so that the ratio means something."""
    reason: str
    """Why it is not resolved; empty if it is."""
    unit: str
    """What a batch counts."""
    grad_sq_norm: float | None
    """Mean |G|^2; None before the first step."""
    trace_cov: float | None
    """Mean tr(Sigma), per unit; None before the first step."""
    num_steps: int
    """Steps measured."""
    steps_to_resolve: int | None
    """Further measured steps expected until it is resolved: 0 if it is, None if that cannot be said or more
    steps would not help."""

    def __str__(self) -> str:
        raw = "-" if self.b_simple is None else f"{self.b_simple:,.4g}"
        if not self.resolved:
            return f"B_simple unresolved after {self.num_steps:,} steps (raw ratio {raw} {self.unit}): {self.reason}"
        low, high = ("unbounded" if end is None else f"{end:,.4g}" for end in self.interval)
        return f"B_simple = {raw} {self.unit} (95 % interval {low} to {high}) over {self.num_steps:,} steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The noise scale over a stretch of steps."""

    first: int
    """Index of its first step in the arrays."""
    last: int
    """Index of its last step, inclusive."""
    noise_scale: NoiseScale


def noise_scale(
    trace_cov: ArrayLike,
    grad_sq_norm: ArrayLike,
    *,
    half_life: float | Duration | None = None,
    batch: ArrayLike | None = None,
    unit: str = "examples",
) -> NoiseScale:
    """B_simple of recorded step moments: the ratio of their (weighted) means.

    Args:
        trace_cov: per-step estimates of tr(Sigma), shape (num_steps,), in the order of the steps.
        grad_sq_norm: per-step estimates of |G|^2, shape (num_steps,).
        half_life: None weights all steps alike. Else a step's weight halves every so many measured steps (a
            number, or a Duration in steps) or units (a Duration in `unit`), counted back from the last.
        batch: units in each step, shape (num_steps,) or one number; needed for a half-life in units only.
        unit: what a batch counts.

    Returns:
        NoiseScale, resolved or with the reason why not.

    Raises:
        ConfigError: shapes that disagree, a moment that is not finite, a half-life that cannot be used.

    >>> print(noise_scale([8.0, 9.0, 7.0, 8.5, 7.5, 8.0, 9.0, 7.0], [2.0, 2.2, 1.9, 2.1, 1.8, 2.0, 2.1, 1.9]))
    B_simple = 4 examples (95 % interval 3.78... to 4.20...) over 8 steps

    Source: McCandlish et al. 2018, eq. 2.9 and app. A.1; Fieller 1954; von Neumann 1941 (successive differences).
    """
    moments = _as_moments(trace_cov, grad_sq_norm)
    duration = _as_duration(half_life, unit)
    if batch is None and duration is not None and duration.unit != "steps":
        raise ConfigError(f"a half-life of {duration.count:g} {duration.unit} needs the batch of every step.")
    sizes = np.asarray(1.0 if batch is None else batch, dtype=np.float64)
    if sizes.shape not in ((), (len(moments),)):
        raise ConfigError(f"each step has one batch; got {sizes.size} for {len(moments)} steps.")
    sizes = np.broadcast_to(sizes, (len(moments),))
    return _estimate(_sum_up(moments, _decays(duration, sizes)), unit)


def windows(trace_cov: ArrayLike, grad_sq_norm: ArrayLike, *, size: int, unit: str = "examples") -> tuple[Window, ...]:
    """The noise scale of each run of `size` successive steps; the last window takes the remainder too.

    Differences are taken inside each window only, so a window knows nothing of its neighbours.

    Args:
        trace_cov: per-step estimates of tr(Sigma), shape (num_steps,).
        grad_sq_norm: per-step estimates of |G|^2, shape (num_steps,).
        size: steps in a window, at least 1. With fewer steps than that there is one window.
        unit: what a batch counts.

    Returns:
        The windows in order; empty if there are no steps.

    Raises:
        ConfigError: as `noise_scale`, or a size below 1.

    >>> [(w.first, w.last) for w in windows([1.0] * 7, [1.0] * 7, size=3)]
    [(0, 2), (3, 6)]
    """
    if size < 1:
        raise ConfigError(f"a window has at least 1 step; got size={size}.")
    moments = _as_moments(trace_cov, grad_sq_norm)
    if not len(moments):
        return ()
    edges = [index * size for index in range(max(1, len(moments) // size))] + [len(moments)]
    return tuple(
        Window(first=start, last=end - 1, noise_scale=noise_scale(*moments[start:end].T, unit=unit))
        for start, end in pairwise(edges)
    )


class RunningNoiseScale:
    """The noise scale of the steps seen so far, in a fixed amount of memory.

    It equals `noise_scale` of the same moments (up to rounding), and resumes bit for bit.

    >>> running = RunningNoiseScale(half_life=100)
    >>> running.update(trace_cov=8.0, grad_sq_norm=2.0, batch=32)
    >>> running.estimate().resolved
    False
    """

    def __init__(self, *, half_life: float | Duration | None = None, unit: str = "examples") -> None:
        """Start with no steps; `half_life` and `unit` as in `noise_scale`."""
        self.unit = check_unit(unit)
        self.half_life = _as_duration(half_life, unit)
        self._sums = _Sums()

    def update(self, *, trace_cov: float, grad_sq_norm: float, batch: int) -> None:
        """Take in one step's moments and its batch in units; raises ConfigError if one is not finite."""
        if not (math.isfinite(trace_cov) and math.isfinite(grad_sq_norm)):
            raise ConfigError(f"moments are finite numbers; got {[trace_cov, grad_sq_norm]}. Leave the step out.")
        decay = 1.0 if self.half_life is None else float(_decays(self.half_life, np.array([float(batch)]))[0])
        self._sums.add([float(trace_cov), float(grad_sq_norm)], decay)

    def estimate(self) -> NoiseScale:
        """Return the noise scale over the steps seen so far."""
        return _estimate(self._sums, self.unit)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists that `load_state_dict` takes back."""
        return {"unit": self.unit, "half_life": _describe(self.half_life), **self._sums.to_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; raises CheckpointError if it is broken or was saved with another half-life or unit."""
        for name, mine in (("unit", self.unit), ("half_life", _describe(self.half_life))):
            if state[name] != mine:
                raise CheckpointError(f"the saved noise scale has {name}={state[name]!r}; this one has {mine!r}.")
        self._sums = _Sums.from_dict(state)


class _Sums:
    """Weighted sums of the moments (tr(Sigma), |G|^2) and of their successive differences: the one core."""

    __slots__ = (
        "decay",
        "differences",
        "last",
        "num_steps",
        "sum_w",
        "sum_w2",
        "sum_w2_differences",
        "sum_w4",
        "sum_x",
    )

    def __init__(self) -> None:
        self.num_steps = 0
        self.decay = 1.0
        self.sum_w = self.sum_w2 = self.sum_w4 = 0.0
        self.sum_w2_differences = 0.0
        """Sum of squared weights over the steps that have one before them."""
        # Lists of numbers: for two of them an array operation takes 20 times as long.
        self.sum_x = [0.0, 0.0]
        self.differences = [[0.0, 0.0], [0.0, 0.0]]
        """Sum of squared weights times half the outer product of each step's difference from the one before."""
        self.last = [0.0, 0.0]

    def add(self, moments: list[float], decay: float) -> None:
        """Age everything by `decay` in (0, 1], then take in one step at weight 1."""
        self.sum_w = decay * self.sum_w + 1.0
        self.sum_w2 = decay**2 * self.sum_w2 + 1.0
        self.sum_w4 = decay**4 * self.sum_w4 + 1.0
        self.sum_x = [decay * total + x for total, x in zip(self.sum_x, moments, strict=True)]
        if self.num_steps:
            step = [x - last for x, last in zip(moments, self.last, strict=True)]
            self.sum_w2_differences = decay**2 * self.sum_w2_differences + 1.0
            self.differences = [
                [decay**2 * total + x * y / 2 for total, y in zip(row, step, strict=True)]
                for row, x in zip(self.differences, step, strict=True)
            ]
        self.num_steps += 1
        self.last, self.decay = moments, decay

    def to_dict(self) -> dict[str, Any]:
        return {name: deepcopy(getattr(self, name)) for name in self.__slots__}

    @staticmethod
    def from_dict(state: dict[str, Any]) -> _Sums:
        sums = _Sums()
        for name in _Sums.__slots__:
            value, empty = np.array(state[name], dtype=np.float64), getattr(sums, name)
            if value.shape != np.shape(empty) or not np.isfinite(value).all():
                raise CheckpointError(f"the saved noise scale is broken: {name} is {state[name]!r}.")
            setattr(sums, name, value.tolist() if isinstance(empty, list) else type(empty)(value))
        return sums


def _sum_up(moments: Array, decays: Array) -> _Sums:
    """The sums that `_Sums.add` reaches step by step, in one go."""
    sums = _Sums()
    if not len(moments):
        return sums
    # A step's weight is the product of the decays of the steps after it.
    w = np.append(np.cumprod(decays[:0:-1])[::-1], 1.0)
    steps = np.diff(moments, axis=0)
    sums.num_steps, sums.decay, sums.last = len(moments), float(decays[-1]), moments[-1].tolist()
    sums.sum_w, sums.sum_w2, sums.sum_w4 = float(w.sum()), float((w**2).sum()), float((w**4).sum())
    sums.sum_x = (w @ moments).tolist()
    sums.sum_w2_differences = float((w[1:] ** 2).sum())
    sums.differences = ((w[1:, None] ** 2 * steps).T @ steps / 2).tolist()
    return sums


def _estimate(sums: _Sums, unit: str) -> NoiseScale:
    """Divide the means, and say how sure that is."""

    def result(
        *, interval: tuple[float | None, float | None] = (None, None), reason: str = "", steps: int | None = None
    ) -> NoiseScale:
        return NoiseScale(
            b_simple=trace / grad if sums.num_steps and grad > 0 else None,
            interval=interval,
            resolved=not reason,
            reason=reason,
            unit=unit,
            grad_sq_norm=grad if sums.num_steps else None,
            trace_cov=trace if sums.num_steps else None,
            num_steps=sums.num_steps,
            steps_to_resolve=steps if reason else 0,
        )

    trace, grad = (total / (sums.sum_w or 1.0) for total in sums.sum_x)
    # Overlapping differences of n normal errors know their variance as well as 2n/3 independent squares.
    freedom = sums.sum_w2**2 / sums.sum_w4 * 2 / 3 if sums.num_steps else 0.0
    if freedom < MIN_FREEDOM or not sums.sum_w2_differences:
        return result(reason=f"an interval needs at least {math.ceil(MIN_FREEDOM * 1.5)} steps in the average.")
    covariance = np.array(sums.differences) / sums.sum_w2_differences * (sums.sum_w2 / sums.sum_w**2)
    t = _t_quantile(freedom)
    sd_trace, sd_grad = np.sqrt(np.diag(covariance)).tolist()
    if trace + t * sd_trace < -NO_NOISE * abs(grad):
        return result(
            reason=f"tr(Sigma) = {trace:.3g} is below 0 by more than its error: microbatches are not independent "
            "draws, or loss_scaling does not say how the loss is scaled."
        )
    if grad + t * sd_grad < 0:
        return result(
            reason=f"|G|^2 = {grad:.3g} is below 0 by more than its error: draws without replacement need "
            "dataset_size; else loss_scaling does not say how the loss is scaled."
        )
    interval = _fieller(trace, grad, covariance, t)
    if grad - t * sd_grad > 0:
        return result(interval=interval)
    signal = f"|G|^2 = {grad:.3g} +- {t * sd_grad:.2g} is not told from 0"
    steps, outlook = _outlook(sums, grad, sd_grad, t)
    return result(interval=interval, reason=f"{signal}; {outlook}", steps=steps)


def _outlook(sums: _Sums, grad: float, sd_grad: float, t: float) -> tuple[int | None, str]:
    """Further steps until |G|^2, should it stay as it is, stands far enough above 0."""
    # Below 0 there is no value to extrapolate from: the upper end of the interval gives the fewest steps.
    at_least = "" if grad > 0 else "at least "
    signal = grad if grad > 0 else grad + t * sd_grad
    now = sums.sum_w**2 / sums.sum_w2
    needed = now * (NORMAL_QUANTILE * sd_grad / signal) ** 2 if signal > 0 else math.inf
    if not math.isfinite(needed):
        return None, "how many more steps that takes cannot be said yet."
    if sums.decay == 1.0:
        steps = max(1, math.ceil(needed - now))
        return steps, f"{at_least}about {steps:,} more steps are expected."
    # An exponential average of n steps counts as (1 + d)/(1 - d) * (1 - d^n)/(1 + d^n) equal ones: never more
    # than the first factor.
    share = needed * (1 - sums.decay) / (1 + sums.decay)
    if share >= 1:
        half_life = math.ceil(needed * math.log(2) / 2)
        return None, f"more steps do not help: use a half-life of {at_least}about {half_life:,} steps."
    steps = max(1, math.ceil(math.log((1 - share) / (1 + share)) / math.log(sums.decay)) - sums.num_steps)
    return steps, f"{at_least}about {steps:,} more steps are expected."


def _fieller(trace: float, grad: float, covariance: Array, t: float) -> tuple[float | None, float | None]:
    """All ratios r with |trace - r grad| <= t sd(trace - r grad); bounded iff grad stands t deviations off 0.

    Source: Fieller 1954, "Some problems in interval estimation".
    """
    square = grad**2 - t**2 * covariance[1, 1]
    middle = trace * grad - t**2 * covariance[0, 1]
    constant = trace**2 - t**2 * covariance[0, 0]
    # The interval always holds trace / grad, so only rounding makes this negative for a bounded one.
    root = math.sqrt(max(middle**2 - square * constant, 0.0))
    if square > 0:
        return float((middle - root) / square), float((middle + root) / square)
    if constant <= 0 or square == 0:
        return None, None
    return float((middle - root) / square), None


def _t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t: within 2e-4 of it from 5 degrees of freedom on.

    Source: Abramowitz and Stegun 1964, eq. 26.7.5.
    """
    z = NORMAL_QUANTILE
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _as_duration(half_life: float | Duration | None, unit: str) -> Duration | None:
    """The half-life as a Duration (a bare number counts measured steps), checked."""
    check_unit(unit)
    if half_life is None:
        return None
    duration = half_life if isinstance(half_life, Duration) else Duration(half_life)
    if duration.unit not in ("steps", unit) or not 0 < duration.count < math.inf:
        raise ConfigError(f"half_life is a positive number of steps or {unit}; got {duration.count:g} {duration.unit}.")
    return duration


def _decays(half_life: Duration | None, batch: Array) -> Array:
    """What each step leaves of the weight of those before it: 1 without a half-life."""
    if half_life is None:
        return np.ones_like(batch)
    age = np.ones_like(batch) if half_life.unit == "steps" else batch
    return 0.5 ** (age / half_life.count)


def _describe(half_life: Duration | None) -> str | None:
    return None if half_life is None else f"{float(half_life.count)!r} {half_life.unit}"


def _as_moments(trace_cov: ArrayLike, grad_sq_norm: ArrayLike) -> Array:
    """Both moments as an array of shape (num_steps, 2), checked."""
    trace, grad = np.asarray(trace_cov, dtype=np.float64), np.asarray(grad_sq_norm, dtype=np.float64)
    if trace.ndim != 1 or trace.shape != grad.shape:
        raise ConfigError(f"each step has two moments; got shapes {trace.shape} and {grad.shape}.")
    moments = np.stack([trace, grad], axis=1)
    bad = np.flatnonzero(~np.isfinite(moments).all(axis=1))
    if bad.size:
        raise ConfigError(f"moments are finite numbers; step {bad[0]} has {moments[bad[0]].tolist()}. Leave it out.")
    return moments
