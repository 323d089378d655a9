"""What is advice on a batch, and how does it read?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from largebatch.noise.estimate import NoiseScale
from largebatch.records.schema import Interval

OptimizerKind = Literal["sgd", "adam"]
"""How a learning rate goes with the batch: SGD with or without momentum, or Adam and its kin (AdamW, RMSProp)."""
RULES: dict[OptimizerKind, str] = {
    "sgd": "in proportion to B / (B + B_simple), which is linear far below B_simple (McCandlish et al. 2018, eq. 2.6)",
    "adam": "in proportion to the square root of the batch (Malladi et al. 2022)",
}
"""How each kind's learning rate goes with the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCost:
    """What training at a batch takes, by the hyperbola (S/S_min - 1)(E/E_min - 1) = 1 with B_simple for B_crit."""

    batch: int
    """Units in one optimizer step."""
    steps: Interval
    """Optimizer steps over the fewest possible: 1 + B_simple / batch."""
    units: Interval
    """Units over the fewest possible: 1 + batch / B_simple. Unbounded above where B_simple is not told from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What the noise supports; `str()` is a headline, a paragraph and the caveats, a line each.

    Nothing is advised while `resolved` is False.
    """

    resolved: bool
    """Whether there is anything to advise."""
    reason: str
    """Why not; empty if so."""
    unit: str
    """What every batch here counts."""
    b_simple: Interval
    """The noise scale it rests on, in `unit`."""
    batch: int | None = None
    """Units in one optimizer step: the present ones if they are to be kept, else whole microbatches on every worker."""
    lr: float | None = None
    """Learning rate at `batch`; None where the present one or the optimizer is not known."""
    lr_factor: float | None = None
    """`lr` over the present learning rate; None where the optimizer is not known."""
    lr_rule: str = ""
    """The rule behind both."""
    accumulation: int | None = None
    """Microbatches per worker and step; None where they do not divide `batch`, or either number is not known."""
    now: BatchCost | None = None
    """What the present batch takes."""
    then: BatchCost | None = None
    """What `batch` takes."""
    steps_to_resolve: int | None = None
    """Further measured steps expected until there is advice; 0 if there is, None if that cannot be said."""
    hf_arguments: dict[str, int | float] = field(default_factory=dict)
    """The same as arguments of transformers.TrainingArguments, as far as it can be said in them."""
    caveats: tuple[str, ...] = ()
    """What is not known from this measurement."""
    text: str = ""
    """The headline and, on a line of its own, the paragraph; without the caveats."""

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.text, " ".join(self.caveats))))


def paragraph(
    noise_scale: NoiseScale,
    now: BatchCost,
    then: BatchCost,
    *,
    microbatch: int | None,
    world_size: int | None,
    lr: float | None,
    optimizer: OptimizerKind | None,
    factors: Mapping[OptimizerKind, float],
    hf: Mapping[str, int | float],
    floor: bool,
    settled: bool,
    tokens_per_sequence: int | None,
) -> str:
    """Where the batch stands, and on the next line what to use; `floor`: B_simple is a lower bound only."""
    unit = noise_scale.unit
    per_step = (microbatch or 1) * (world_size or 1)
    sentences = (
        f"{_takes(now, unit, floor, 'A run at it takes')}.",
        _settled(now, unit, floor) if settled else _proposal(now, then, unit, floor, per_step),
        _split(then.batch, microbatch, world_size, unit),
        "The learning rate stays as it is." if then.batch == now.batch else _rate(lr, factors, optimizer),
        f"Hugging Face: {', '.join(f'{name}={_digits(value)}' for name, value in hf.items())}." if hf else "",
        _no_rows(microbatch, tokens_per_sequence),
    )
    return f"{_headline(noise_scale, now)}\n{' '.join(filter(None, sentences))}"


