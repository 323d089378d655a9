"""What is trained? One small object: data, model, loss, goals, unit.

A user's own task is a Python file that defines `task = Task(...)`, or `def task(data): return Task(...)`
when it reads files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.recipe.recipe import Recipe
from largebatch.units import check_unit


class Split(Protocol):
    """Examples that can be fetched by index."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor) -> Any:
        """Return one batch: whatever the task's `loss`, `errors` and `count` take."""
        ...


@runtime_checkable
class AugmentedSplit(Split, Protocol):
    """Examples whose augmentation is part of fetching them, as a random crop is of decoding a picture."""

    def fetch_augmented(self, indices: Tensor, draws: Tensor) -> Any:
        """Return one training batch; `draws`, shape (len(indices), 8), uniform in [0, 1), fixes all that is random."""
        ...


@dataclass(frozen=True)
class TensorSplit:
    """Examples held whole in memory: tensors that share their first dim (num_examples)."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        kinds = [type(tensor).__name__ for tensor in self.tensors if not isinstance(tensor, Tensor)]
        if kinds or not self.tensors:
            raise ConfigError(f"a TensorSplit holds a tuple of torch tensors; got {', '.join(kinds) or 'nothing'}.")
        lengths = [len(tensor) for tensor in self.tensors]
        if min(lengths) != max(lengths) or not lengths[0]:
            raise ConfigError(f"a TensorSplit's tensors have one length, at least 1; got {lengths}.")

    def __len__(self) -> int:
        return len(self.tensors[0])

    def fetch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return the rows at `indices`, shape (len(indices), ...), of every tensor."""
        # Three to four times faster than tensor[indices] on small pictures.
        return tuple(tensor.index_select(0, indices) for tensor in self.tensors)


def count_rows(batch: Any) -> int:
    """Units in a batch that is a tuple of tensors, one unit a row."""
    return len(batch[0])


@dataclass(frozen=True, kw_only=True)
class Task:
    """A thing to train, with everything a study needs to know about it.

    `loss` and `errors` return SUMS over the batch's units, never means: uneven microbatches and token
    counts then add up exactly (Goyal 2017, remark 3).
    """

    name: str
    """What it is called on the command line and in records."""
    train: Split
    """Training examples."""
    held_out: Split
    """Examples never trained on; their error is reported."""
    model: Callable[[], nn.Module]
    """Makes fresh weights; called under the run's seed."""
    loss: Callable[[nn.Module, Any], Tensor]
    """(model, batch) -> sum of the losses of the batch's units, a scalar that can be differentiated."""
    errors: Callable[[nn.Module, Any], Tensor]
    """(model, batch) -> sum of the errors of the batch's units: for classes, how many are wrong. Reports show their
    mean in percent, so an error is a share of 1 for each unit."""
    recipe: Recipe
    """What the baseline is trained with: reference batch and lr, epochs, warmup, decay, momentum."""
    goals: Sequence[float] | None = None
    """Losses on the goal examples to be reached, hardest last, at least 3; None: taken from a baseline run."""
    unit: str = "examples"
    """What a batch counts."""
    count: Callable[[Any], int] = count_rows
    """Units in a batch. At this version a row is a unit: a batch must count as many units as it has rows."""
    augment: Callable[[Any, Tensor], Any] | None = None
    """(batch, draws) -> batch, with draws of shape (num_examples, 8), uniform in [0, 1), fixed by
    (seed, epoch, index): the same for any world size."""
    num_goal_examples: int = 1024
    """Size of the fixed training subset on which goals are measured."""
    max_microbatch: int = 4096
    """Largest number of examples in one forward/backward."""
    microbatch: int | None = None
    """Examples in one forward/backward where that is part of the loss, as batch norm's n is; None: any number."""
    measures: Callable[[nn.Module, Any], dict[str, float]] | None = None
    """(model, held-out split) -> shares of 1 that are no mean over units (average precision), of a finished run."""
    loaders: int = 0
    """Processes that fetch ahead, for each worker; 0 fetches in the loop, which is right for data in memory."""

    def __post_init__(self) -> None:
        check_unit(self.unit)
        if self.goals is not None:
            object.__setattr__(self, "goals", _checked_goals(self.name, self.goals))
        for field in ("num_goal_examples", "max_microbatch", "microbatch"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise ConfigError(f"{field} of task {self.name!r} is at least 1; got {value}.")
        if (self.microbatch or 1) > self.max_microbatch:
            raise ConfigError(
                f"task {self.name!r} wants {self.microbatch} examples in a forward and allows {self.max_microbatch}. "
                "Raise max_microbatch."
            )
        if self.loaders < 0:
            raise ConfigError(f"loaders of task {self.name!r} is at least 0; got {self.loaders}.")
        if not len(self.held_out):
            raise ConfigError(f"task {self.name!r} has no held-out examples: their error is what a study compares.")
        if len(self.train) < 2 * self.recipe.reference_batch:
            raise ConfigError(
                f"task {self.name!r} has {len(self.train)} training examples, too few for a reference batch of "
                f"{self.recipe.reference_batch}: at least two batches are needed."
            )


def _checked_goals(name: str, goals: Sequence[float]) -> tuple[float, ...]:
    try:
        losses = tuple(float(goal) for goal in goals)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"goals of task {name!r} are losses, numbers; got {goals!r}.") from error
    falling = all(later < earlier for earlier, later in itertools.pairwise(losses))
    if len(losses) < 3 or not falling or not all(map(math.isfinite, losses)):
        raise ConfigError(
            f"task {name!r} needs at least 3 different goals, finite, the hardest (smallest loss) last; got {goals!r}."
        )
    return losses


def cross_entropy_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Sum over the batch of the cross-entropy (nats) of class logits, shape (num_examples, num_classes)."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="sum")


def count_wrong(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """How many of the batch's examples are classified wrongly."""
    inputs, labels = batch
    return (model(inputs).argmax(dim=-1) != labels).sum().to(torch.float32)
