"""Which numbers does a recipe come to at another batch?"""

from __future__ import annotations

import math
from dataclasses import replace

from largebatch.errors import ConfigError
from largebatch.recipe.adam_rules import scaled_adam
from largebatch.recipe.baseline import Baseline
from largebatch.recipe.explain import explain, rate_rule, warnings_of
from largebatch.recipe.resolved import ResolvedRecipe
from largebatch.recipe.scaling import SOURCES, check_count, check_rule_for, is_number, scaled_lr
from largebatch.recipe.schedule import Schedule, WarmupStepDecay, check_lr, epochs_to_steps
from largebatch.recipe.schedules import Cosine, Linear, warmed_up, warmup_stable_decay


def resolve(
    recipe: Baseline,
    batch: int,
    units_per_epoch: int,
    lr: float | None,
    rule: str | None,
    *,
    b_simple: float | None,
    b_crit: float | None,
    world_size: int,
    accumulation: int,
) -> ResolvedRecipe:
    """What `Recipe.resolve` returns; arguments as there."""
    for name, count in (
        ("batch", batch), ("units_per_epoch", units_per_epoch), ("world_size", world_size),
        ("accumulation", accumulation),
    ):  # fmt: skip
        check_count(name, count)
    if batch > units_per_epoch:
        raise ConfigError(
            f"a batch of {batch} is larger than the data, which has {units_per_epoch}. "
            f"Use a batch of at most {units_per_epoch}."
        )
    check_layout(batch, world_size, accumulation, recipe.batchnorm_n)
    if b_simple is not None and not (is_number(b_simple) and b_simple >= 0 and math.isfinite(b_simple)):
        raise ConfigError(f"b_simple is a finite number of at least 0, or None while unresolved; got {b_simple!r}.")
    if b_crit is not None and not (is_number(b_crit) and b_crit > 0 and math.isfinite(b_crit)):
        raise ConfigError(f"b_crit is a finite number above 0, or None while unresolved; got {b_crit!r}.")
    if lr is None:
        rule = check_rule_for(rule or recipe.scaling, recipe.optimizer)
        lr = scaled_lr(
            rule, recipe.reference_lr, recipe.reference_batch, batch, b_simple=b_simple, b_crit=b_crit
        )  # fmt: skip
        lr_rule, lr_source = rate_rule(recipe, rule, batch, b_simple, b_crit), SOURCES[rule]
    else:
        check_lr("lr", lr)
        rule = rule or "given"
        lr_rule, lr_source = rule, "the caller"
    betas, eps = recipe.betas, recipe.eps
    if recipe.optimizer in ("adam", "adamw"):
        betas, eps = scaled_adam(recipe.adam_rule, betas, eps, batch / recipe.reference_batch)
    num_steps, warmup_steps, schedule = _schedule(recipe, batch, units_per_epoch, lr)
    resolved = ResolvedRecipe(
        batch=batch, units_per_epoch=units_per_epoch, world_size=world_size, accumulation=accumulation,
        rule=rule, lr=lr, num_steps=num_steps, warmup_steps=warmup_steps, schedule=schedule,
        optimizer=recipe.optimizer, momentum=recipe.momentum, nesterov=recipe.nesterov, betas=betas, eps=eps,
        weight_decay=recipe.weight_decay, exclude_biases=recipe.exclude_biases, batchnorm_n=recipe.batchnorm_n,
        warnings=(
            *warnings_of(recipe, rule, batch, b_simple, b_crit),
            *_rounded_away(recipe, batch, lr, schedule, num_steps),
        ),
        numbers=(),
    )  # fmt: skip
    return replace(resolved, numbers=explain(recipe, resolved, lr_rule, lr_source))