def _headline(noise_scale: NoiseScale, now: BatchCost) -> str:
    unit, (low, high), value = noise_scale.unit, noise_scale.interval, noise_scale.b_simple
    assert value is not None
    share = Interval(
        value=now.batch / value,
        low=None if high is None else now.batch / high,
        high=None if low is None or low <= 0 else now.batch / low,
    )
    scale = f"B_simple = {_ranged(Interval(value=value, low=low, high=high))} {unit}, 95 % intervals"
    return (
        f"Batch {now.batch:,} {unit} is {_ranged(share)} times the noise scale ({scale}, over "
        f"{noise_scale.num_steps:,} measured steps)."
    )


def _takes(cost: BatchCost, unit: str, floor: bool, verb: str) -> str:
    least, most = ("at least ", "at most ") if floor else ("", "")
    return (
        f"{verb} {least}{_ranged(cost.steps)} times the fewest steps and {most}{_ranged(cost.units)} times the "
        f"fewest {unit}"
    )


def _settled(now: BatchCost, unit: str, floor: bool) -> str:
    if floor and now.units.low is not None and now.units.low > 2:
        return f"Keep it: that B_simple is smaller does not show that {now.batch:,} {unit} are too many."
    return "Keep it: it is not told from the noise scale."


def _proposal(now: BatchCost, then: BatchCost, unit: str, floor: bool, per_step: int) -> str:
    if then.batch == now.batch:
        return f"It stays: no multiple of {per_step:,} {unit} (one microbatch on every worker) is nearer to B_simple."
    assert now.steps.value and then.steps.value and now.units.value and then.units.value
    steps, units = then.steps.value / now.steps.value, then.units.value / now.units.value
    verb = "Raise" if then.batch > now.batch else "Lower"
    return (
        f"{verb} it to {then.batch:,} {unit}, which {_takes(then, unit, floor, 'takes')}: {count_words(steps)} times "
        f"the steps of now for {count_words(units)} times the {unit}."
    )


def _split(advised: int, microbatch: int | None, world_size: int | None, unit: str) -> str:
    if microbatch is None:
        return ""
    count, rest = divmod(advised, microbatch * (world_size or 1))
    if rest:
        what = "microbatches" if world_size in (None, 1) else f"microbatches for {world_size:,} workers"
        return f"It is no whole number of {what}, of {microbatch:,} {unit} each, so no accumulation is given."
    what = f"{count:,} microbatch{'' if count == 1 else 'es'} of {microbatch:,} {unit}"
    if world_size is None:
        return f"That is {what} a step, over all workers together."
    workers = "1 worker" if world_size == 1 else f"each of {world_size:,} workers"
    return f"That is {what} a step on {workers} (accumulation {count:,})."


def _no_rows(microbatch: int | None, tokens_per_sequence: int | None) -> str:
    if microbatch is None or tokens_per_sequence is None or microbatch % tokens_per_sequence == 0:
        return ""
    return (
        f"No arguments for Hugging Face: a microbatch of {microbatch:,} tokens is no whole number of rows of "
        f"{tokens_per_sequence:,}."
    )


def _rate(lr: float | None, factors: Mapping[OptimizerKind, float], optimizer: OptimizerKind | None) -> str:
    if optimizer is None:
        return (
            f"The learning rate is multiplied by {_digits(factors['sgd'])} for SGD, {RULES['sgd']}; by "
            f"{_digits(factors['adam'])} for Adam, {RULES['adam']}."
        )
    factor, rule = factors[optimizer], RULES[optimizer]
    if lr is None:
        return f"The learning rate is multiplied by {_digits(factor)}: {rule}."
    return f"The learning rate goes from {_digits(lr)} to {_digits(lr * factor)}: {rule}."


def _ranged(interval: Interval) -> str:
    low, high = ("unbounded" if end is None else count_words(end) for end in (interval.low, interval.high))
    return f"{count_words(interval.value or 0.0)} ({low} to {high})"


def count_words(value: float) -> str:
    """A number of units, or a ratio: three digits, more only before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _digits(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3g}"
