"""What did fully_shard (FSDP2) make of this model, and can its gradients be read?

fully_shard keeps parameters in units, one a call; here a unit is a Bundle, because a unit elsewhere is what a batch
counts. Setters and hooks are public in torch, what a bundle holds is not: this file alone looks inside, and says so
in words where a torch keeps it in another way than 2.10 to 2.14 do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.groups import num_workers

EXACT = (torch.float32, torch.bfloat16)
"""Types in which the reduce-scatter divides by the workers itself; gradients in others are divided before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """The parameters of one fully_shard call: their gradients travel together, as one flat tensor."""

    module: Any
    """The FSDPModule whose setters reach it."""
    modules: tuple[nn.Module, ...]
    """Modules whose forward gathers its parameters."""
    state: Any
    """torch's own object, an FSDPParamGroup."""
    names: tuple[str, ...]
    """Names of its parameters, the first one of a tied parameter."""

    @property
    def sharded(self) -> list[nn.Parameter]:
        """This worker's shards, in the order of `names`: what an optimizer steps."""
        return [parameter.sharded_param for parameter in self.state.fsdp_params]

    @property
    def whole(self) -> list[nn.Parameter | None]:
        """The parameters that forward and backward use; None before the first forward."""
        return [getattr(parameter, "_unsharded_param", None) for parameter in self.state.fsdp_params]

    @property
    def unfinished(self) -> bool:
        """Whether gradients were reduced over the shards but not over the replicas yet."""
        return getattr(self.state, "_partial_reduce_output", None) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Over which workers bundles are sharded and replicated."""

    shard_size: int
    replica_size: int
    rank: int
    """This worker's number among all, 0 to shard_size * replica_size - 1."""
    groups: tuple[dist.ProcessGroup, ...]
    """Of the axes with more than one worker."""


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether fully_shard was called on `module`."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def local(tensor: Tensor) -> Tensor:
    """This worker's part of a sharded gradient, the tensor itself, not a copy."""
    return getattr(tensor, "_local_tensor", tensor)


def find_bundles(model: nn.Module) -> list[Bundle]:
    """The bundles of `model`, in the order of its modules.

    Raises:
        ConfigError: parameters of one fully_shard call on several meshes, or a torch that is not understood.
    """
    prefixes = {id(module): name for name, module in model.named_modules()}
    found: list[Bundle] = []
    states: set[int] = set()
    for module in model.modules():
        if not is_fsdp_module(module):
            continue
        try:
            state: Any = module._get_fsdp_state()  # pyright: ignore
            if id(state) in states:
                continue
            states.add(id(state))
            groups = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if groups is None else groups
            bundles = [_bundle(module, group, prefixes) for group in groups if group is not None]
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"torch {torch.__version__} keeps fully_shard's parameters in a way that is not understood ({error}); "
                "torch 2.10 to 2.14 are. Use one of these, or DistributedDataParallel."
            ) from error
        if len(bundles) > 1:
            raise ConfigError(
                "shard_placement_fn puts parameters of one fully_shard call on several meshes, which is not measured: "
                "use one mesh."
            )
        found += bundles
    return found


def find_spread(model: nn.Module, bundles: Sequence[Bundle]) -> Spread:
    """Over which workers all `bundles` are spread.

    Raises:
        ConfigError: they are spread in a way whose gradients cannot be read; says why and what to do.
    """
    check_managed(model, bundles)
    for bundle in bundles:
        _refuse(bundle)
    meshes = [bundle.state.mesh_info for bundle in bundles]
    first = meshes[0]
    axes = [(_ranks(mesh, "shard"), _ranks(mesh, "replicate")) for mesh in meshes]
    if any(each != axes[0] for each in axes):
        raise ConfigError("fully_shard was called with several meshes, which is not measured: use one for all units.")
    shard_size, replica_size = len(axes[0][0]), max(len(axes[0][1]), 1)
    if shard_size == 1 and replica_size > 1:
        raise ConfigError(
            f"the mesh of fully_shard is {replica_size} x 1: with one worker a shard the gradients are averaged before "
            "they can be read. Shard over two workers or more, or use DistributedDataParallel."
        )
    world_size = shard_size * replica_size
    if world_size != num_workers():
        raise ConfigError(
            f"the mesh of fully_shard holds {world_size} of this job's {num_workers()} workers, so what the others "
            "hold cannot be known (pipeline stages? tensor parallelism?). Use a mesh of all workers."
        )
    replica = first.replicate_mesh_rank if replica_size > 1 else 0
    groups = [first.shard_process_group] if shard_size > 1 else []
    groups += [first.replicate_process_group] if replica_size > 1 else []
    return Spread(
        shard_size=shard_size,
        replica_size=replica_size,
        rank=replica * shard_size + first.shard_mesh_rank,
        groups=tuple(groups),
    )


