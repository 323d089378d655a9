"""How are runs of examples normalised, each by its own mean and variance, and what flows back?

A batch of k n examples is seen as (k, n, channels, positions), which is a view of contiguous and of channels_last
memory alike. One autograd function normalises all k runs at once, or one run that is spread over workers: then the
workers share their moments in one all-reduce, and the two sums of the backward pass in another. It keeps the input and
the moments, nothing else. A second derivative, and torch.compile, go through plain operations instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from largebatch.errors import ConfigError

BatchNorm = _BatchNorm
"""torch's base of all batch norm layers, SyncBatchNorm and ours."""

_HALVES = (torch.float16, torch.bfloat16)
_LAYOUTS = {
    4: (torch.contiguous_format, torch.channels_last),
    5: (torch.contiguous_format, torch.channels_last_3d),
    0: (torch.contiguous_format,),
}
"""Dimensions of the input -> memory formats of which runs are a view; 0 for all others."""


def normalise(
    values: Tensor,
    num_runs: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise each of `num_runs` equal runs of the batch, or one run that the workers of `group` hold together.

    Args:
        values: the layer's input, shape (batch, channels, ...); half precision is normalised in float32.
        num_runs: k, a divisor of the batch; 1 with a group.
        weight: gamma, shape (channels,), or None.
        bias: beta, shape (channels,), or None.
        eps: added to the variance.
        group: the workers that hold the run together; every one of them calls this, and the backward pass too.

    Returns:
        The output, like `input`; each run's mean and population variance, shape (num_runs, channels), without
        gradients; and the values behind each of these, a scalar.
    """
    if not any(values.is_contiguous(memory_format=layout) for layout in _LAYOUTS.get(values.ndim, _LAYOUTS[0])):
        values = values.contiguous()
    if torch.compiler.is_compiling():
        output, mean, var, count = _plain(values, num_runs, weight, bias, eps, group)
        mean, var = mean.detach(), var.detach()
    else:
        output, mean, var, count = _Normalise.apply(values, weight, bias, num_runs, eps, group)
    return output, mean.flatten(1), var.flatten(1), count


def update_running_statistics(layer: BatchNorm, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Bring a layer's running statistics to where one update a run, in their order, would.

    Args:
        layer: torch's own momentum, or the cumulative average where momentum is None; without statistics: nothing.
        mean: of each run, shape (num_runs, channels).
        var: population variance of each run; like torch, the running one takes the unbiased.
        count: the values behind each of them, a scalar; of fewer than two nothing is learnt of a variance, and the
            statistics stay as they were.
    """
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    num_runs = len(mean)
    with torch.no_grad():
        known = count > 1
        unbiased = var * (count / (count - 1).clamp(min=1))
        for running, added in ((layer.running_mean, mean), (layer.running_var, unbiased)):
            held = running.clone()
            if layer.momentum is None:
                assert layer.num_batches_tracked is not None
                before = layer.num_batches_tracked.to(running.dtype)
                running.mul_(before / (before + num_runs)).add_(added.sum(0) / (before + num_runs))
            else:
                keep = 1.0 - layer.momentum
                ages = torch.arange(num_runs - 1, -1, -1, device=added.device, dtype=added.dtype)
                weighted = layer.momentum * keep ** ages[:, None] * added  # no matmul: autocast would halve it
                running.mul_(keep**num_runs).add_(weighted.sum(0))
            running.copy_(torch.where(known, running, held))
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(num_runs * known)


def check_input(layer: BatchNorm, values: Tensor) -> None:
    """Refuse what has no channels, or not this layer's."""
    if values.ndim < 2 or values.shape[1] != layer.num_features:
        raise ConfigError(
            f"{type(layer).__name__} takes an input of shape (batch, {layer.num_features}, ...); "
            f"got {tuple(values.shape)}."
        )


def _plain(
    values: Tensor,
    num_runs: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # The definition, in operations that can be differentiated as often as one likes.
    runs = _as_runs(values, num_runs)
    count = _add_up(runs.new_full((), float(runs.shape[1] * runs.shape[3])), group)
    mean = _add_up(_sums(runs), group) / count
    centred = runs - mean
    var = _add_up(_sums(centred * centred), group) / count
    output = centred * _scale(weight, var, eps)
    if bias is not None:
        output = output + bias.view(-1, 1)
    return output.to(values.dtype).view(values.shape), mean, var, count


class _Normalise(Function):
    @staticmethod
    def forward(
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        num_runs: int,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        runs = _as_runs(values, num_runs)
        size = runs.shape[1] * runs.shape[3]
        local_mean = _sums(runs) / max(size, 1)  # a worker may hold nothing of the group's run
        whole = torch.empty_like(values, dtype=runs.dtype)  # no view, so that an activation may work in its place
        centred = torch.sub(runs, local_mean, out=whole.view(runs.shape))
        squares = _sums(centred.square())
        count = runs.new_full((), float(size))
        if group is None:
            mean, var = local_mean, squares / count
        else:
            mean, var, count = _pool(local_mean, squares, count, group)
        scale = _scale(weight, var, eps)
        centred.mul_(scale)
        if group is not None:
            centred.add_((local_mean - mean) * scale)
        if bias is not None:
            centred.add_(bias.view(-1, 1))
        return whole.to(values.dtype), mean, var, count

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        values, weight, _, ctx.num_runs, ctx.eps, ctx.group = inputs
        _, mean, var, count = output
        ctx.mark_non_differentiable(mean, var, count)
        ctx.save_for_backward(values, weight, mean, var, count)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_output = grad_outputs[0]
        values, weight, mean, var, count = ctx.saved_tensors
        grad = _as_runs(grad_output, ctx.num_runs)
        sums = _sums(grad)
        grad_bias = sums.sum((0, 1, 3)) if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled():  # the gradient is to be differentiated again
            return *_differentiable_gradients(ctx, values, weight, grad_output), grad_bias, None, None, None
        runs = _as_runs(values, ctx.num_runs)
        centred = runs - mean
        products = _sums(grad * centred)
        inverse = (var + ctx.eps).rsqrt()
        grad_input = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (products * inverse).sum((0, 1, 3))
        if ctx.needs_input_grad[0]:
            if ctx.group is not None:
                both = torch.stack((sums, products))
                dist.all_reduce(both, group=ctx.group)
                sums, products = both
            # dx = gamma/sigma (dy - mean(dy) - xhat mean(dy xhat)), the means over the whole run
            along = centred.mul_(products * inverse.square() / -count)
            grad_input = along.add_(grad).sub_(sums / count).mul_(_scale(weight, var, ctx.eps))
            grad_input = grad_input.to(values.dtype).view(values.shape)
        return grad_input, grad_weight, grad_bias, None, None, None


def _differentiable_gradients(
    ctx: Any, values: Tensor, weight: Tensor | None, grad_output: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    needed = ctx.needs_input_grad[:2]
    sources = [of for of, is_needed in zip((values, weight), needed, strict=True) if is_needed and of is not None]
    if not sources:
        return None, None
    output = _plain(values, ctx.num_runs, weight, None, ctx.eps, ctx.group)[0]
    found = iter(torch.autograd.grad(output, sources, grad_output, create_graph=True))
    return next(found) if needed[0] else None, next(found) if needed[1] else None


class _SumOverWorkers(Function):
    # What each worker's loss takes from the sum comes back to every worker's part: the gradient is a sum as well.
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _SumOverWorkers.apply(grad_outputs[0], ctx.group), None


def _add_up(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return values if group is None else _SumOverWorkers.apply(values, group)


def _pool(mean: Tensor, squares: Tensor, count: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    # Each worker fills its own row, so the sum over workers is the table of all, bit for bit the same on each.
    table = mean.new_zeros((dist.get_world_size(group), 3, mean.numel()))
    table[dist.get_rank(group)] = torch.stack((count.expand(mean.numel()), mean.flatten(), squares.flatten()))
    dist.all_reduce(table, group=group)
    counts, means, all_squares = table.unbind(1)
    total = counts.sum(0)
    whole = (counts * means).sum(0) / total
    var = (all_squares + counts * (means - whole).square()).sum(0) / total
    return whole.view(mean.shape), var.view(mean.shape), total[0]


def _as_runs(values: Tensor, num_runs: int) -> Tensor:
    batch, channels, *places = values.shape
    runs = values.reshape(num_runs, batch // num_runs, channels, math.prod(places))
    return runs.float() if runs.dtype in _HALVES else runs


def _sums(runs: Tensor) -> Tensor:
    return runs.sum(3, keepdim=True).sum(1, keepdim=True)  # twice as fast on a CPU as both at once


def _scale(weight: Tensor | None, var: Tensor, eps: float) -> Tensor:
    inverse = (var + eps).rsqrt()
    return inverse if weight is None else weight.view(-1, 1) * inverse
