"""Is batch norm taken over the baseline's n, and do residual blocks start as the identity?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy

from largebatch.audit.findings import Finding
from largebatch.audit.look_setup import Setup, some
from largebatch.groups import is_spread
from largebatch.recipe.batchnorm import GhostBatchNorm, GroupBatchNorm
from largebatch.recipe.decay import is_norm
from largebatch.recipe.initial import last_norms

_ZEROED = (BatchNorm, nn.GroupNorm)  # the norms of residual nets; layer norms have ways of their own


def look(setup: Setup) -> Iterator[Finding]:
    """Find LB103, LB201 and LB202."""
    yield from _zero_gamma(setup.model)
    yield from _batch_norm(setup)


def _zero_gamma(model: nn.Module) -> Iterator[Finding]:
    if not any(isinstance(module, _ZEROED) for module in model.modules()):
        return
    if not all(_is_1(getattr(module, "weight", None)) for module in model.modules() if is_norm(module)):
        return  # trained, loaded, not yet drawn, or already as it should be
    last = [last.name for last in last_norms(model) if isinstance(last.norm, _ZEROED)]
    if last:
        yield Finding(
            code="LB103",
            seen=f"gamma is 1 in the norm that ends the branch of all {len(last)} residual blocks: {some(last)}.",
        )


def _is_1(gamma: torch.Tensor | None) -> bool:
    """Whether there is no gamma, or one that is 1 throughout; of a sharded one, this worker's part."""
    if gamma is None:
        return True
    if gamma.is_meta or is_lazy(gamma):
        return False
    own = gamma.to_local() if is_spread(gamma) else gamma  # the whole of it would be a collective
    return bool(torch.all(own == 1))


def _batch_norm(setup: Setup) -> Iterator[Finding]:
    layers = [
        (name, module)
        for name, module in setup.model.named_modules()
        if isinstance(module, BatchNorm) and (module.training or not setup.model.training)  # the others are frozen
    ]
    over_all, differing = list[str](), dict[str, float]()
    for name, module in layers:
        workers = _workers(module, setup)
        n = _examples(module, setup, workers)
        if n is not None and n == setup.batchnorm_n:
            continue
        if workers is not None and workers == setup.world_size > 1:
            over_all.append(name)
        elif n is not None and setup.batchnorm_n is not None:
            differing[name] = n
    if over_all:
        n = f"{setup.local_batch * setup.world_size:g} examples" if setup.local_batch else "examples"
        yield Finding(
            code="LB202",
            seen=f"{len(over_all)} batch norm layers take their statistics from the {n} of all {setup.world_size} "
            f"workers: {some(over_all)}.",
        )
    if differing:
        sizes = sorted({f"{n:g}" for n in differing.values()})
        yield Finding(
            code="LB201",
            seen=f"{len(differing)} batch norm layers take their statistics from {' or '.join(sizes)} examples, and "
            f"the baseline's from {setup.batchnorm_n}: {some(list(differing))}.",
        )


def _workers(module: nn.Module, setup: Setup) -> int | None:
    """The workers over which a layer takes its statistics; None where that is not known."""
    if not isinstance(module, nn.SyncBatchNorm | GroupBatchNorm):
        return 1
    group = module.process_group if isinstance(module, nn.SyncBatchNorm) else module.group
    if group is None:
        return setup.world_size if isinstance(module, nn.SyncBatchNorm) else None
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else None


def _examples(module: nn.Module, setup: Setup, workers: int | None) -> float | None:
    """The examples over which a layer takes its statistics; None where that is not known."""
    if setup.local_batch is None or workers is None or setup.split_by_torch:
        return None
    if isinstance(module, GhostBatchNorm):
        return min(module.n, setup.local_batch)
    return setup.local_batch * workers
