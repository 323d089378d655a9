"""Which form must each batch norm layer of a model take, so that it normalises over n?"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from largebatch.errors import ConfigError
from largebatch.recipe.batchnorm.ghost import GhostBatchNorm, check_n
from largebatch.recipe.batchnorm.group import GroupBatchNorm
from largebatch.recipe.batchnorm.normalise import BatchNorm

_log = logging.getLogger(__name__)

Form = Literal["local", "ghost", "group", "sync", "frozen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchNormLayer:
    """What one batch norm layer of a model normalises over in training."""

    name: str
    """Its first name among the model's modules."""
    form: Form
    """local: the worker's whole batch; ghost: runs of it; group, sync: several workers' batches (sync: torch's
    SyncBatchNorm); frozen: fixed statistics."""
    n: int | None
    """Examples that are normalised together; None for a frozen layer."""


def batchnorm_over(model: nn.Module, n: int, *, local_batch: int, world_size: int = 1, rank: int = 0) -> nn.Module:
    """Make every batch norm layer of a model normalise over n examples, however the batch is laid out.

    Each layer keeps its form if the local batch is n, becomes a `GhostBatchNorm` if the local batch is larger, and a
    `GroupBatchNorm` over n / local_batch neighbouring workers if it is smaller. Parameters, buffers, hooks and
    state_dict keys stay what they were, so an optimizer made before still holds. SyncBatchNorm, which normalises over
    the batch of all workers and so trains another loss, is replaced too. A frozen layer is left alone: one in
    evaluation mode within a model in training mode. What became of which layer is logged, and `batchnorm_layers` tells.

    Call it before the model is wrapped (DDP, FSDP) or compiled; for n above the local batch every worker of the job
    calls it, since process groups are made.

    Args:
        model: changed in place.
        n: examples that are normalised together, >= 1: what the baseline had on each worker.
        local_batch: examples in one forward of one worker (its microbatch, where it accumulates).
        world_size: number of workers, >= 1.
        rank: this worker, 0 to world_size - 1.

    Returns:
        The model; another object only if it is itself a batch norm layer.

    Raises:
        ConfigError: a number is out of range; n is larger than the batch; n and the workers do not divide the batch
            (the sentence names the nearest that they do); torch.distributed does not run as `world_size` and `rank`
            say where groups are needed; a layer is lazy, parametrized, or has a forward of its own.

    >>> model = batchnorm_over(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), 32, local_batch=256)
    >>> batchnorm_layers(model, local_batch=256)
    [BatchNormLayer(name='1', form='ghost', n=32)]

    Source: Goyal 2017, sec. 2.3, eq. (5) to (7): n is a hyper-parameter of batch norm and is kept when the batch grows.
    """
    _check_layout(n, local_batch, world_size, rank)
    found = {module: name for name, module in model.named_modules() if isinstance(module, BatchNorm)}
    changing = {layer: name for layer, name in found.items() if not is_frozen(layer, model)}
    for layer, name in changing.items():
        _check_layer(layer, name)
    group = _own_group(n // local_batch, world_size, rank) if n > local_batch and changing else None
    made = {layer: _remade(layer, n, group) for layer in changing if _must_change(layer, n, local_batch)}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and isinstance(module, BatchNorm) and module in made:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, made[module])
    if isinstance(model, BatchNorm):
        model = made.get(model, model)
    forms = Counter(layer.form for layer in batchnorm_layers(model, local_batch=local_batch))
    _log.info("batch norm over n=%d: %s", n, ", ".join(f"{form} {num}" for form, num in forms.items()) or "no layers")
    return model


def batchnorm_layers(model: nn.Module, *, local_batch: int) -> list[BatchNormLayer]:
    """What each batch norm layer of a model normalises over in training.

    Args:
        model: in the mode that it is trained in: a layer in evaluation mode within a model in training mode is frozen.
        local_batch: examples in one forward of one worker, >= 1.

    Returns:
        The layers in the model's order; one that is used under two names comes once.

    >>> batchnorm_layers(nn.Sequential(nn.BatchNorm1d(8)), local_batch=32)
    [BatchNormLayer(name='0', form='local', n=32)]
    """
    return [
        BatchNormLayer(name=name, form=form, n=n)
        for name, layer in model.named_modules()
        if isinstance(layer, BatchNorm)
        for form, n in (_form_of(layer, model, local_batch),)
    ]


def is_frozen(layer: BatchNorm, model: nn.Module) -> bool:
    """Whether a layer normalises by fixed statistics while the model is trained.

    Within a model in training mode the layer's own mode says so. In one that is in evaluation mode as a whole every
    layer is, so there a layer is taken for frozen if its weight is, and the rest of the model is not.
    """
    if model.training:
        return not layer.training
    own = list(layer.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own) and any(p.requires_grad for p in model.parameters())


