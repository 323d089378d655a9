"""What must change when the batch does, and by which rule?

A `Recipe` says what the baseline was tuned at; `resolve(batch, units_per_epoch)` gives every number of a run at
another batch, each with the rule and the source it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from largebatch.recipe.baseline import Baseline
from largebatch.recipe.resolve import resolve
from largebatch.recipe.resolved import ResolvedRecipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Baseline):
    """What a model is trained with at the batch it was tuned at.

    >>> recipe = Recipe(reference_batch=64, reference_lr=0.02)
    >>> resolved = recipe.resolve(512, 60_000)
    >>> resolved.lr, resolved.num_steps, resolved.warmup_steps
    (0.16, 1172, 586)
    >>> adam = Recipe(reference_batch=64, reference_lr=1e-3, optimizer="adamw", betas=(0.9, 0.99), scaling="sqrt")
    >>> resolved = adam.resolve(256, 60_000)
    >>> resolved.lr, [round(beta, 12) for beta in resolved.betas], resolved.eps
    (0.002, [0.6, 0.96], 5e-09)

    Source: Goyal 2017, sec. 2.1, 2.2, 5.1; Malladi 2022 for Adam.
    """

    def resolve(
        self,
        batch: int,
        units_per_epoch: int,
        lr: float | None = None,
        rule: str | None = None,
        *,
        b_simple: float | None = None,
        b_crit: float | None = None,
        world_size: int = 1,
        accumulation: int | None = None,
    ) -> ResolvedRecipe:
        """Every number of a run at `batch`, each with its rule and source.

        The learning rate scales with the batch, and Adam's betas and epsilon by their own rule; epochs, momentum,
        weight decay, decay epochs and the n of batch norm stay. The warmup climbs from `reference_lr` and is left
        out where there is nothing to climb: at a batch up to `reference_batch`, or at a learning rate up to
        `reference_lr`.

        Args:
            batch: units in one optimizer step, 1 to `units_per_epoch`.
            units_per_epoch: units in one pass over the data.
            lr: peak learning rate chosen elsewhere, > 0; None scales `reference_lr`.
            rule: without `lr`, the scaling rule in place of `scaling`; with it, the name of what chose `lr`.
            b_simple: measured noise scale in the unit of `batch`, >= 0; the rule "noise" needs it.
            b_crit: measured critical batch in the unit of `batch`, > 0; the rule "surge" peaks there.
            world_size: workers that share the batch evenly, >= 1.
            accumulation: microbatches per worker per step, >= 1; None is 1.

        Returns:
            The resolved recipe; what is doubtful about it is in its `warnings`.

        Raises:
            ConfigError: the batch is larger than the data, or is not divided by workers, accumulation and
                `batchnorm_n` (the sentence names the nearest that are); the rule is not known, or does not fit the
                optimizer; it needs a measurement that is not given; a beta leaves (0, 1); or a number is out of range.

        Source: Goyal 2017, sec. 2.1 (all other hyper-parameters unchanged), 2.2, 2.3, 5.1.
        """
        return resolve(
            self, batch, units_per_epoch, lr, rule, b_simple=b_simple, b_crit=b_crit, world_size=world_size,
            accumulation=1 if accumulation is None else accumulation,
        )  # fmt: skip
