"""How noisy are my gradients where the loss is curved: what is B_noise, of which B_simple is the simple form?

A step costs what its noise costs along the curvature. B_noise = tr(H Sigma) / (G'HG) weighs noise and gradient by
the Hessian H; B_simple = tr(Sigma) / |G|^2 takes H for a multiple of the identity. Where H is poorly conditioned
the two part, and this module measures both on the same examples.

One block of examples falls into three independent parts, A, B and C: mean gradients g_A and g_B, a Hessian H_C of
the mean loss. With H_C independent of both, and g_A of g_B,

    E[g_A'H_C g_B]                = G'HG
    E[(g_A - g_B)'H_C(g_A - g_B)] = tr(H Sigma) (1/n_A + 1/n_B)

Both are linear in the products, so their averages over blocks stay unbiased; their ratio does not. The blocks are
the record, and the ratio and Fieller's interval come from `largebatch.noise.estimate`, whose core does not mind
which two moments it divides. H_C v is a Hessian-vector product: one more backward through the gradient's own graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from largebatch.errors import ConfigError
from largebatch.noise.curvature.probe import Count, GradientProbe, Loss, check_counts
from largebatch.noise.estimate import NoiseScale, noise_scale
from largebatch.noise.moments import solve_moments
from largebatch.units import check_unit


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvatureMoments:
    """Unbiased estimates from one block of examples; none is clamped, so each can be negative."""

    trace_h_cov: float
    """Estimate of tr(H Sigma), per unit: what the noise of one unit's gradient costs along the curvature, times 2."""
    grad_h_grad: float
    """Estimate of G'HG: the curvature along the gradient times |G|^2."""
    trace_cov: float
    """Estimate of tr(Sigma), per unit, from the same gradients."""
    grad_sq_norm: float
    """Estimate of |G|^2, from the same gradients."""
    units_gradient: int
    """Units behind the two gradients together."""
    units_hessian: int
    """Units behind the Hessian."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvatureScale:
    """B_noise with its 95 % interval, or the reason why there is none; B_simple of the same blocks beside it."""

    b_noise: float | None
    """Mean tr(H Sigma) over mean G'HG, in `unit`, not clamped. While unresolved the raw ratio, or None where mean
    G'HG is not positive."""
    interval: tuple[float | None, float | None]
    """95 % (low, high) in `unit`; None is unbounded on that side."""
    resolved: bool
    """Whether G'HG is told from 0 and tr(H Sigma) is not below 0, so that the ratio means something."""
    reason: str
    """Why it is not resolved; empty if it is."""
    unit: str
    """What a batch counts."""
    lr_max: float | None
    """eps_max = |G|^2 / (G'HG): the best learning rate of a step without noise. None while unresolved."""
    lr_max_interval: tuple[float | None, float | None]
    """95 % (low, high) of it."""
    loss_decrease_max: float | None
    """dL_max = |G|^4 / (2 G'HG): what that step takes off the mean loss. None while unresolved."""
    b_simple: NoiseScale
    """B_simple = tr(Sigma) / |G|^2 of the same gradients."""
    num_blocks: int
    """Blocks measured."""

    def best_lr(self, batch: float) -> float | None:
        """eps_opt(B) = eps_max / (1 + B_noise/B) at a batch of `batch` > 0 units; None while unresolved (eq. 2.6)."""
        return self._at(self.lr_max, batch)

    def loss_decrease(self, batch: float) -> float | None:
        """dL_opt(B) = dL_max / (1 + B_noise/B) at a batch of `batch` > 0 units; None while unresolved (eq. 2.7)."""
        return self._at(self.loss_decrease_max, batch)

    def _at(self, limit: float | None, batch: float) -> float | None:
        if not batch > 0:
            raise ConfigError(f"a batch is positive; got {batch!r}.")
        if limit is None or self.b_noise is None:
            return None
        return limit / (1 + self.b_noise / batch)

    def __str__(self) -> str:
        raw = "-" if self.b_noise is None else f"{self.b_noise:,.4g}"
        if not self.resolved:
            return f"B_noise unresolved after {self.num_blocks:,} blocks (raw ratio {raw} {self.unit}): {self.reason}"
        low, high = ("unbounded" if end is None else f"{end:,.4g}" for end in self.interval)
        return f"B_noise = {raw} {self.unit} (95 % interval {low} to {high}) over {self.num_blocks:,} blocks"


