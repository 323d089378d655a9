"""What does a page say of a moments log? Derived numbers, ready to be drawn; never written to disk."""

from __future__ import annotations

from dataclasses import dataclass

from largebatch.records.moments_log import MomentsHeader
from largebatch.records.schema import Interval, NoiseWindow


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseHistory:
    """The noise scale of one group of parameters along a log."""

    windows: tuple[NoiseWindow, ...]
    """Stretches of measured steps, in order; their steps are the optimizer's, and their loss is not known (NaN)."""
    b_simple: Interval
    """Over the whole log."""
    resolved: bool
    """Whether that is resolved."""
    reason: str
    """Why not; empty if so."""
    trace_share: float | None = None
    """This group's share of tr(Sigma) over the whole log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsCurve:
    """Means over successive bins of measured steps, few enough to be drawn."""

    step: tuple[float, ...]
    """Middle of each bin."""
    batch: tuple[float, ...]
    """Mean batch in units."""
    trace_cov: tuple[float, ...]
    """Mean tr(Sigma), per unit."""
    grad_sq_norm: tuple[float, ...]
    """Mean |G|^2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsHistory:
    """A moments log as a page shows it."""

    header: MomentsHeader
    num_steps: int
    """Measured steps."""
    first_step: int
    """Number of the first one."""
    last_step: int
    """Number of the last one."""
    typical_batch: int
    """Median units in the last measured steps."""
    total: NoiseHistory
    """Of all parameters."""
    groups: dict[str, NoiseHistory]
    """Of each group; empty without groups."""
    preconditioned: NoiseHistory | None
    """In the optimizer's metric; None without one."""
    curve: MomentsCurve
    advice: str
    """What to do now, in a few sentences."""
    advice_from: tuple[int, int]
    """First and last step that the advice rests on."""
    caveats: tuple[str, ...]
    """What is not known from this measurement."""
