"""Why is each number of a resolved recipe what it is, and what is doubtful about it?"""

from __future__ import annotations

from largebatch.recipe.adam_rules import ADAM_SOURCES, half_life
from largebatch.recipe.baseline import Baseline
from largebatch.recipe.resolved import ResolvedRecipe
from largebatch.recipe.scaling import SHOWN_FOR, eps_max_from, surge_lr
from largebatch.records.schema import ResolvedNumber

Row = tuple[str, float | int | str, str, str]
"""(name, value, rule, source)."""

OPTIMIZERS = {
    "sgd": ("the learning rate stays outside the velocity: no momentum correction", "Goyal 2017, eq. (9)"),
    "velocity_sgd": (
        "the learning rate is inside the velocity: momentum correction when it changes",
        "Goyal 2017, eq. (10), remark 2",
    ),
    "lars": ("a rate for every layer, by the norms of weights and gradient", "You 2017, Algorithm 1"),
    "lamb": ("a rate for every layer, by the norms of weights and Adam's update", "You 2019, Algorithm 2"),
    "adam": ("weight decay goes through the moments", "Kingma 2015, Algorithm 1"),
    "adamw": ("weight decay beside the moments, times the learning rate", "Loshchilov 2019, Algorithm 2"),
}
"""(rule, source) of every optimizer."""


def explain(recipe: Baseline, resolved: ResolvedRecipe, lr_rule: str, lr_source: str) -> tuple[ResolvedNumber, ...]:
    """Every number of `resolved` with its rule and source.

    Args:
        recipe: what was resolved.
        resolved: what it came to; its own `numbers` are not read.
        lr_rule: what chose the learning rate, in words.
        lr_source: where that comes from.

    Returns:
        The rows, in the order in which a person reads them.
    """
    batch, k = resolved.batch, resolved.batch / recipe.reference_batch
    epoch = f"{resolved.units_per_epoch / batch:.2f} steps an epoch"
    rows: list[Row] = [("batch", batch, f"{k:g} times the reference batch", "the caller")]
    if resolved.world_size > 1 or resolved.accumulation > 1:
        shares = f"workers: {resolved.world_size}, microbatches each: {resolved.accumulation}"
        rows.append(("microbatch", resolved.microbatch, shares, "the caller"))
    rows += [
        ("lr", resolved.lr, lr_rule, lr_source),
        ("warmup_steps", resolved.warmup_steps, _warmup_rule(recipe, resolved), "Goyal 2017, sec. 2.2"),
        ("num_steps", resolved.num_steps, f"{recipe.epochs} epochs at any batch, {epoch}", "Goyal 2017, sec. 2.1, 5.1"),
        *_schedule_rows(recipe, resolved),
        ("optimizer", resolved.optimizer, *OPTIMIZERS[resolved.optimizer]),
        *_optimizer_rows(recipe, resolved),
    ]
    biases = resolved.exclude_biases or resolved.optimizer in ("lars", "lamb")
    none_on = "norm layers and biases" if biases else "norm layers"
    rows.append(
        ("weight_decay", resolved.weight_decay, f"unchanged; none on {none_on}", "Goyal 2017, remark 1, sec. 5.1")
    )
    if resolved.batchnorm_n is not None:
        rows.append(("batchnorm_n", resolved.batchnorm_n, _batchnorm_rule(resolved), "Goyal 2017, sec. 2.3"))
    rows.append(("loss_divisor", batch, "every loss sum is divided by the whole batch", "Goyal 2017, remark 3"))
    return tuple(ResolvedNumber(name=name, value=value, rule=rule, source=source) for name, value, rule, source in rows)


def rate_rule(recipe: Baseline, rule: str, batch: int, b_simple: float | None, b_crit: float | None) -> str:
    """The rule that scaled the learning rate, in words, with the numbers that went into it."""
    tuned, k = f"{recipe.reference_lr:g} at {recipe.reference_batch}", batch / recipe.reference_batch
    match rule:
        case "linear":
            return f"linear: {tuned}, times {k:g}"
        case "sqrt":
            return f"sqrt: {tuned}, times sqrt({k:g})"
        case "noise":
            assert b_simple is not None
            eps_max = eps_max_from(recipe.reference_lr, b_simple, recipe.reference_batch)
            return f"noise: eps_max / (1 + B_simple / B), eps_max {eps_max:.4g} from {tuned}, B_simple {b_simple:.4g}"
        case "surge":
            b_noise = b_simple if b_crit is None else b_crit
            assert b_noise is not None
            eps_max = recipe.reference_lr / surge_lr(1.0, b_noise, recipe.reference_batch)
            return (
                f"surge: 2 eps_max / (sqrt(B_noise / B) + sqrt(B / B_noise)), eps_max {eps_max:.4g} from {tuned}, "
                f"B_noise {b_noise:.4g}"
            )
        case _:
            return f"none: {tuned}, unscaled"


