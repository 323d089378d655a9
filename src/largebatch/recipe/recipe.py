"""What must change when the batch does, and by which rule?

A `Recipe` says what the baseline was tuned at; `resolve(batch, units_per_epoch)` gives every number of a run at
another batch, each with the rule and the source it comes from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from largebatch.errors import ConfigError
from largebatch.recipe.scaling import SOURCES, check_rule, scaled_lr
from largebatch.recipe.schedule import WarmupStepDecay, epochs_to_steps
from largebatch.records.schema import ResolvedNumber


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRecipe:
    """Every number of one run, each with its reason."""

    batch: int
    """Units in one optimizer step."""
    units_per_epoch: int
    """Units in one pass over the data."""
    lr: float
    """Peak learning rate: the rate once the warmup is over."""
    num_steps: int
    """Optimizer steps in the run: the whole number nearest to epochs * units_per_epoch / batch."""
    warmup_steps: int
    """Optimizer steps of gradual warmup; 0 is none."""
    schedule: WarmupStepDecay
    """The learning rate of every step."""
    momentum: float
    """Momentum of SGD, in [0, 1)."""
    nesterov: bool
    """Whether the momentum is Nesterov's."""
    weight_decay: float
    """Weight decay lambda, none of it on norm layers."""
    numbers: tuple[ResolvedNumber, ...]
    """Each number with its rule and source, for the record and the report."""

    def steps_at(self, epochs: float) -> int:
        """Optimizer steps taken when `epochs` passes are over, rounded as every length of the recipe is."""
        return epochs_to_steps(epochs, batch=self.batch, units_per_epoch=self.units_per_epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a model is trained with at the batch it was tuned at.

    >>> recipe = Recipe(reference_batch=64, reference_lr=0.02)
    >>> resolved = recipe.resolve(512, 60_000)
    >>> resolved.lr, resolved.num_steps, resolved.warmup_steps
    (0.16, 1172, 586)

    Source: Goyal 2017, sec. 2.1, 2.2, 5.1.
    """

    reference_batch: int
    """Units in one optimizer step of the baseline, >= 1."""
    reference_lr: float
    """Learning rate tuned at `reference_batch`, > 0."""
    epochs: int = 10
    """Passes over the data, the same for every batch, >= 1."""
    warmup_epochs: float = 5.0
    """Epochs of gradual warmup, used only where the batch is above `reference_batch`; 0 is none; below `epochs`."""
    decay_epochs: tuple[float, ...] = ()
    """Epochs, counted from 0 and increasing, after which the rate is multiplied by `decay_factor`."""
    decay_factor: float = 0.1
    """What each decay multiplies the rate by, in (0, 1]."""
    momentum: float = 0.9
    """Momentum of SGD, in [0, 1), the same for every batch."""
    nesterov: bool = True
    """Whether the momentum is Nesterov's."""
    weight_decay: float = 1e-4
    """Weight decay lambda, >= 0, the same for every batch; none of it on norm layers."""
    scaling: str = "linear"
    """The rule that scales the learning rate: "linear", "sqrt" or "none"."""

    def __post_init__(self) -> None:
        _check_count("reference_batch", self.reference_batch)
        _check_count("epochs", self.epochs)
        check_rule(self.scaling)
        if not (self.reference_lr > 0 and math.isfinite(self.reference_lr)):
            raise ConfigError(f"reference_lr is a finite learning rate above 0; got {self.reference_lr!r}.")
        if not self.warmup_epochs >= 0:
            raise ConfigError(f"warmup_epochs is at least 0; got {self.warmup_epochs!r}.")
        if self.warmup_epochs >= self.epochs:
            raise ConfigError(
                f"a warmup of {self.warmup_epochs:g} epochs does not end within the run of {self.epochs} epochs: "
                f"the target learning rate would never be used. Use warmup_epochs below {self.epochs}, or more epochs."
            )
        if any(later <= earlier for earlier, later in zip(self.decay_epochs, self.decay_epochs[1:], strict=False)):
            raise ConfigError(f"decay_epochs must increase; got {self.decay_epochs}.")
        if self.decay_epochs and not self.warmup_epochs <= self.decay_epochs[0]:
            raise ConfigError(
                f"the first decay, after epoch {self.decay_epochs[0]:g}, lies inside the warmup of "
                f"{self.warmup_epochs:g} epochs. Decay later or shorten warmup_epochs."
            )
        if self.decay_epochs and not self.decay_epochs[-1] < self.epochs:
            raise ConfigError(
                f"the last decay, after epoch {self.decay_epochs[-1]:g}, is not within the run of {self.epochs} "
                f"epochs. Leave it out of decay_epochs, or use more epochs."
            )
        if not 0 < self.decay_factor <= 1:
            raise ConfigError(f"decay_factor is in (0, 1]; got {self.decay_factor!r}.")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is in [0, 1); got {self.momentum!r}.")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov=True needs a momentum above 0; got momentum=0. Set nesterov=False.")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ConfigError(f"weight_decay is a finite number of at least 0; got {self.weight_decay!r}.")

    def resolve(
        self, batch: int, units_per_epoch: int, lr: float | None = None, rule: str | None = None
    ) -> ResolvedRecipe:
        """Every number of a run at `batch`, each with its rule and source.

        The learning rate scales with the batch; epochs, momentum, weight decay and decay epochs stay. The warmup
        climbs from `reference_lr` and is left out where there is nothing to climb: at a batch up to
        `reference_batch`, or at a learning rate up to `reference_lr`.

        Args:
            batch: units in one optimizer step, 1 to `units_per_epoch`.
            units_per_epoch: units in one pass over the data.
            lr: peak learning rate chosen elsewhere, > 0; None scales `reference_lr`.
            rule: without `lr`, the scaling rule in place of `scaling`; with it, the name of what chose `lr`.

        Returns:
            The resolved recipe.

        Raises:
            ConfigError: the batch is larger than the data, the rule is not known, or a number is out of range.

        Source: Goyal 2017, sec. 2.1 (all other hyper-parameters unchanged), 2.2, 5.1.
        """
        _check_count("batch", batch)
        _check_count("units_per_epoch", units_per_epoch)
        if batch > units_per_epoch:
            raise ConfigError(
                f"a batch of {batch} is larger than the data, which has {units_per_epoch}. "
                f"Use a batch of at most {units_per_epoch}."
            )
        if lr is None:
            rule = check_rule(rule or self.scaling)
            lr = scaled_lr(rule, self.reference_lr, self.reference_batch, batch)
            lr_rule = f"{rule}: {self.reference_lr:g} at {self.reference_batch}, times {batch / self.reference_batch:g}"
            lr_source = SOURCES[rule]
        else:
            lr_rule, lr_source = rule or "given", "the caller"
        warm = batch > self.reference_batch and lr > self.reference_lr
        warmup_steps = epochs_to_steps(self.warmup_epochs, batch=batch, units_per_epoch=units_per_epoch) if warm else 0
        schedule = WarmupStepDecay(
            start_lr=self.reference_lr if warmup_steps else lr,
            peak_lr=lr,
            warmup_steps=warmup_steps,
            decay_steps=tuple(
                epochs_to_steps(epoch, batch=batch, units_per_epoch=units_per_epoch) for epoch in self.decay_epochs
            ),
            decay_factor=self.decay_factor,
        )
        num_steps = epochs_to_steps(self.epochs, batch=batch, units_per_epoch=units_per_epoch)
        return ResolvedRecipe(
            batch=batch,
            units_per_epoch=units_per_epoch,
            lr=lr,
            num_steps=num_steps,
            warmup_steps=warmup_steps,
            schedule=schedule,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            numbers=self._explain(batch, units_per_epoch, num_steps, schedule, lr_rule, lr_source),
        )

    def _explain(
        self,
        batch: int,
        units_per_epoch: int,
        num_steps: int,
        schedule: WarmupStepDecay,
        lr_rule: str,
        lr_source: str,
    ) -> tuple[ResolvedNumber, ...]:
        epoch = f"{units_per_epoch / batch:.2f} steps an epoch"
        if schedule.warmup_steps:
            increment = (schedule.peak_lr - schedule.start_lr) / schedule.warmup_steps
            warmup = (
                f"gradual over {self.warmup_epochs:g} epochs, from {schedule.start_lr:g}, adding {increment:.4g} a step"
            )
        elif self.warmup_epochs == 0:
            warmup = "none asked for"
        elif batch <= self.reference_batch:
            warmup = f"none at a batch up to the reference of {self.reference_batch}"
        else:
            warmup = f"none, since the rate does not rise above the reference of {self.reference_lr:g}"
        rows: list[tuple[str, float | int | str, str, str]] = [
            ("batch", batch, f"{batch / self.reference_batch:g} times the reference batch", "the caller"),
            ("lr", schedule.peak_lr, lr_rule, lr_source),
            ("warmup_steps", schedule.warmup_steps, warmup, "Goyal 2017, sec. 2.2"),
            ("num_steps", num_steps, f"{self.epochs} epochs at any batch, {epoch}", "Goyal 2017, sec. 2.1, 5.1"),
        ]
        for number, (after, step) in enumerate(zip(self.decay_epochs, schedule.decay_steps, strict=True), start=1):
            rule = f"lr times {self.decay_factor:g} after epoch {after:g}, counted from 0 with the warmup in it"
            rows.append((f"decay_step_{number}", step, rule, "Goyal 2017, sec. 2.2, 5.1"))
        form = "Nesterov" if self.nesterov else "plain"
        rows += [
            (
                "momentum",
                self.momentum,
                f"{form}, unchanged; lr stays outside the velocity",
                "Goyal 2017, eq. (9)",
            ),
            ("weight_decay", self.weight_decay, "unchanged; none on norm layers", "Goyal 2017, remark 1, sec. 5.1"),
            ("loss_divisor", batch, "every loss sum is divided by the whole batch", "Goyal 2017, remark 3"),
        ]
        return tuple(ResolvedNumber(name=name, value=value, rule=rule, source=src) for name, value, rule, src in rows)


def goyal2017_resnet50() -> Recipe:
    """The recipe that trained ResNet-50 on ImageNet in one hour.

    Returns:
        Reference batch 256 at 0.1, 90 epochs, 5 of warmup, a tenth after epochs 30, 60 and 80.

    >>> resolved = goyal2017_resnet50().resolve(8192, 1_281_167)
    >>> resolved.lr, resolved.warmup_steps, resolved.num_steps
    (3.2, 782, 14075)

    Source: Goyal 2017, sec. 5.1.
    """
    return Recipe(reference_batch=256, reference_lr=0.1, epochs=90, decay_epochs=(30.0, 60.0, 80.0))


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is a whole number of at least 1; got {value!r}.")