def solve_curvature(
    h_aa: float,
    h_ab: float,
    h_bb: float,
    *,
    units_a: int,
    units_b: int,
    h_own: float | None = None,
    h_cc: float | None = None,
    units_c: int | None = None,
    dataset_size: int | None = None,
) -> tuple[float, float]:
    """Split the products of two mean gradients with an independent Hessian into (tr(H Sigma), G'HG).

    Assumes that the units of A, B and C are drawn independently of each other. Drawn without replacement from D
    examples they repel each other, and each unit's gradient is bound to its own Hessian. With `dataset_size=D` both
    are corrected exactly; the targets are then those of the D examples: G and H their means, Sigma their
    covariance with the divisor D - 1. That takes the two products with C's own gradient, g_C.

    Args:
        h_aa: g_A'H_C g_A, with g_A the mean gradient over `units_a` units and H_C the Hessian of C's mean loss.
        h_ab: g_A'H_C g_B.
        h_bb: g_B'H_C g_B.
        units_a: units of A, >= 1.
        units_b: units of B, >= 1.
        h_own: the mean of g_A'H_C g_C and g_B'H_C g_C; used with `dataset_size` only.
        h_cc: g_C'H_C g_C; used with `dataset_size` only.
        units_c: units of C, >= 1; used with `dataset_size` only.
        dataset_size: D, examples drawn from without replacement; at least the units of A, B and C.

    Returns:
        (trace_h_cov, grad_h_grad), unbiased, not clamped.

    Raises:
        ConfigError: a size below 1, a data set smaller than what was drawn from it, or `dataset_size` without the
            products with C's own gradient.

    >>> solve_curvature(2.0, 6.0, 18.0, units_a=1, units_b=1)  # gradients 1 and 3 under a curvature of 2
    (4.0, 6.0)

    Source: McCandlish et al. 2018, eq. 2.8; the estimators are ours. Without replacement: footnote 6, carried to
    third moments by counting which of the indices of gradient, Hessian and gradient coincide.
    """
    if min(units_a, units_b, 1 if units_c is None else units_c) < 1:
        raise ConfigError(f"each part has at least 1 unit; got {units_a}, {units_b} and {units_c}.")
    spread = (h_aa - 2 * h_ab + h_bb) / (1 / units_a + 1 / units_b)
    if dataset_size is None:
        return spread, h_ab
    if h_own is None or h_cc is None or units_c is None:
        raise ConfigError("without replacement the Hessian's own gradient is needed: give h_own, h_cc and units_c.")
    if dataset_size < units_a + units_b + units_c:
        raise ConfigError(
            f"a block of {units_a + units_b + units_c} cannot be drawn without replacement from "
            f"dataset_size={dataset_size}."
        )
    # By how much the mean product of unlike units changes where gradient and gradient (spread), gradient and Hessian
    # (own) or all three (triple) are of one unit. Each sum below only weighs how often that happens.
    own = units_c * (h_own - h_ab)
    triple = units_c**2 * (h_cc - h_ab) - (units_c - 1) * (spread + 2 * own)
    size = float(dataset_size)
    trace_h_cov = ((size - 1) * spread - 2 * own + triple) / size
    grad_h_grad = h_ab + ((size - 1) * (spread + 2 * own) + triple) / size**2
    return trace_h_cov, grad_h_grad