class _GhostBatchNormAct(GhostBatchNorm):
    """In place of timm's BatchNormAct2d, which drops out and activates too."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        return self.act(self.drop(super().forward(input)))


class _GroupBatchNormAct(GroupBatchNorm):
    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        return self.act(self.drop(super().forward(input)))


_KNOWN_FORWARDS = {
    kind.forward
    for kind in (BatchNorm, nn.SyncBatchNorm, GhostBatchNorm, GroupBatchNorm, _GhostBatchNormAct, _GroupBatchNormAct)
}


def _activates(layer: BatchNorm) -> bool:
    kind = type(layer)
    of_timm = kind.__module__.startswith("timm.") and kind.__name__ in ("BatchNormAct2d", "SyncBatchNormAct")
    return of_timm or isinstance(layer, _GhostBatchNormAct | _GroupBatchNormAct)


def _must_change(layer: BatchNorm, n: int, local_batch: int) -> bool:
    return n != local_batch or isinstance(layer, nn.SyncBatchNorm | GhostBatchNorm | GroupBatchNorm)


def _remade(layer: BatchNorm, n: int, group: dist.ProcessGroup | None) -> BatchNorm:
    # The new layer takes over everything that the old one holds: parameters, buffers, hooks, mode, numbers.
    kinds = (_GhostBatchNormAct, _GroupBatchNormAct) if _activates(layer) else (GhostBatchNorm, GroupBatchNorm)
    kind = kinds[group is not None]
    made = kind.__new__(kind)
    made.__dict__ = dict(layer.__dict__)
    if isinstance(made, GroupBatchNorm):
        made.group = group
    else:
        made.n = n
    return made


def _form_of(layer: BatchNorm, model: nn.Module, local_batch: int) -> tuple[Form, int | None]:
    if is_frozen(layer, model):
        return "frozen", None
    if isinstance(layer, GhostBatchNorm):
        return "ghost", layer.n
    if isinstance(layer, GroupBatchNorm):
        return "group", None if layer.group is None else local_batch * dist.get_world_size(layer.group)
    if isinstance(layer, nn.SyncBatchNorm):
        started = dist.is_available() and dist.is_initialized()
        return "sync", local_batch * (dist.get_world_size(layer.process_group) if started else 1)
    return "local", local_batch


def _check_layer(layer: BatchNorm, name: str) -> None:
    kind = type(layer).__name__
    if isinstance(layer, LazyModuleMixin):
        raise ConfigError(f"layer {name!r} ({kind}) does not know its channels yet. Run the model once before.")
    if hasattr(layer, "parametrizations"):
        raise ConfigError(
            f"layer {name!r} ({kind}) is parametrized, which a layer over n would lose. Remove the parametrization "
            f"first (torch.nn.utils.parametrize.remove_parametrizations)."
        )
    if type(layer).forward not in _KNOWN_FORWARDS and not _activates(layer):
        raise ConfigError(
            f"layer {name!r} is a {kind} with a forward of its own, which a layer over n would lose. "
            f"Replace it by GhostBatchNorm or GroupBatchNorm yourself, or put it into evaluation mode to leave it."
        )


def _fits(local_batch: int, n: int, world_size: int) -> bool:
    if n <= local_batch:
        return local_batch % n == 0
    return n % local_batch == 0 and world_size % (n // local_batch) == 0


def _check_layout(n: int, local_batch: int, world_size: int, rank: int) -> None:
    check_n(n)
    if local_batch < 1 or world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(
            f"local_batch and world_size are at least 1 and rank is 0 to world_size - 1; "
            f"got local_batch={local_batch}, world_size={world_size}, rank={rank}."
        )
    batch = local_batch * world_size
    if n > batch:
        raise ConfigError(
            f"batch norm over n={n} examples needs as many in one forward of all workers; there are {batch} "
            f"(world_size={world_size}, local_batch={local_batch}). Use n <= {batch}, or a larger batch."
        )
    if not _fits(local_batch, n, world_size):
        below = [local for local in range(local_batch - 1, 0, -1) if _fits(local, n, world_size)][:1]
        above = next(local for local in range(local_batch + 1, local_batch + n + 1) if _fits(local, n, world_size))
        nearest = " or ".join(f"{local * world_size} ({local} a worker)" for local in (*below, above))
        raise ConfigError(
            f"a batch of {batch} on {world_size} worker(s), {local_batch} each, cannot be cut into runs of n={n} that "
            f"are whole parts of a worker's or of several whole workers'. The nearest batches that can: {nearest}."
        )


def _own_group(num_workers: int, world_size: int, rank: int) -> dist.ProcessGroup:
    started = dist.is_available() and dist.is_initialized()
    running = (dist.get_world_size(), dist.get_rank()) if started else None
    if running != (world_size, rank):
        told = "is not started" if running is None else f"runs world_size={running[0]}, rank={running[1]}"
        raise ConfigError(
            f"n is spread over groups of {num_workers} workers, but torch.distributed {told}, where world_size="
            f"{world_size}, rank={rank} was given. Call dist.init_process_group first, and pass its numbers."
        )
    group, _ = dist.new_subgroups(num_workers)  # neighbours: ranks 0 to g - 1, g to 2g - 1, ...
    assert isinstance(group, dist.ProcessGroup)
    return group
