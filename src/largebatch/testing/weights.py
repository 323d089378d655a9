"""Which tensors does a model hold, put together where they are sharded, by the names they have without wrappers?"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from largebatch.errors import ConfigError
from largebatch.groups import is_spread

Named = dict[str, Tensor]
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters, as the model holds them."""
    return _named(model, True)


def buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers, as the model holds them."""
    return _named(model, False)


def _named(model: nn.Module, trained: bool) -> list[tuple[str, Tensor]]:
    """Names as they are without what was wrapped around the model."""
    wrappers = {
        f"{name}.module." if name else "module."
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel | DataParallel)
    }
    found: list[tuple[str, Tensor]] = []
    for name, tensor in model.named_parameters() if trained else model.named_buffers():
        for prefix in sorted(wrappers, key=len, reverse=True):
            if name.startswith(prefix):
                name = prefix[: -len("module.")] + name[len(prefix) :]
        found.append((".".join(part for part in name.split(".") if part not in _WRAPPERS), tensor))
    return found


def state(model: nn.Module) -> Named:
    """Parameters and buffers."""
    return dict(parameters(model)) | dict(buffers(model))


def load_whole(model: nn.Module, start: Named, world_size: int) -> None:
    """Give the model these values, each worker its own part of them.

    Raises:
        ConfigError: the model has other parameters or buffers.
    """
    own = state(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in start.items()}
    if shapes != wanted:
        name = next(name for name in [*wanted, *shapes] if shapes.get(name) != wanted.get(name))
        raise ConfigError(
            f"make gives another model on {world_size} workers than on 1: {name} is {_shape(wanted.get(name))} on one "
            f"and {_shape(shapes.get(name))} here. Shard with fully_shard, and build the same model everywhere."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            value = start[name].to(tensor.device)
            if is_spread(tensor):
                from torch.distributed.tensor import distribute_tensor  # takes a second to import

                value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.detach().copy_(value)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {shape}"


def whole(named: Named, keep: bool) -> Named:
    """Copies on the CPU, sharded tensors put together; every worker calls it."""
    found: Named = {}
    for name, tensor in named.items():
        tensor = tensor.detach()
        full: Tensor = tensor.full_tensor() if is_spread(tensor) else tensor
        if keep:
            found[name] = full.cpu().clone()
    return found


def dense(tensor: Tensor) -> Tensor:
    """A sparse gradient in full."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def local(tensor: Tensor) -> Tensor:
    """This worker's own part, on the CPU."""
    tensor = tensor.detach()
    return (tensor.to_local() if is_spread(tensor) else tensor).cpu()


def hash_of(data: Tensor | bytes) -> int:
    """64 bits that differ where the bytes do."""
    if isinstance(data, Tensor):
        data = data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