def check_managed(model: nn.Module, bundles: Sequence[Bundle]) -> None:
    """Raise ConfigError if a trainable parameter of `model` is in none of the bundles."""
    managed: set[tuple[int, str]] = set()
    for bundle in bundles:
        for parameter in bundle.state.fsdp_params:
            info = parameter._module_info
            managed.add((id(info.module), info.param_name))
            managed |= {(id(m), n) for m, n in zip(info.shared_modules, info.shared_param_names, strict=True)}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and (id(module), name) not in managed:
                raise ConfigError(
                    f"fully_shard does not manage the trainable parameter {f'{path}.{name}'.lstrip('.')!r}, so its "
                    "gradient is not averaged over the workers: call fully_shard on the whole model too, without "
                    "ignored_params."
                )


def check_division(bundle: Bundle, world_size: int) -> str:
    """Why gradients are not the mean over the workers; empty if they are."""
    factor = getattr(bundle.state, "gradient_divide_factor", None)
    if factor is None or factor == world_size:
        return ""
    return (
        f"set_gradient_divide_factor({factor:g}) makes p.grad something else than the mean over the {world_size} "
        f"workers. Leave it out and scale the loss by {world_size / factor:g} instead."
    )


def divided_before(dtype: torch.dtype, world_size: int) -> int:
    """What torch divides a gradient by before its sum over the workers, against overflow: about their square root.

    >>> [divided_before(torch.float16, workers) for workers in (1, 2, 3, 4, 8, 64)]
    [1, 2, 2, 2, 4, 8]
    """
    factor = 1
    if dtype not in EXACT:
        while world_size % factor == 0 and world_size / factor > factor:
            factor *= 2
    return factor


def _bundle(module: nn.Module, group: Any, prefixes: dict[int, str]) -> Bundle:
    infos = [parameter._module_info for parameter in group.fsdp_params]
    for parameter in group.fsdp_params:
        _ = parameter.sharded_param, parameter.is_dtensor
    _ = group._reduce_scatter_comm, group._all_reduce_hook, group.offload_policy, group.mesh_info
    names = tuple(f"{prefixes.get(id(info.module), '')}.{info.param_name}".lstrip(".") for info in infos)
    return Bundle(module=module, modules=tuple(group.modules), state=group, names=names)


def _refuse(bundle: Bundle) -> None:
    state = bundle.state
    name = bundle.names[0] if bundle.names else ""
    if any(parameter.is_dtensor for parameter in state.fsdp_params):
        raise ConfigError(
            f"{name!r} was a DTensor before fully_shard (tensor parallelism?): its gradient is spread over more axes "
            "than are measured. Use fully_shard alone."
        )
    if not hasattr(state.mesh_info, "shard_process_group"):
        raise ConfigError("replicate() is not measured. Use DistributedDataParallel or fully_shard.")
    if type(state.offload_policy).__name__ != "OffloadPolicy":
        raise ConfigError("CPUOffloadPolicy takes the gradients to the host, which is not measured: leave it out.")
    if problem := check_division(bundle, num_workers()):
        raise ConfigError(problem)
    comm, hook = type(state._reduce_scatter_comm), state._all_reduce_hook
    origins = [
        origin.split(".")[0] for origin in (comm.__module__, getattr(getattr(hook, "func", hook), "__module__", ""))
    ]
    if "largebatch" in origins:
        raise ConfigError("another monitor watches this model already: close() that one first.")
    if origins[0] != "torch" or hook is not None:
        what = comm.__name__ if hook is None else "the all-reduce hook"
        raise ConfigError(
            f"{what}, set by hand, is not known to leave the mean gradient in p.grad: measure without it."
        )


def _ranks(mesh: Any, axis: str) -> tuple[int, ...]:
    group = getattr(mesh, f"{axis}_process_group", None)
    return () if group is None else tuple(dist.get_process_group_ranks(group))
