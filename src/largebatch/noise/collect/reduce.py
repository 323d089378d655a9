"""What do the norms of all workers in a step add up to?

Each worker packs a few sums into one vector, as long on every worker however many microbatches it had; the
vectors are added up, and the moments follow from the total. Writing a_i = f r_i / world_size for the coefficient
of microbatch i in the step's gradient, the relative coefficient r_i is known to its worker, the factor f only to
all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from largebatch.noise.collect.step_norms import StepNorms
from largebatch.noise.moments import NormSums, StepMoments, solve_sums

LossScaling = Literal["step_mean", "local_mean", "microbatch_mean", "sum"]
"""What the sum of a microbatch's losses is divided by: a worker's mean share of the step's units (the step's units
on one worker), its own units in the step, the microbatch's units, or 1."""

_K, _UNITS, _R, _R_OVER_B, _R2_OVER_B, _SKIPPED, _REFUSED, _VOTE, _STALE, _BEFORE, _NOW = range(11)
_HOST, _HEADER = 8, 11
LEAST = 1e-33
"""Mean square of gradients' elements from which float32 is wide enough."""
MOST = 1e36
"""Square of the gradients' length up to which it is."""
CHANGE = 1e-3
"""Relative change of a gradient's squared norm that is more than the rounding of a division by the loss scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSums:
    """The sums of one step over all workers, on the host."""

    values: tuple[float, ...]
    num_rows: int
    num_elements: int
    """Elements of all gradients."""
    world_size: int
    loss_scaling: LossScaling
    weighed: bool

    @property
    def stale(self) -> bool:
        """Whether gradients held something before the step."""
        return self.values[_STALE] > 0

    @property
    def changed(self) -> bool:
        """Whether gradients were changed between the last backward and `step()`."""
        before, now = self.values[_BEFORE], self.values[_NOW]
        return abs(now - before) > CHANGE * before

    @property
    def num_microbatches(self) -> int:
        """Microbatches of all workers."""
        return round(self.values[_K])

    @property
    def num_skipped(self) -> int:
        """Workers that cannot use the step."""
        return round(self.values[_SKIPPED])

    @property
    def num_refused(self) -> int:
        """Workers that raised an error."""
        return round(self.values[_REFUSED])

    @property
    def vote(self) -> int:
        """The cadence that rank 0 wants."""
        return round(self.values[_VOTE])

    def leaves_float32(self) -> bool:
        """Whether float32 cannot square gradients of so many elements and this length, or a gradient is not finite."""
        return not (all(map(math.isfinite, self.values)) and self._total <= MOST and not self._is_below())

    @property
    def _total(self) -> float:
        rows = self.num_rows // 2 if self.weighed else self.num_rows
        return sum(self.values[_HEADER + self.num_rows :][:rows])

    def _is_below(self) -> bool:
        return self._total < LEAST * self.num_elements

    def why_skipped(self, *, own: str, wide: bool, may_be_lone: bool) -> str:
        """Why the step cannot be used; empty if it can.

        Args:
            own: this worker's reason.
            wide: whether squares were taken in float64.
            may_be_lone: whether one microbatch in all is an error, and no reason to skip.
        """
        if self.num_skipped:
            return own or "another worker gave it up"
        if self.num_microbatches == 1 and not may_be_lone:
            return "it has one microbatch only"
        if not all(map(math.isfinite, self.values)):
            return "a gradient is not finite" + ("" if wide else ", or its square is not in float32 (next is float64)")
        if not wide and self._is_below():
            return "squares of its gradients fall below float32's range; the next are taken in float64"
        return ""

    def moments(self, dataset_size: int | None = None) -> list[StepMoments]:
        """Moments of each row; raises ConfigError for a single microbatch (`solve_two_sizes`)."""
        values = self.values
        factor = self.world_size / values[_UNITS] if self.loss_scaling == "step_mean" else 1.0
        sum_a = factor * values[_R]
        return [
            solve_sums(
                NormSums(
                    num_microbatches=self.num_microbatches,
                    batch=round(values[_UNITS]),
                    sum_a=sum_a,
                    sum_a_over_b=factor * values[_R_OVER_B],
                    sum_a2_over_b=factor**2 * values[_R2_OVER_B],
                    weighted_sq_norms=values[_HEADER + row] / factor,
                    sq_norm_sum=values[_HEADER + self.num_rows + row] * self.world_size**2,
                ),
                dataset_size,
            )
            for row in range(self.num_rows)
        ]


def pack(
    norms: StepNorms,
    *,
    loss_scaling: LossScaling,
    vote: int,
    scale: Tensor | float = 1.0,
    unscaled: bool = False,
    factor: float = 1.0,
) -> Tensor:
    """This worker's sums of a step, on the device of its norms; no host sync.

    Args:
        norms: what its collector took.
        loss_scaling: see LossScaling.
        vote: the cadence this worker wants; 0 on all but one worker.
        scale: what a gradient scaler multiplied the loss by; a 0-dim tensor or a number.
        unscaled: whether it has divided the gradients by it again.
        factor: what the loss was multiplied by besides.

    Returns:
        Shape (11 + 2 * num_rows,), float64 where the device has it.
    """
    device, dtype = norms.sq_norms.device, norms.sq_norms.dtype
    header, weights = _header(norms.units, norms.together, loss_scaling, bool(norms.skip), vote, device, dtype)
    small, step, now = norms.sq_norms @ weights, norms.sq_norm_step, norms.mark_now
    if isinstance(scale, Tensor):
        scale = scale.to(device, dtype, non_blocking=True)
    if isinstance(scale, Tensor) or scale * factor != 1:
        small = small / (scale * factor) ** 2
        step = step / (factor if unscaled else scale * factor) ** 2
        now = now * scale**2 if unscaled else now
    before = norms.mark_before
    if len(before) > 1:  # one changed mark among several is not to drown in their sum
        now = ((now - before).abs() > CHANGE * before).any()[None].to(dtype)
        before = torch.zeros_like(now)
    elif not len(before):
        before = now = torch.zeros_like(norms.sq_norm_stale)
    return torch.cat([header, norms.sq_norm_stale, before, now, small, step])


@lru_cache(maxsize=8)  # most steps are like the one before
def _header(
    units: tuple[int, ...],
    together: tuple[int, ...],
    loss_scaling: LossScaling,
    skipped: bool,
    vote: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The sums that need no gradient, and the weights of the microbatches' squared norms."""
    local_batch = sum(units)
    relative = _relative(units, together, local_batch, loss_scaling)
    over_units = [r / b for r, b in zip(relative, units, strict=True)]
    sums = [
        len(units), local_batch, sum(relative), sum(over_units),
        sum(r * o for r, o in zip(relative, over_units, strict=True)), 1.0 if skipped else 0.0, 0.0, vote,
    ]  # fmt: skip
    both = torch.tensor([*sums, *(1 / r for r in relative)], dtype=torch.float64)
    header, weights = both.to(device, dtype, non_blocking=True).split([_HOST, len(units)])
    return header, weights


def refusal(num_rows: int, device: torch.device) -> Tensor:
    """The vector of a worker that raises an error: the others learn of it, and nothing hangs."""
    payload = torch.zeros(_HEADER + 2 * num_rows, dtype=torch.float64, device=device)
    payload[_REFUSED] = 1
    return payload


def _relative(
    units: Sequence[int], together: Sequence[int], local_batch: int, loss_scaling: LossScaling
) -> list[float]:
    """Coefficients of the microbatches' MEAN gradients, up to a factor that all workers share."""
    if loss_scaling == "microbatch_mean":
        return [b / whole for b, whole in zip(units, together, strict=True)]
    if loss_scaling == "local_mean":
        return [b / local_batch for b in units]
    return [float(b) for b in units]
