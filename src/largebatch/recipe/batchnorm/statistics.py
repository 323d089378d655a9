"""With which statistics does a trained model's batch norm evaluate?

The running averages lag behind the weights, by more the fewer updates there are, and under DDP each worker has its
own. So before evaluation they are computed afresh, or at least averaged over the workers.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.errors import ConfigError
from largebatch.recipe.batchnorm.convert import is_frozen
from largebatch.recipe.batchnorm.group import GroupBatchNorm
from largebatch.recipe.batchnorm.normalise import BatchNorm


def recompute_statistics(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    num_batches: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Set every batch norm layer's statistics to the mean and variance of its inputs over some batches, exactly.

    During the pass batch norm layers normalise as in training, over n examples; everything else (dropout) is in
    evaluation mode, as it will be when the statistics are used. The mean is that of all values. The variance is the
    population variance of all values about that mean: the average variance within batches plus the variance of the
    batches' means, which torch's running average leaves out. So the result does not depend on which layout of the
    batch made the runs of n. Sums over batches and workers are in float64. Weights, gradients, modes, the count of
    batches, and the random states of torch, numpy and Python stay as they were; after an error the statistics too.

    Every worker of the group calls it, each with its own share of the batches, and all get the same statistics. Shares
    may be uneven, but not where batch norm goes over a group of workers, who need each other in every forward.

    Args:
        model: a frozen layer (see `batchnorm_over`) keeps its statistics; so does one that no batch reaches. Of a DDP
            model the module inside is run.
        batches: tensors; tuples or lists, of which the first element is the input; or mappings of keyword arguments.
            As in training: of the local batch, and on the model's device.
        num_batches: how many of the batches to use, >= 1; None for all.
        group: the workers that share the work; None for all of the job.

    Raises:
        ConfigError: there is no layer to recompute; too few batches, here or on another worker; values that are not
            finite; or shares of several lengths where a layer is a GroupBatchNorm.

    >>> model = nn.Sequential(nn.BatchNorm1d(1))
    >>> recompute_statistics(model, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
    >>> model[0].running_mean.item(), model[0].running_var.item()
    (3.0, 5.0)

    Source: Goyal 2017, sec. 5.2 and Fig. 4; the population variance as in Wu and Johnson 2021 (PreciseBN), where
    Ioffe and Szegedy 2015, alg. 2, take the mean of the batches' unbiased variances.
    """
    if num_batches is not None and num_batches < 1:
        raise ConfigError(f"num_batches is at least 1, or None for all; got {num_batches}.")
    layers = [layer for layer in _with_statistics(model) if not is_frozen(layer, model)]
    if not layers:
        raise ConfigError(
            "the model has no batch norm layer with running statistics that is not frozen: there is nothing to "
            "recompute."
        )
    moments = [_Moments(layer) for layer in layers]
    failure: Exception | None = None
    try:
        _run(model, layers, moments, _in_step(batches, num_batches, layers, group), num_batches)
    except Exception as error:
        failure = error
    pooled = _pool(moments, failed=failure is not None, group=group)
    if failure is not None:
        raise failure
    # The same on all workers, and nothing is written yet.
    if not all(bool(torch.isfinite(mean).all() and torch.isfinite(var).all()) for _, mean, var in pooled):
        raise ConfigError(
            "a batch norm layer's inputs over these batches are not all finite, so their mean and variance are no "
            "numbers. Nothing was changed; look at the batches, or at weights that diverged."
        )
    for layer, (count, mean, var) in zip(layers, pooled, strict=True):
        if count:
            for buffer, value in zip(_statistics_of(layer), (mean, var), strict=True):
                buffer.copy_(value)


