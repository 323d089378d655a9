"""How does a model come to lie on its workers, and in which form does it compute?"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.recipe.step_loss import StepLoss
from largebatch.train.workers import Workers

Parallel = Literal["ddp", "fsdp"]
Precision = Literal["float32", "bf16"]

_MIN_SHARDED = 100_000
"""Parameters below which a block is not gathered by itself: its messages would cost more than its memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """In which form a model computes; none of it changes what is computed but by rounding."""

    parallel: Parallel = "ddp"
    """Over several workers: "ddp" keeps the whole model on each, "fsdp" a share of it."""
    precision: Precision = "float32"
    """Of the forward and the backward; weights and their updates are float32 in both."""
    channels_last: bool = False
    """Whether pictures and filters lie in memory by pixel, which convolutions on GPUs like."""
    compile: bool = False
    """Whether torch.compile translates the model."""

    def __post_init__(self) -> None:
        for field, names in (("parallel", Parallel), ("precision", Precision)):
            if getattr(self, field) not in get_args(names):
                raise ConfigError(
                    f"{field}={getattr(self, field)!r} is not known. Use one of: {', '.join(get_args(names))}."
                )


class Spread:
    """A model on its workers: what is called in training, what is saved, what its losses are multiplied by."""

    core: nn.Module
    """The model under its own names: evaluated, saved, given to the optimizer."""
    model: nn.Module
    """The model as it is called in training: `core`, or DDP around it."""
    averaged_over: int
    """Workers over which gradients are averaged after backward."""

    def __init__(self, core: nn.Module, workers: Workers, execution: Execution) -> None:
        """Put `core` on its device and workers; every worker calls it with the same weights.

        Raises:
            ConfigError: it is to be sharded, and there is no job to shard it over.
        """
        self._workers, self._execution = workers, execution
        core = core.to(workers.device)
        if execution.channels_last:
            core = core.to(memory_format=torch.channels_last)  # pyright: ignore
        if execution.parallel == "fsdp":
            _shard(core, workers)
        if execution.compile:
            core.compile()
        self.core = self.model = core
        if execution.parallel == "ddp" and workers.group is not None:
            from torch.nn.parallel import DistributedDataParallel

            # Running statistics stay each worker's own in training; those of worker 0 are the model's (`settle`).
            names = inspect.signature(DistributedDataParallel).parameters
            kept = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"  # since 2.14
            options: dict[str, Any] = {kept: False, "gradient_as_bucket_view": True}
            if workers.device.type == "cuda":
                options["device_ids"] = [workers.device]
            self.model = DistributedDataParallel(core, **options)
        self.averaged_over = 1 if workers.group is None else StepLoss(self.model).averaged_over

    @property
    def is_sharded(self) -> bool:
        """Whether each forward gathers the model's parts, so that all workers must make as many."""
        return self._execution.parallel == "fsdp"

    @contextlib.contextmanager
    def computing(self, *, is_last: bool = True) -> Generator[None]:
        """Around a forward and its backward; gradients are exchanged in the step's last one only."""
        with contextlib.ExitStack() as stack:
            if not is_last and self.model is not self.core:
                stack.enter_context(self.model.no_sync())  # pyright: ignore
            stack.enter_context(self.autocast())
            yield

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """In which precision a forward computes."""
        if self._execution.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self._workers.device.type, torch.bfloat16)

    def arrange(self, batch: Any) -> Any:
        """A batch in the memory format of the model; on the CPU and by default as it is."""
        if not self._execution.channels_last:
            return batch
        if isinstance(batch, Tensor):
            return batch.contiguous(memory_format=torch.channels_last) if batch.ndim == 4 else batch
        if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
            return tuple(self.arrange(item) for item in batch)
        return batch

    def settle(self) -> None:
        """Make running statistics worker 0's on all workers, as a checkpoint has them; every worker calls it."""
        if self._workers.group is None:
            return
        for buffer in self.core.buffers():
            dist.broadcast(buffer, src=0)


def _shard(core: nn.Module, workers: Workers) -> None:
    """Shard every block of a repeated kind by itself, and what is left over as one."""
    if workers.group is None:
        raise ConfigError(
            "parallel='fsdp' shares a model out among workers, and this process was not started as one. Start it by "
            "torchrun (`torchrun --nproc-per-node=2 -m largebatch train ...`), or leave --parallel out."
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(workers.device.type, (workers.world_size,))
    for block in _blocks(core):
        fully_shard(block, mesh=mesh)
    fully_shard(core, mesh=mesh)


def _blocks(core: nn.Module) -> list[nn.Module]:
    """Members of lists and sequences that have parts of their own and are worth a message, the innermost."""
    found: list[nn.Module] = []

    def visit(module: nn.Module, listed: bool) -> bool:
        inside = [visit(child, isinstance(module, nn.Sequential | nn.ModuleList)) for child in module.children()]
        if any(inside):
            return True
        size = sum(parameter.numel() for parameter in module.parameters())
        if listed and inside and size >= _MIN_SHARDED and not isinstance(module, nn.Sequential | nn.ModuleList):
            found.append(module)
            return True
        return False

    visit(core, False)
    return [module for module in found if module is not core]
