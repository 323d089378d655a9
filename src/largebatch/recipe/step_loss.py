"""How many units has this step over all workers, and what does this worker's share of the loss come to?

Three lines in a loop, the same under DistributedDataParallel, fully_shard, an all-reduce by hand and on one worker:

    step_loss = StepLoss(model)             # once, after the model was wrapped
    share = step_loss.of(units)             # once a step: this worker's units, over all its microbatches
    share.part(loss_sum).backward()         # each microbatch: the SUM of its units' losses

The factor that undoes the mean over workers is found from the model's kind, and `StepLoss.reason` says which and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.errors import ConfigError
from largebatch.groups import num_workers, sum_over_workers
from largebatch.recipe.loss import normalise

Gradients = Literal["mean", "sum"]
"""What becomes of the workers' gradients after backward: averaged or added."""


def total_units(units: int | Tensor, group: dist.ProcessGroup | None = None) -> int:
    """The units of the whole step: one all-reduce of each worker's own count.

    Every worker of the group calls it once a step; one with nothing to do gives 0. On an accelerator's group the count
    waits for the work queued there; a gloo group over the same workers does not.

    Args:
        units: this worker's units in the step, over all its microbatches, >= 0 (padding is not a unit).
        group: the workers among which the step is dealt out; None is all workers of the job.

    Returns:
        The sum over the workers, >= 1 (Goyal's kn).

    Raises:
        ConfigError: on every worker, when a count is no whole number of at least 0 on any of them, or all are 0.

    >>> total_units(96)
    96

    Source: Goyal 2017, remark 3.
    """
    return _sum_units(units, _all_workers() if group is None else (group,))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShare:
    """What one worker needs to know of one step to weigh its losses."""

    total_units: int
    """Units of the step over all workers and microbatches (Goyal's kn)."""
    averaged_over: int
    """Workers over which gradients are averaged after backward; 1 where they are added."""

    def part(self, loss_sum: Tensor) -> Tensor:
        """The scalar to call `backward()` on for a microbatch whose losses add up to `loss_sum`.

        Raises:
            ConfigError: `loss_sum` is not a scalar.

        >>> StepShare(total_units=8, averaged_over=2).part(torch.tensor(6.0))
        tensor(1.5000)

        Source: Goyal 2017, remark 3.
        """
        return normalise(loss_sum, self.total_units, averaged_over=self.averaged_over)

    def nothing(self, output: Tensor) -> Tensor:
        """A loss of zero for a worker without units in this step, so that the others' all-reduce does not wait for it.

        Args:
            output: what the model makes of any one example: its forward and backward must run; its value is not used,
                but its derivative must be finite, so take a real example.

        Returns:
            Zero, whose gradient by every parameter is zero; call `backward()` on it.

        >>> StepShare(total_units=8, averaged_over=2).nothing(torch.tensor([3.0]))
        tensor(0.)
        """
        return output.reshape(-1)[:0].sum()  # not output * 0, which is NaN where the output is not finite


class StepLoss:
    """Divides a loop's losses by the total batch, whatever becomes of the gradients afterwards.

    >>> step_loss = StepLoss(nn.Linear(2, 1))
    >>> step_loss.averaged_over, step_loss.reason
    (1, 'one worker: nothing is averaged')
    >>> step_loss.of(8).part(torch.tensor(6.0))
    tensor(0.7500)

    Source: Goyal 2017, remark 3.
    """

    averaged_over: int
    """The factor that undoes the mean over workers: their number, or 1 where gradients are added."""
    reason: str
    """From what the factor follows, in words."""
    groups: tuple[dist.ProcessGroup, ...]
    """The workers among which a step is dealt out, one group an axis of their mesh."""

    def __init__(
        self,
        model: nn.Module,
        *,
        gradients: Gradients | None = None,
        groups: Sequence[dist.ProcessGroup] | None = None,
    ) -> None:
        """Find out what becomes of the gradients of `model`; nothing is sent.

        Args:
            model: the model as it is trained: in DistributedDataParallel, under fully_shard, or plain on one worker.
            gradients: needed only where the model does not show it: "mean" where the workers' gradients are averaged,
                "sum" where they are added (an all-reduce by hand, a communication hook that adds).
            groups: the data-parallel groups, one an axis of the mesh, where the model does not show them and they are
                not all the workers of the job.

        Raises:
            ConfigError: it cannot be seen whether gradients are averaged, or some of them are not exchanged.
        """
        if gradients is not None and gradients not in get_args(Gradients):
            raise ConfigError(f"gradients={gradients!r} is not known. Use one of: {', '.join(get_args(Gradients))}.")
        if gradients is None:
            kind, found = _look_at(model, groups)
        else:
            kind, found = "the caller", _all_workers() if groups is None else tuple(groups)
        self.groups = found
        world_size = 1
        for group in self.groups:
            world_size *= dist.get_world_size(group)
        self.averaged_over = 1 if gradients == "sum" else world_size
        if world_size == 1:
            self.reason = "one worker: nothing is averaged"
        elif self.averaged_over == 1:
            self.reason = f"{kind} adds gradients over {world_size} workers: no factor"
        else:
            self.reason = f"{kind} averages gradients over {world_size} workers: every loss is multiplied by that"

    def of(self, units: int | Tensor) -> StepShare:
        """Add up the step's units over all workers; every worker calls it once a step, before its backwards.

        Args:
            units: this worker's units in the step, over all its microbatches, >= 0 (padding is not a unit).

        Returns:
            What weighs the losses of this step.

        Raises:
            ConfigError: as `total_units`.
        """
        return StepShare(total_units=_sum_units(units, self.groups), averaged_over=self.averaged_over)