def check_layout(batch: int, world_size: int, accumulation: int, batchnorm_n: int | None) -> None:
    """Refuse a batch that workers, accumulation and the n of batch norm do not divide, and name the nearest they do.

    With a fixed n each microbatch holds whole ghost batches of n, or n is held by a group of workers together and
    the workers are whole groups.

    Args:
        batch: units in one optimizer step, >= 1.
        world_size: workers, >= 1.
        accumulation: microbatches per worker per step, >= 1.
        batchnorm_n: examples over which batch norm takes its statistics, >= 1; None is not asked.

    Raises:
        ConfigError: the batch cannot be dealt out so.

    >>> check_layout(8192, 256, 1, 32)
    >>> check_layout(8192, 512, 1, 32)  # groups of two workers

    Source: Goyal 2017, sec. 2.3 and remark 4.
    """
    if batchnorm_n is not None and batchnorm_n > batch:
        raise ConfigError(
            f"batch norm over batchnorm_n={batchnorm_n} examples needs a batch of at least as many; got {batch}. "
            f"Use a larger batch, or tune the baseline at a smaller n: another n is another loss."
        )
    parts = world_size * accumulation

    def fits(candidate: int) -> bool:
        microbatch, rest = divmod(candidate, parts)
        if rest:
            return False
        if batchnorm_n is None or microbatch % batchnorm_n == 0:
            return True
        workers, rest = divmod(batchnorm_n, microbatch)
        return rest == 0 and world_size % workers == 0

    if fits(batch):
        return
    below = next((size for size in range(batch - batch % parts, 0, -parts) if fits(size)), None)
    above = next(size for size in range(batch - batch % parts + parts, 2**63, parts) if fits(size))
    nearest = " or ".join(str(size) for size in (below, above) if size is not None)
    layout = f"{world_size} worker{'s' if world_size > 1 else ''}"
    layout += f" with {accumulation} microbatches each" if accumulation > 1 else ""
    layout += f" and batch norm over {batchnorm_n}" if batchnorm_n is not None else ""
    raise ConfigError(f"a batch of {batch} cannot be dealt out evenly to {layout}. The nearest that can: {nearest}.")


def _rounded_away(recipe: Baseline, batch: int, lr: float, schedule: Schedule, num_steps: int) -> list[str]:
    """What was asked for and is shorter than half a step of so large a batch."""
    found: list[str] = []
    asked = recipe.warmup != "none" and recipe.warmup_epochs > 0
    if asked and batch > recipe.reference_batch and lr > recipe.reference_lr and schedule.lr_at(0) == lr:
        found.append(
            f"a warmup of {recipe.warmup_epochs:g} epochs is less than half a step at a batch of {batch}, so there is "
            f"none: training starts at {lr:g}."
        )
    if isinstance(schedule, WarmupStepDecay) and schedule.decay_steps and schedule.decay_steps[-1] >= num_steps:
        found.append(
            f"the decay after epoch {recipe.decay_epochs[-1]:g} falls on the end of the run of {num_steps} steps and "
            "does nothing."
        )
    return found


def _schedule(recipe: Baseline, batch: int, units_per_epoch: int, lr: float) -> tuple[int, int, Schedule]:
    def steps_at(epochs: float) -> int:
        return epochs_to_steps(epochs, batch=batch, units_per_epoch=units_per_epoch)

    warm = recipe.warmup != "none" and batch > recipe.reference_batch and lr > recipe.reference_lr
    num_steps, warmup_steps = steps_at(recipe.epochs), steps_at(recipe.warmup_epochs) if warm else 0
    if warmup_steps >= num_steps:
        raise ConfigError(
            f"at a batch of {batch} the warmup is all {num_steps} steps of the run: the target learning rate would "
            f"never be used. Use a smaller batch, a shorter warmup or more epochs."
        )
    start_lr = recipe.reference_lr if warmup_steps else lr
    kind = "constant" if recipe.warmup == "constant" else "gradual"
    end_lr = recipe.end_factor * lr
    match recipe.schedule:
        case "step":
            schedule: Schedule = WarmupStepDecay(
                start_lr=start_lr, peak_lr=lr, warmup_steps=warmup_steps, warmup=kind,
                decay_steps=tuple(steps_at(epoch) for epoch in recipe.decay_epochs), decay_factor=recipe.decay_factor,
            )  # fmt: skip
        case "wsd":
            # Both ends are rounded, so the decay may seem to begin half a step before the warmup is over.
            decay_start = max(warmup_steps, steps_at(recipe.epochs * (1 - recipe.decay_fraction)))
            schedule = warmup_stable_decay(
                peak_lr=lr, num_steps=num_steps, decay_steps=num_steps - decay_start, warmup_steps=warmup_steps,
                start_lr=start_lr, end_lr=end_lr, warmup=kind,
            )  # fmt: skip
        case "cosine" | "linear":
            shape = Cosine if recipe.schedule == "cosine" else Linear
            schedule = warmed_up(
                shape(start_lr=lr, num_steps=num_steps - warmup_steps, end_lr=end_lr),
                num_steps=num_steps, start_lr=start_lr, warmup_steps=warmup_steps, warmup=kind,
            )  # fmt: skip
    return num_steps, warmup_steps, schedule
