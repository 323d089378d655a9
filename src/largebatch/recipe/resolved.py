"""What is every number of a run at one batch?"""

from __future__ import annotations

from dataclasses import dataclass

from largebatch.recipe.schedule import Schedule, epochs_to_steps
from largebatch.records.schema import ResolvedNumber


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRecipe:
    """Every number of one run, each with its reason."""

    batch: int
    """Units in one optimizer step."""
    units_per_epoch: int
    """Units in one pass over the data."""
    world_size: int
    """Workers that share the batch evenly."""
    accumulation: int
    """Microbatches per worker per step."""
    rule: str
    """Name of the rule that gave `lr`."""
    lr: float
    """Peak learning rate: the rate once the warmup is over."""
    num_steps: int
    """Optimizer steps in the run: the whole number nearest to epochs * units_per_epoch / batch."""
    warmup_steps: int
    """Optimizer steps of warmup; 0 is none."""
    schedule: Schedule
    """The learning rate of every step."""
    optimizer: str
    """One of sgd, velocity_sgd, lars, lamb, adam, adamw."""
    momentum: float
    """Momentum of SGD and LARS, in [0, 1)."""
    nesterov: bool
    """Whether the momentum of SGD and LARS is Nesterov's."""
    betas: tuple[float, float]
    """Decays a step of the two moments of Adam and LAMB."""
    eps: float
    """Epsilon of Adam and LAMB."""
    weight_decay: float
    """Weight decay lambda, none of it on norm layers."""
    exclude_biases: bool
    """Whether the biases of other layers are left without weight decay too; LARS and LAMB do so in any case."""
    batchnorm_n: int | None
    """Examples over which batch norm takes its statistics; None says nothing of it."""
    warnings: tuple[str, ...]
    """What is doubtful about these numbers, one sentence each."""
    numbers: tuple[ResolvedNumber, ...]
    """Each number with its rule and source, for the record and the report."""

    @property
    def local_batch(self) -> int:
        """Units of one worker's share of the batch."""
        return self.batch // self.world_size

    @property
    def microbatch(self) -> int:
        """Units in one forward and backward pass."""
        return self.local_batch // self.accumulation

    def steps_at(self, epochs: float) -> int:
        """Optimizer steps taken when `epochs` passes are over, rounded as every length of the recipe is."""
        return epochs_to_steps(epochs, batch=self.batch, units_per_epoch=self.units_per_epoch)
