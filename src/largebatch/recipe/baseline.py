"""What was the baseline trained with?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from largebatch.errors import ConfigError
from largebatch.recipe.adam_rules import check_adam, check_adam_rule
from largebatch.recipe.scaling import check_count, check_rule_for, is_number

WarmupName = Literal["gradual", "constant", "none"]
ScheduleName = Literal["step", "cosine", "linear", "wsd"]
OptimizerName = Literal["sgd", "velocity_sgd", "lars", "lamb", "adam", "adamw"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The fields of a `Recipe`, checked: what a model is trained with at the batch it was tuned at."""

    reference_batch: int
    """Units in one optimizer step of the baseline, >= 1."""
    reference_lr: float
    """Learning rate tuned at `reference_batch`, > 0."""
    epochs: int = 10
    """Passes over the data, the same for every batch, >= 1."""
    warmup: WarmupName = "gradual"
    """How the rate gets from `reference_lr` to its peak: "gradual", "constant" (one jump) or "none"."""
    warmup_epochs: float = 5.0
    """Epochs of warmup, used only where the batch is above `reference_batch`; 0 is none; below `epochs`."""
    schedule: ScheduleName = "step"
    """Shape after the warmup: "step" (counted from epoch 0), "cosine", "linear" or "wsd" (warmup-stable-decay)."""
    decay_epochs: tuple[float, ...] = ()
    """Epochs, counted from 0 and increasing, after which "step" multiplies the rate by `decay_factor`."""
    decay_factor: float = 0.1
    """What each decay of "step" multiplies the rate by, in (0, 1]."""
    decay_fraction: float = 0.1
    """Last part of the run over which "wsd" decays, in (0, 1]."""
    end_factor: float = 0.0
    """Rate at the end of "cosine", "linear" and "wsd", as a part of the peak, in [0, 1]."""
    optimizer: OptimizerName = "sgd"
    """"sgd" (Goyal 2017, eq. 9), "velocity_sgd" (eq. 10, with momentum correction), "lars", "lamb", "adam", "adamw"."""
    momentum: float = 0.9
    """Momentum of SGD and LARS, in [0, 1), the same for every batch."""
    nesterov: bool = True
    """Whether the momentum of SGD and LARS is Nesterov's (You 2017 has plain momentum in LARS)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decays a step of the two moments of Adam and LAMB at `reference_batch`, each in [0, 1)."""
    eps: float = 1e-8
    """Epsilon of Adam and LAMB at `reference_batch`, > 0."""
    adam_rule: str = "malladi"
    """The rule that scales Adam's betas and epsilon: "malladi", "marek" or "none". LAMB's stay."""
    weight_decay: float = 1e-4
    """Weight decay lambda, >= 0, the same for every batch; none of it on norm layers."""
    exclude_biases: bool = False
    """Whether the biases of other layers are left without weight decay too; LARS and LAMB do so in any case."""
    scaling: str = "linear"
    """The rule that scales the learning rate: "linear", "sqrt", "none", "noise" or "surge"."""
    shown_up_to: int | None = None
    """The largest batch for which this was shown to keep the accuracy; None is not known."""
    batchnorm_n: int | None = None
    """Examples over which batch norm takes its statistics, whatever the batch (Goyal's n); None says nothing of it."""

    def __post_init__(self) -> None:
        check_count("reference_batch", self.reference_batch)
        check_count("epochs", self.epochs)
        for name, kind in (("warmup", WarmupName), ("schedule", ScheduleName), ("optimizer", OptimizerName)):
            _check_known(name, getattr(self, name), get_args(kind))
        check_rule_for(self.scaling, self.optimizer)
        self._check_numbers()
        if not (self.reference_lr > 0 and math.isfinite(self.reference_lr)):
            raise ConfigError(f"reference_lr is a finite learning rate above 0; got {self.reference_lr!r}.")
        self._check_lengths()
        self._check_optimizer()
        if self.shown_up_to is not None:
            check_count("shown_up_to", self.shown_up_to)
        if self.batchnorm_n is not None:
            check_count("batchnorm_n", self.batchnorm_n)
            if self.batchnorm_n > self.reference_batch:
                raise ConfigError(
                    f"batch norm over batchnorm_n={self.batchnorm_n} examples does not fit into the reference batch "
                    f"of {self.reference_batch}. Use the n that the baseline was tuned with."
                )

    def _check_numbers(self) -> None:
        for name in (
            "reference_lr", "warmup_epochs", "decay_factor", "decay_fraction", "end_factor", "momentum", "weight_decay",
        ):  # fmt: skip
            if not is_number(value := getattr(self, name)):
                raise ConfigError(f"{name} is a number; got {value!r}.")
        if not isinstance(self.decay_epochs, tuple | list) or not all(map(is_number, self.decay_epochs)):
            raise ConfigError(f"decay_epochs are numbers in a tuple, as (30, 60, 80); got {self.decay_epochs!r}.")

    def _check_lengths(self) -> None:
        if not self.warmup_epochs >= 0:
            raise ConfigError(f"warmup_epochs is at least 0; got {self.warmup_epochs!r}.")
        warmup_epochs = 0.0 if self.warmup == "none" else self.warmup_epochs
        if warmup_epochs >= self.epochs:
            raise ConfigError(
                f"a warmup of {warmup_epochs:g} epochs does not end within the run of {self.epochs} epochs: "
                f"the target learning rate would never be used. Use warmup_epochs below {self.epochs}, or more epochs."
            )
        if any(later <= earlier for earlier, later in zip(self.decay_epochs, self.decay_epochs[1:], strict=False)):
            raise ConfigError(f"decay_epochs must increase; got {self.decay_epochs}.")
        if self.decay_epochs and self.schedule != "step":
            raise ConfigError(
                f"decay_epochs belong to schedule='step'; got {self.decay_epochs} with {self.schedule!r}. Leave them "
                f"out."
            )
        if self.decay_epochs and not warmup_epochs <= self.decay_epochs[0]:
            raise ConfigError(
                f"the first decay, after epoch {self.decay_epochs[0]:g}, lies inside the warmup of "
                f"{warmup_epochs:g} epochs. Decay later or shorten warmup_epochs."
            )
        if self.decay_epochs and not self.decay_epochs[-1] < self.epochs:
            raise ConfigError(
                f"the last decay, after epoch {self.decay_epochs[-1]:g}, is not within the run of {self.epochs} "
                f"epochs. Leave it out of decay_epochs, or use more epochs."
            )
        if not 0 < self.decay_factor <= 1:
            raise ConfigError(f"decay_factor is in (0, 1]; got {self.decay_factor!r}.")
        if not 0 < self.decay_fraction <= 1:
            raise ConfigError(f"decay_fraction is in (0, 1]; got {self.decay_fraction!r}.")
        if self.schedule == "wsd" and warmup_epochs + self.decay_fraction * self.epochs > self.epochs:
            raise ConfigError(
                f"the decay, over the last {self.decay_fraction:g} of {self.epochs} epochs, begins inside the warmup "
                f"of {warmup_epochs:g} epochs. Lower decay_fraction or shorten warmup_epochs."
            )
        if not 0 <= self.end_factor <= 1:
            raise ConfigError(f"end_factor is in [0, 1]; got {self.end_factor!r}.")
        if self.end_factor and self.schedule == "step":
            raise ConfigError(
                f"schedule='step' ends where its decays lead; got end_factor={self.end_factor:g}. Leave it out, or "
                f"use another schedule."
            )

    def _check_optimizer(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is in [0, 1); got {self.momentum!r}.")
        if self.optimizer in ("sgd", "velocity_sgd", "lars") and self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov=True needs a momentum above 0; got momentum=0. Set nesterov=False.")
        check_adam(self.betas, self.eps)
        check_adam_rule(self.adam_rule)
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ConfigError(f"weight_decay is a finite number of at least 0; got {self.weight_decay!r}.")


def _check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} {value!r} is not known. Use one of: {', '.join(known)}.")