def average_statistics(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace each batch norm layer's running statistics by their average over workers, who count alike.

    Every worker of the group calls it, before an evaluation or a checkpoint. Without torch.distributed it does nothing.
    DDP's default, `broadcast_buffers=True`, makes the statistics worker 0's at each forward, so that only each one's
    last update differs; with False this averages all that the workers have seen.

    Args:
        model: all its batch norm layers with running statistics take part.
        group: the workers to average over; None for all of the job.

    Source: Goyal 2017, sec. 5.2; the average of the running averages, each as in Ioffe and Szegedy 2015, alg. 2.
    """
    buffers = [buffer for layer in _with_statistics(model) for buffer in _statistics_of(layer)]
    if not buffers or not _has_workers():
        return
    device = buffers[0].device
    total = torch.cat([buffer.to(device, torch.float64) for buffer in buffers])
    dist.all_reduce(total, group=group)
    total /= dist.get_world_size(group)
    with torch.no_grad():
        for buffer, average in zip(buffers, total.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(average)


class _Moments:
    """The count, mean and squared deviations of all values that came into a layer so far, in float64."""

    def __init__(self, layer: BatchNorm) -> None:
        self.count = 0
        self.mean = torch.zeros_like(_statistics_of(layer)[0], dtype=torch.float64)
        self.squares = torch.zeros_like(self.mean)

    def hook(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Look at what a layer is about to normalise."""
        self.add(inputs[0] if inputs else named["input"])

    def add(self, values: Tensor) -> None:
        """Take in one batch, shape (batch, channels, ...), by the pairwise update of Chan, Golub and LeVeque 1983."""
        count = values.numel() // values.shape[1]
        if not count:
            return
        values = values.to(torch.promote_types(values.dtype, torch.float32)).movedim(1, -1).flatten(0, -2)
        near = values.mean(0)
        apart = values - near
        rest = apart.mean(0).double()  # what rounding took from the mean, which may be far from zero
        squares = apart.square().sum(0).double() - count * rest.square()
        gap = near.double() + rest - self.mean
        whole = self.count + count
        self.mean += gap * (count / whole)
        self.squares += squares + gap.square() * (self.count * count / whole)
        self.count = whole


def _run(
    model: nn.Module,
    layers: list[BatchNorm],
    moments: list[_Moments],
    batches: Iterable[Any],
    num_batches: int | None,
) -> None:
    inner = model.module if isinstance(model, DistributedDataParallel) else model  # DDP would send buffers around
    num_run = 0
    with _as_it_was(model, layers), _watched(layers, moments), torch.no_grad():
        for module in model.modules():
            module.training = False
        for layer in layers:
            layer.training, layer.momentum = True, None  # a cumulative average: nobody takes it for training
        for batch in batches:
            if isinstance(batch, Mapping):
                inner(**batch)
            else:
                inner(batch[0] if isinstance(batch, tuple | list) else batch)
            num_run += 1
    if num_run < (num_batches or 1):
        raise ConfigError(f"the batches ended after {num_run}, and {num_batches or 'at least 1'} were asked for.")


def _in_step(
    batches: Iterable[Any], num_batches: int | None, layers: list[BatchNorm], group: dist.ProcessGroup | None
) -> Generator[Any]:
    """Each batch when all workers have one, where layers go over several: a lone forward would wait for the others."""
    if not any(isinstance(layer, GroupBatchNorm) and dist.get_world_size(layer.group) > 1 for layer in layers):
        yield from islice(batches, num_batches)
        return
    iterator, num_run, device = islice(batches, num_batches), 0, _statistics_of(layers[0])[0].device
    while True:
        failure: Exception | None = None
        try:
            batch = next(iterator, _END)
        except Exception as error:
            batch, failure = _END, error
        own = torch.tensor([int(batch is not _END), int(failure is not None)], device=device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own, group=group)
        has_one, has_failed = torch.stack(found).bool().T.tolist()
        if failure is not None:
            raise failure
        if any(has_failed):
            raise ConfigError("another worker's batches ended in an error; its own says why. Nothing was changed.")
        if not any(has_one):
            return
        if not all(has_one):
            ended = [str(rank) for rank, has in enumerate(has_one) if not has]
            raise ConfigError(
                f"batch norm over several workers needs them all in every forward, and the batches of worker "
                f"{', '.join(ended)} ended after {num_run}, where others have more. Give every worker as many batches, "
                "or num_batches to stop at."
            )
        yield batch
        num_run += 1


_END = object()


@contextmanager
def _watched(layers: list[BatchNorm], moments: list[_Moments]) -> Generator[None]:
    handles = [
        layer.register_forward_pre_hook(into.hook, with_kwargs=True)
        for layer, into in zip(layers, moments, strict=True)
    ]
    try:
        with torch.compiler.set_stance("force_eager"):  # for a look in passing nothing is compiled anew
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _as_it_was(model: nn.Module, layers: list[BatchNorm]) -> Generator[None]:
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(layer, layer.momentum) for layer in layers]
    buffers = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers(recurse=False)]
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(device.index for device in devices)):
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        for module, training in modes:
            module.training = training
        for layer, momentum in momenta:
            layer.momentum = momentum
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _pool(
    moments: list[_Moments], *, failed: bool, group: dist.ProcessGroup | None
) -> list[tuple[float, Tensor, Tensor]]:
    """Each layer's (count, mean, population variance) over all workers; a failure anywhere is one everywhere."""
    device = moments[0].mean.device
    counts = torch.tensor([float(failed), *(found.count for found in moments)], dtype=torch.float64, device=device)
    sizes = [found.mean.numel() for found in moments]
    own = counts[1:].repeat_interleave(torch.tensor(sizes, device=device))
    means = torch.cat([found.mean.to(device) for found in moments])
    squares = torch.cat([found.squares.to(device) for found in moments])
    if _has_workers():
        sums = own * means
        both = torch.cat((counts, sums))
        dist.all_reduce(both, group=group)
        counts, sums = both.split([len(counts), len(sums)])
        whole = counts[1:].repeat_interleave(torch.tensor(sizes, device=device)).clamp(min=1)
        squares = squares + own * (means - sums / whole).square()
        means = sums / whole
        dist.all_reduce(squares, group=group)
        if counts[0] and not failed:
            raise ConfigError(
                f"{int(counts[0])} other worker(s) could not recompute the statistics; theirs says why. Nothing was "
                f"changed."
            )
    totals = counts[1:].tolist()
    return [
        (count, mean, square / max(count, 1.0))
        for count, mean, square in zip(totals, means.split(sizes), squares.split(sizes), strict=True)
    ]


def _with_statistics(model: nn.Module) -> list[BatchNorm]:
    return [
        module
        for module in model.modules()
        if isinstance(module, BatchNorm) and module.track_running_stats and module.running_mean is not None
    ]


def _statistics_of(layer: BatchNorm) -> tuple[Tensor, Tensor]:
    assert layer.running_mean is not None and layer.running_var is not None
    return layer.running_mean, layer.running_var


def _has_workers() -> bool:
    return dist.is_available() and dist.is_initialized()