def b_noise(blocks: Sequence[CurvatureMoments], *, unit: str = "examples") -> CurvatureScale:
    """B_noise of measured blocks: the ratio of their means, with Fieller's interval.

    The estimate is `noise_scale`'s, with tr(H Sigma) and G'HG in the places of tr(Sigma) and |G|^2; so are the
    assumptions: blocks are independent of each other, and at least 8 are needed for an interval. Negative
    curvature along the gradient is no noise scale: the quadratic model has no best step then.

    Args:
        blocks: of `measure_curvature`, in the order measured; at one set of weights, or along a run.
        unit: what a batch counts.

    Returns:
        CurvatureScale, resolved or with the reason why not.

    Raises:
        ConfigError: a moment that is not finite, or an unknown unit.

    >>> block = CurvatureMoments(trace_h_cov=8.0, grad_h_grad=2.0, trace_cov=9.0, grad_sq_norm=3.0,
    ...                          units_gradient=64, units_hessian=32)
    >>> print(b_noise([block] * 8))
    B_noise = 4 examples (95 % interval 4 to 4) over 8 blocks

    Source: McCandlish et al. 2018, eq. 2.6 to 2.8; Fieller 1954.
    """
    check_unit(unit)
    spread, curved, trace_cov, grad_sq_norm = columns(blocks)
    scale = noise_scale(spread, curved, unit=unit)
    simple = noise_scale(trace_cov, grad_sq_norm, unit=unit)
    reason = _why_unresolved(scale, spread, curved)
    limit = noise_scale(grad_sq_norm, curved, unit=unit)
    mean_sq_norm, mean_curved = simple.grad_sq_norm, scale.grad_sq_norm
    decrease = None
    if not reason and simple.resolved and mean_sq_norm is not None and mean_curved is not None:
        decrease = mean_sq_norm**2 / (2 * mean_curved)
    return CurvatureScale(
        b_noise=scale.b_simple,
        interval=scale.interval,
        resolved=not reason,
        reason=reason,
        unit=unit,
        lr_max=None if decrease is None else limit.b_simple,
        lr_max_interval=(None, None) if decrease is None else limit.interval,
        loss_decrease_max=decrease,
        b_simple=simple,
        num_blocks=len(blocks),
    )


def columns(blocks: Sequence[CurvatureMoments]) -> tuple[NDArray[np.float64], ...]:
    """(trace_h_cov, grad_h_grad, trace_cov, grad_sq_norm) of the blocks, each of shape (num_blocks,)."""
    rows = [(block.trace_h_cov, block.grad_h_grad, block.trace_cov, block.grad_sq_norm) for block in blocks]
    return tuple(np.array(rows, dtype=np.float64).reshape(-1, 4).T)


def is_above_zero(values: NDArray[np.float64]) -> bool:
    """Whether the mean of independent estimates, shape (num_blocks,), stands above 0 by more than its 95 % error."""
    # What noise_scale asks of its denominator is just this; its numerator is a constant here.
    return noise_scale(np.ones_like(values), values).resolved


def _why_unresolved(scale: NoiseScale, spread: NDArray[np.float64], curved: NDArray[np.float64]) -> str:
    """Why the ratio means nothing, in this module's words; empty if it means something."""
    if scale.resolved:
        return ""
    if scale.num_steps < 8:
        return f"an interval needs at least 8 blocks; got {scale.num_steps}."
    if is_above_zero(-curved):
        return (
            f"G'HG = {curved.mean():.3g} is below 0 by more than its error: the loss curves downwards along the "
            "gradient, so that the quadratic model has no best step here. Measure later in training."
        )
    if is_above_zero(-spread):
        return (
            f"tr(H Sigma) = {spread.mean():.3g} is below 0 by more than its error: the loss curves downwards along "
            "the noise, and the model needs it to be at least 0. Measure later in training."
        )
    more = "more blocks, or larger ones, are needed"
    if scale.steps_to_resolve:
        more = f"about {scale.steps_to_resolve:,} more blocks, or fewer larger ones, are expected to be needed"
    return f"G'HG = {curved.mean():.3g} is not told from 0; {more}."