def warnings_of(
    recipe: Baseline, rule: str, batch: int, b_simple: float | None, b_crit: float | None
) -> tuple[str, ...]:
    """What is doubtful about a recipe at `batch`, one sentence each; arguments as `Recipe.resolve`."""
    found: list[str] = []
    limit, measured = (b_simple, "noise scale") if b_crit is None else (b_crit, "critical batch")
    if recipe.shown_up_to is not None and batch > recipe.shown_up_to:
        known = "" if limit is None else f" (the measured {measured} is {limit:.6g})"
        found.append(
            f"a batch of {batch} is beyond {recipe.shown_up_to}, the largest that this recipe was shown for{known}."
        )
    if limit and batch > limit:
        found.append(
            f"a batch of {batch} is above the measured {measured} of {limit:.6g}: to the same loss it takes "
            f"{1 + batch / limit:.3g} times the fewest units and {1 + limit / batch:.3g} times the fewest steps "
            f"(McCandlish 2018, eq. 2.11)."
        )
    if batch != recipe.reference_batch:
        if recipe.optimizer not in SHOWN_FOR.get(rule, (recipe.optimizer,)):
            found.append(
                f"the {rule} rule was shown for {', '.join(SHOWN_FOR[rule])}; this recipe trains with "
                f"{recipe.optimizer}."
            )
        adam = recipe.optimizer in ("adam", "adamw")
        if adam and recipe.adam_rule == "malladi" and rule in SHOWN_FOR and rule != "sqrt":
            found.append(
                f"Malladi 2022 scales betas and epsilon together with the square root of the batch for the rate; this "
                f"rate is by the {rule} rule. Use scaling='sqrt', or another adam_rule."
            )
    if rule == "surge" and b_crit is None:
        found.append(
            "the surge rule peaks where examples and steps trade evenly, the critical batch; b_simple stands in for "
            "it. Give a measured b_crit."
        )
    return tuple(found)


def _warmup_rule(recipe: Baseline, resolved: ResolvedRecipe) -> str:
    if resolved.warmup_steps:
        if recipe.warmup == "constant":
            return f"constant at {recipe.reference_lr:g} over {recipe.warmup_epochs:g} epochs, then {resolved.lr:g}"
        increment = (resolved.lr - recipe.reference_lr) / resolved.warmup_steps
        return (
            f"gradual over {recipe.warmup_epochs:g} epochs, from {recipe.reference_lr:g}, adding {increment:.4g} a step"
        )
    if recipe.warmup == "none" or recipe.warmup_epochs == 0:
        return "none asked for"
    if resolved.batch <= recipe.reference_batch:
        return f"none at a batch up to the reference of {recipe.reference_batch}"
    if resolved.lr > recipe.reference_lr:
        return f"none: {recipe.warmup_epochs:g} epochs are less than half a step"
    return f"none, since the rate does not rise above the reference of {recipe.reference_lr:g}"


def _schedule_rows(recipe: Baseline, resolved: ResolvedRecipe) -> list[Row]:
    if recipe.schedule == "step":
        rule = f"lr times {recipe.decay_factor:g} after epoch {{:g}}, counted from 0 with the warmup in it"
        return [
            (f"decay_step_{number}", resolved.steps_at(after), rule.format(after), "Goyal 2017, sec. 2.2, 5.1")
            for number, after in enumerate(recipe.decay_epochs, start=1)
        ]
    after = resolved.warmup_steps
    shape, source = {
        "cosine": (f"half a cosine from step {after}, where the warmup is over", "Loshchilov 2017; He 2019"),
        "linear": (f"a line from step {after}, where the warmup is over", "Devlin 2019, sec. A.2"),
        "wsd": (f"level, then a line over the last {recipe.decay_fraction:g} of the run", "Hu 2024; Hägele 2024"),
    }[recipe.schedule]
    end = f"{recipe.end_factor:g} of the peak, at step {resolved.num_steps}"
    rows: list[Row] = [
        ("schedule", recipe.schedule, shape, source),
        ("end_lr", recipe.end_factor * resolved.lr, end, "the recipe"),
    ]
    return rows


def _batchnorm_rule(resolved: ResolvedRecipe) -> str:
    n, microbatch = resolved.batchnorm_n, resolved.microbatch
    assert n is not None
    if microbatch == n:
        return "unchanged: each microbatch"
    if microbatch > n:
        return f"unchanged: ghost batches in each microbatch of {microbatch}"
    return f"unchanged: groups of {n // microbatch} workers with {microbatch} each"


def _optimizer_rows(recipe: Baseline, resolved: ResolvedRecipe) -> list[Row]:
    if resolved.optimizer in ("sgd", "velocity_sgd", "lars"):
        form = "Nesterov" if resolved.nesterov else "plain"
        return [("momentum", resolved.momentum, f"{form}, unchanged", "Goyal 2017, sec. 2.1")]
    (beta1, beta2), k = resolved.betas, resolved.batch / recipe.reference_batch
    tuned1, tuned2 = recipe.betas
    same = "unchanged"
    if resolved.optimizer == "lamb" or recipe.adam_rule == "none":
        source = "You 2019" if resolved.optimizer == "lamb" else ADAM_SOURCES["none"]
        rules = (same, same, same)
    elif recipe.adam_rule == "marek":
        source = ADAM_SOURCES["marek"]
        life = half_life(beta2, resolved.batch) if beta2 > 0 else 0.0
        rules = (same, f"{tuned2:g} to the power {k:g}: a half-life of {life:.4g} units as at the reference", same)
    else:
        source = ADAM_SOURCES["malladi"]
        horizon = "1 - {k:g} (1 - {tuned:g}): as many units back as at the reference"
        first = same if tuned1 == 0 else horizon.format(k=k, tuned=tuned1)
        rules = (first, horizon.format(k=k, tuned=tuned2), f"{recipe.eps:g} / sqrt({k:g})")
    values = (("beta1", beta1), ("beta2", beta2), ("eps", resolved.eps))
    return [(name, value, rule, source) for (name, value), rule in zip(values, rules, strict=True)]
