"""What is known of a set-up before anything is looked for?

Everything that several looks need, worked out once from what was given. None is "not known": a look that would need
it finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.audit.look_order import Order
from largebatch.audit.look_rates import Rates
from largebatch.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A training as far as it is known at rest."""

    model: nn.Module
    """The model, without the wrapper of DistributedDataParallel or DataParallel."""
    split_by_torch: bool
    """Whether DataParallel splits each batch over devices."""
    optimizer: Optimizer
    """The optimizer, without the wrappers of accelerate and Lightning."""
    rates: Rates | None
    """The learning rates; None where the scheduler cannot be evaluated."""
    scheduled: bool
    """Whether a scheduler was given."""
    order: Order | None
    """The order of the data; None without a loader."""
    resharded: bool
    """Whether a framework is going to put its own sampler into the loader (Lightning), or deals to as many workers as
    it is run on (accelerate)."""
    recipe: Recipe | None
    """The recipe that the training is to follow."""
    reference_batch: int | None
    """Units in a step of the baseline."""
    reference_lr: float | None
    """Rate tuned at it."""
    batch: float | None
    """Units in an optimizer step."""
    local_batch: float | None
    """Examples that one worker puts through the model at once."""
    accumulation: int
    """Microbatches of a worker in a step."""
    world_size: int
    """Workers."""
    rank: int | None
    """This worker."""
    batchnorm_n: int | None
    """Examples that the baseline's batch norm was taken over."""
    b_crit: float | None
    """Measured critical batch size."""

    @property
    def factor(self) -> float | None:
        """How many times the baseline's batch a step takes: Goyal's k."""
        return self.batch / self.reference_batch if self.batch and self.reference_batch else None


def trained_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Every parameter that the optimizer updates, with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield group, parameter


def some(names: list[str], total: int | None = None) -> str:
    """The first names of a list and how many there are.

    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    rest = (len(names) if total is None else total) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