def measure_curvature(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    count: Count | None = None,
    gradient_microbatches: int = 4,
    hessian_microbatches: int = 1,
    dataset_size: int | None = None,
    num_blocks: int | None = None,
) -> list[CurvatureMoments]:
    """Measure tr(H Sigma), G'HG, tr(Sigma) and |G|^2 at the model's weights, block by block.

    A block is 2 x `gradient_microbatches` + `hessian_microbatches` microbatches; the first ones go alternately to A
    and B, the last are C. Noise falls with the units of A and B, and less with those of C: a large gradient part is
    the cheap way to a resolved G'HG. Each C microbatch costs about 5 gradients (a graph and two products), 7 with
    `dataset_size`; memory is about five copies of the gradients (A's, B's, those of the graph, H times A's and B's)
    and one microbatch's graph, which two backwards go through, at a time.

    Gradients, weights, buffers, train/eval mode and random numbers stay as they are: random layers draw from a
    stream of their own, seeded by torch's. Frozen parameters have no part. H is what autograd differentiates twice:
    the kinks of a ReLU count as flat.

    Args:
        model: any module whose units do not see each other (no batch norm on batch statistics).
        loss: (model, batch) -> the SUM of the losses of the batch's units, a scalar, twice differentiable.
        batches: microbatches, drawn independently of each other; read only as far as whole blocks go.
        count: units in a microbatch; None: the length of the first tensor of a tuple, or of the tensor.
        gradient_microbatches: microbatches in each of A and B, >= 1.
        hessian_microbatches: microbatches in C, >= 1.
        dataset_size: examples that a block draws from without replacement (see `solve_curvature`).
        num_blocks: stop after so many blocks; None: when the batches end.

    Returns:
        One CurvatureMoments a block.

    Raises:
        ConfigError: nothing to train, batch norm, a layer without a second derivative, fewer batches than one
            block, a loss that is no scalar or not finite, a number out of range, a model wrapped in
            DistributedDataParallel or sharded by fully_shard.

    >>> import torch
    >>> model = nn.Linear(2, 1, bias=False)
    >>> half_square = lambda model, x: model(x).square().sum() / 2
    >>> blocks = measure_curvature(model, half_square, torch.randn(27, 8, 2), gradient_microbatches=1)
    >>> len(blocks), blocks[0].units_gradient
    (9, 16)

    Source: McCandlish et al. 2018, eq. 2.8; Pearlmutter 1994 (products with the Hessian).
    """
    check_counts(gradient_microbatches=gradient_microbatches, hessian_microbatches=hessian_microbatches)
    if num_blocks is not None:
        check_counts(num_blocks=num_blocks)
    probe = GradientProbe(model, loss, count)
    per_block = 2 * gradient_microbatches + hessian_microbatches
    blocks: list[CurvatureMoments] = []
    waiting: list[Any] = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) < per_block:
            continue
        parts = waiting[: 2 * gradient_microbatches]
        blocks.append(_measure_block(probe, (parts[::2], parts[1::2]), waiting[len(parts) :], dataset_size))
        waiting = []
        if num_blocks is not None and len(blocks) == num_blocks:
            break
    if not blocks:
        raise ConfigError(
            f"a block takes {per_block} microbatches; the batches ended after {len(waiting)}. Give more, or use a "
            "smaller gradient_microbatches."
        )
    return blocks


def _measure_block(
    probe: GradientProbe, halves: tuple[list[Any], list[Any]], hessian: list[Any], dataset_size: int | None
) -> CurvatureMoments:
    """One block's moments: gradients of both halves, then C's products with them, a microbatch at a time."""
    (grad_a, units_a), (grad_b, units_b) = (probe.mean_gradient(part) for part in halves)
    total = units_a + units_b
    sq_a, product, sq_b = probe.inner_products(grad_a, grad_b)
    sq_norm_step = (units_a**2 * sq_a + 2 * units_a * units_b * product + units_b**2 * sq_b) / total**2
    simple = solve_moments([sq_a, sq_b], [units_a, units_b], sq_norm_step, dataset_size=dataset_size)
    solved: list[tuple[float, float]] = []
    sizes: list[int] = []
    for batch in hessian:
        products = probe.curvature(grad_a, grad_b, batch, own=dataset_size is not None)
        sizes.append(products.units_c)
        solved.append(
            solve_curvature(
                products.h_aa, products.h_ab, products.h_bb, units_a=units_a, units_b=units_b, h_own=products.h_own,
                h_cc=products.h_cc, units_c=products.units_c, dataset_size=dataset_size,
            )
        )  # fmt: skip
    trace_h_cov, grad_h_grad = np.average(solved, axis=0, weights=sizes).tolist()
    return CurvatureMoments(
        trace_h_cov=trace_h_cov,
        grad_h_grad=grad_h_grad,
        trace_cov=simple.trace_cov,
        grad_sq_norm=simple.grad_sq_norm,
        units_gradient=total,
        units_hessian=sum(sizes),
    )