def _all_workers() -> tuple[dist.ProcessGroup, ...]:
    world = dist.group.WORLD if num_workers() > 1 else None
    return () if world is None else (world,)


def _sum_units(units: int | Tensor, groups: Sequence[dist.ProcessGroup]) -> int:
    count = units.item() if isinstance(units, Tensor) and units.numel() == 1 else units
    fine = isinstance(count, int) and not isinstance(count, bool) and count >= 0
    if not groups:
        total, num_bad = (count if fine else 0), int(not fine)
    else:
        # A worker that raised here alone would leave the others waiting: what is wrong travels with the count.
        device = "cpu" if "cpu:" in dist.get_backend_config(groups[0]) else torch.accelerator.current_accelerator()
        counts = torch.tensor([count if fine else 0, int(not fine)], dtype=torch.int64, device=device)
        sum_over_workers(counts, groups)
        total, num_bad = counts.tolist()
    if not fine:
        raise ConfigError(
            f"a worker's units in a step are a whole number of at least 0, over all its microbatches; got {units!r}. "
            "Count them, without padding."
        )
    if num_bad:
        raise ConfigError(f"{num_bad} other worker(s) gave no whole number of units for this step: see their errors.")
    if total == 0:
        raise ConfigError(
            "no worker has a unit in this step, so that it has no mean loss. Leave the step out on every worker."
        )
    return int(total)


def _look_at(model: nn.Module, groups: Sequence[dist.ProcessGroup] | None) -> tuple[str, tuple[dist.ProcessGroup, ...]]:
    """What averages the gradients of `model`, and over which groups."""
    trainable = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    sharded = [module for module in model.modules() if _is_sharded(module)]
    found: list[tuple[Any, ...]]
    if wrappers:
        kind, found = "DistributedDataParallel", [(wrapper.process_group,) for wrapper in wrappers]
        reached = {id(parameter) for wrapper in wrappers for parameter in _exchanged(wrapper)}
    elif sharded:
        kind, found = "fully_shard", _sharding_groups(sharded)
        reached = {id(parameter) for parameter in model.parameters() if hasattr(parameter, "device_mesh")}
    elif num_workers() > 1 and trainable:
        raise ConfigError(
            f"this job has {num_workers()} workers, but {type(model).__name__} is neither in DistributedDataParallel "
            "nor under fully_shard, so whether its gradients are averaged or added cannot be seen. Give the wrapped "
            "model, or gradients='mean' or 'sum'."
        )
    else:
        return "one worker", ()
    alone = [name for key, name in trainable.items() if key not in reached]
    if alone:
        raise ConfigError(
            f"{kind} does not exchange the gradient of {alone[0]!r}, so that no factor is right for the whole model. "
            "Wrap the whole model, or give gradients='mean' or 'sum' if another part of your code exchanges it."
        )
    ranks = {tuple(tuple(dist.get_process_group_ranks(group)) for group in each) for each in found}
    if len(ranks) > 1:
        raise ConfigError(
            f"parts of the model are averaged over different workers by {kind}, so that no factor is right for all. "
            "Make a StepLoss for each part."
        )
    return kind, tuple(groups) if groups is not None else tuple(found[0])


def _exchanged(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = set(wrapper.parameters_to_ignore)
    return [parameter for name, parameter in wrapper.module.named_parameters() if name not in ignored]


def _is_sharded(module: nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _sharding_groups(sharded: Sequence[nn.Module]) -> list[tuple[dist.ProcessGroup, ...]]:
    """For each set of parameters that fully_shard keeps together, the groups over which it averages them."""
    found: list[tuple[dist.ProcessGroup, ...]] = []
    try:
        for module in sharded:
            state: Any = module._get_fsdp_state()  # pyright: ignore
            several = getattr(state, "_fsdp_param_groups", None)
            for parameters in [state._fsdp_param_group] if several is None else several:
                if parameters is None:
                    continue
                if parameters.gradient_divide_factor is not None:
                    raise ConfigError(
                        f"fully_shard divides gradients by {parameters.gradient_divide_factor:g} here, as "
                        "set_gradient_divide_factor asked, and not by the number of workers. Leave that out, or set "
                        "it to 1 and give gradients='sum'."
                    )
                axes = ("replicate_process_group", "shard_process_group")
                mesh = parameters.mesh_info
                found.append(tuple(getattr(mesh, axis) for axis in axes if hasattr(mesh, axis)))
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"torch {torch.__version__} keeps fully_shard's parameters in a way that is not understood ({error}); "
            "torch 2.10 to 2.14 are. Give gradients='mean', and groups if they are not all the workers of the job."
        ) from error
    return found
