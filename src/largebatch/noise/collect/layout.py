"""How is this model spread over workers, and can its gradients be measured there?

What is not understood is refused here, in words: an unforeseen layout would give a number that looks right.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parallel import DistributedDataParallel

from largebatch.errors import ConfigError
from largebatch.groups import num_workers
from largebatch.noise.collect.fsdp import find_bundles, find_spread, is_fsdp_module

logger = logging.getLogger(__name__)

EXACT_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
"""DDP's communication hooks after which p.grad is the mean gradient (rounded to half precision at worst)."""
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that wrappers put into a parameter's path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where the workers are over which a model's gradients are averaged."""

    kind: Literal["single", "ddp", "fsdp"] = "single"
    """How gradients travel: not at all, by DistributedDataParallel, by fully_shard (FSDP2)."""
    world_size: int = 1
    """Workers whose gradients are averaged."""
    rank: int = 0
    """This worker's number among them."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """Summing over each in turn sums over all workers."""
    ddp: DistributedDataParallel | None = None
    """The wrapper, for kind "ddp"."""


def find_layout(model: nn.Module) -> Layout:
    """How the gradients of `model` are averaged over workers.

    Raises:
        ConfigError: the model is spread in a way whose gradients cannot be read; says why and what to do.
    """
    modules = list(model.modules())
    _refuse_wrappers(modules)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(f"parameter {name!r} has no shape yet (a lazy layer). Run the model once first.")
        if parameter.is_meta:
            raise ConfigError(f"parameter {name!r} is on the meta device, without values. Materialise the model first.")
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to measure.")
    if any(is_fsdp_module(module) for module in modules):
        return _fsdp_layout(model)
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise ConfigError(
            "the model has DTensor parameters that fully_shard does not manage (tensor parallelism?): their gradients "
            "are spread in a way that is not measured. Use DDP or fully_shard over the whole model."
        )
    wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if not wrappers:
        if num_workers() > 1:
            raise ConfigError(
                f"this job has {num_workers()} workers, but the model is wrapped neither in DistributedDataParallel "
                "nor by fully_shard, so how its gradients are averaged cannot be known (by hand? pipeline stages?). "
                "Pass the wrapped model."
            )
        return Layout()
    (ddp, *others) = wrappers
    inside = {id(parameter) for parameter in ddp.parameters() if parameter.requires_grad}
    if others or inside != trainable:
        raise ConfigError(
            "only a part of the model's trainable parameters is in one DistributedDataParallel: wrap the whole model."
        )
    ignored = sorted(set(ddp.parameters_to_ignore) & {n for n, p in ddp.module.named_parameters() if p.requires_grad})
    if ignored or getattr(ddp, "mixed_precision", None) is not None:
        what = f"ignores the trainable parameter {ignored[0]!r}" if ignored else "keeps copies in mixed_precision"
        raise ConfigError(
            f"DistributedDataParallel {what}: p.grad is not the mean gradient. Use autocast, ignore none."
        )
    group: Any = ddp.process_group
    world_size = dist.get_world_size(group)
    groups = (group,) if world_size > 1 else ()
    return Layout(kind="ddp", world_size=world_size, rank=dist.get_rank(group), groups=groups, ddp=ddp)


def check_averaged(ddp: DistributedDataParallel, *, synced: bool | None) -> None:
    """Raise ConfigError unless `ddp` leaves the mean gradient in p.grad.

    `synced` says whether its last forward of the step was to be synced; None means that there was none.
    """
    if synced is None:
        raise ConfigError(
            "no forward of this step went through the DistributedDataParallel wrapper, so its gradients were not "
            "averaged over the workers: call the wrapped model, not its .module."
        )
    if not synced:
        raise ConfigError(
            "the step's last forward was under no_sync(), so its gradients were not averaged over the workers: "
            "leave the last microbatch of every step outside it."
        )
    for hook, _ in getattr(ddp, "_comm_hooks", ()):
        name = getattr(hook, "__name__", type(hook).__name__)
        if name not in EXACT_HOOKS:
            raise ConfigError(
                f"the communication hook {name!r} is not known to leave the mean gradient in p.grad (a lossy one such "
                "as PowerSGD does not). While measuring use fp16_compress_hook, bf16_compress_hook or none."
            )


def warn_of_batch_norm(model: nn.Module) -> None:
    """Log a warning where a model's layers couple the examples of a microbatch."""
    num_norms = sum(isinstance(module, BatchNorm) and module.training for module in model.modules())
    if num_norms:
        logger.warning(
            "noise scale: %d batch norm layer(s) in training couple the examples of a microbatch: the noise is that of "
            "microbatches of this size, and another size is another loss (Goyal et al. 2017, sec. 2.3).",
            num_norms,
        )


def named_trainable(model: nn.Module, layout: Layout) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter of what is trained now, tied ones once, the names as they are without wrappers."""
    root = layout.ddp.module if layout.ddp is not None else model
    for name, parameter in root.named_parameters():
        if parameter.requires_grad:
            yield plain_name(name), parameter


def plain_name(name: str) -> str:
    """A parameter's name as it is without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _refuse_wrappers(modules: list[nn.Module]) -> None:
    for module in modules:
        kind, origin = type(module).__name__, type(module).__module__
        if isinstance(module, nn.DataParallel):
            raise ConfigError(
                "nn.DataParallel adds the replicas' gradients up before any of them can be read. "
                "Use DistributedDataParallel."
            )
        if kind == "FullyShardedDataParallel" and origin.startswith("torch.distributed.fsdp"):
            raise ConfigError("FSDP1 (FullyShardedDataParallel) is not supported. Use fully_shard (FSDP2).")
        if origin.split(".")[0] == "deepspeed" or any(hasattr(p, "ds_id") for p in module.parameters(recurse=False)):
            raise ConfigError(
                "DeepSpeed keeps gradients in partitions of its own, which are not measured. "
                "Use DistributedDataParallel or fully_shard (FSDP2)."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{kind}(sparse=True) has sparse gradients, which are not measured. Make it with sparse=False."
            )


def _fsdp_layout(model: nn.Module) -> Layout:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError("the model is in DistributedDataParallel and in fully_shard at once: use one of them.")
    spread = find_spread(model, find_bundles(model))
    return Layout(
        kind="fsdp", world_size=spread.shard_size * spread.replica_size, rank=spread.rank, groups=spread.groups
    )
