"""Which batch, learning rate and accumulation does the measured noise support now?

Arithmetic on a noise scale, for whoever is in the middle of a training: no gradient, no file. An unresolved noise
scale gives the reason and no number.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import get_args

from largebatch.errors import ConfigError
from largebatch.noise.advice import RULES, Advice, BatchCost, OptimizerKind, count_words, paragraph
from largebatch.noise.estimate import NoiseScale
from largebatch.records.schema import Interval

LEAP = 4
"""A batch raised by more than this factor is reached in doublings, with a fresh measurement at each."""

_PROXY = (
    "B_simple stands in for the critical batch, and knows neither momentum nor curvature: McCandlish et al. 2018 "
    "(table 1) measured 0.05 to 8 times the critical batch, and both grow along a run."
)
_ADAM_LM = (
    "For language models under Adam the noise scale was found to underestimate the critical batch by orders of "
    "magnitude (Merrill et al. 2025): take it for a lower bound. The reference is a branch measurement: train on from "
    "one checkpoint at several batches, and keep the largest that loses nothing."
)
_LEAP = "Go there in doublings, and measure again after each: the noise scale moves with the learning rate."
_ONE_SIZE = (
    "One microbatch a step on one worker leaves nothing to measure with: halve the microbatch to go on measuring."
)


def advise(
    noise_scale: NoiseScale,
    *,
    batch: int | None,
    microbatch: int | None,
    world_size: int | None = 1,
    lr: float | None = None,
    optimizer: OptimizerKind | None = None,
    tokens_per_sequence: int | None = None,
) -> Advice:
    """The batch at the noise scale, and what goes with it.

    At batch B a run takes 1 + B_simple/B times the fewest steps and 1 + B/B_simple times the fewest units: twice
    of each at B_simple, which is what is proposed. A batch inside the interval of B_simple is kept to
    the unit; another one is rounded to whole microbatches on every worker. Assumes that `lr` is well tuned at `batch`,
    and that B_simple stands for the critical batch.

    Args:
        noise_scale: as measured at `batch`.
        batch: units in a step now, >= 1; may be None while the noise scale is unresolved.
        microbatch: units in one forward/backward of one worker, >= 1; None is unknown, and no split is given.
        world_size: workers, >= 1; None is unknown.
        lr: learning rate now, > 0; None is unknown.
        optimizer: "sgd" (rate in proportion to B / (B + B_simple)) or "adam" (to the square root of B); None is
            unknown.
        tokens_per_sequence: for a noise scale in tokens, what one row of a Hugging Face batch holds; where the
            microbatch is no whole number of rows there are no `hf_arguments`, and the text says so.

    Returns:
        Advice. Where a language model may be under Adam, B_simple is a lower bound: no batch is then called too large.

    Raises:
        ConfigError: a number out of range, or no batch for a resolved noise scale.

    >>> from largebatch.noise.estimate import noise_scale
    >>> measured = noise_scale([8.0, 9.0, 7.0, 8.5, 7.5, 8.0, 9.0, 7.0], [0.02, 0.022, 0.019, 0.021] * 2)
    >>> advice = advise(measured, batch=64, microbatch=32, lr=0.1, optimizer="sgd")
    >>> advice.batch, advice.accumulation, round(advice.lr, 3)
    (384, 12, 0.352)

    Source: McCandlish et al. 2018, eq. 2.11 (costs) and 2.6 (SGD); Malladi et al. 2022 (Adam's square root).
    """
    _check(batch, microbatch, world_size, lr, optimizer, tokens_per_sequence, noise_scale.unit)
    low, high = noise_scale.interval
    b_simple = Interval(value=noise_scale.b_simple, low=low, high=high)
    reason = _why_not(noise_scale)
    if reason or noise_scale.b_simple is None:
        return _nothing(noise_scale, b_simple, reason)
    if batch is None:
        raise ConfigError("no step has been measured here yet, so the batch is not known: give it as batch=.")
    floor = optimizer != "sgd" and noise_scale.unit in ("tokens", "sequences")
    per_step = (microbatch or 1) * (world_size or 1)
    target = _target(noise_scale.b_simple, low, high, batch, floor)
    advised = max(1, round(target / per_step)) * per_step
    if (advised - batch) * (target - batch) <= 0:  # kept; also where the nearest multiple lies the other way
        advised = batch
    now, then = _cost(batch, b_simple), _cost(advised, b_simple)
    factors: dict[OptimizerKind, float] = {
        kind: _lr_factor(kind, batch, advised, noise_scale.b_simple) for kind in RULES
    }
    factor = 1.0 if advised == batch else factors.get(optimizer) if optimizer else None
    advised_lr = None if lr is None or factor is None else lr * factor
    divides = world_size is not None and microbatch is not None and advised % per_step == 0
    accumulation = advised // per_step if divides else None
    hf = _hf_arguments(noise_scale.unit, microbatch, accumulation, advised_lr, tokens_per_sequence)
    caveats = (
        _PROXY,
        _ADAM_LM if floor else "",
        _LEAP if advised > LEAP * batch else "",
        _ONE_SIZE if advised == microbatch and world_size == 1 else "",
    )
    text = paragraph(
        noise_scale, now, then, microbatch=microbatch, world_size=world_size, lr=lr, optimizer=optimizer,
        factors=factors, hf=hf, floor=floor, settled=target == batch, tokens_per_sequence=tokens_per_sequence,
    )  # fmt: skip
    return Advice(
        resolved=True, reason="", unit=noise_scale.unit, b_simple=b_simple, batch=advised, lr=advised_lr,
        lr_factor=factor, lr_rule=RULES[optimizer] if optimizer else "", accumulation=accumulation, now=now, then=then,
        steps_to_resolve=0, hf_arguments=hf, caveats=tuple(filter(None, caveats)), text=text,
    )  # fmt: skip


def _lr_factor(kind: OptimizerKind, batch: int, advised: int, b_simple: float) -> float:
    if kind == "adam":
        return math.sqrt(advised / batch)
    return (advised / (advised + b_simple)) / (batch / (batch + b_simple))


def _check(
    batch: int | None,
    microbatch: int | None,
    world_size: int | None,
    lr: object,
    optimizer: object,
    tokens_per_sequence: int | None,
    unit: str,
) -> None:
    counts = {
        "batch": batch, "microbatch": microbatch, "world_size": world_size, "tokens_per_sequence": tokens_per_sequence,
    }  # fmt: skip
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} is a whole number of at least 1; got {value!r}.")
    if lr is not None and (isinstance(lr, bool) or not isinstance(lr, Real) or not 0 < float(lr) < math.inf):
        raise ConfigError(f"lr is a finite number above 0; got {lr!r}.")
    if optimizer is not None and not (isinstance(optimizer, str) and optimizer in get_args(OptimizerKind)):
        got = repr(optimizer) if isinstance(optimizer, str) else type(optimizer).__name__
        raise ConfigError(
            f"optimizer {got} is not known: use 'sgd', or 'adam' for Adam, AdamW and RMSProp, and leave another one "
            "out, for which no learning rate is advised."
        )
    if tokens_per_sequence is not None and unit != "tokens":
        raise ConfigError(f"tokens_per_sequence converts a batch of tokens; this one counts {unit}.")


def _why_not(noise_scale: NoiseScale) -> str:
    if not noise_scale.resolved:
        return noise_scale.reason
    if noise_scale.b_simple is None or noise_scale.b_simple <= 0:
        return f"tr(Sigma) = {noise_scale.trace_cov or 0:.3g} is not told from 0: there is too little noise to measure."
    return ""


def _nothing(noise_scale: NoiseScale, b_simple: Interval, reason: str) -> Advice:
    bounds: list[str] = []
    if b_simple.low is not None and b_simple.low > 0:
        bounds.append(f"at least {count_words(b_simple.low)}")
    if b_simple.high is not None and b_simple.high > 0:
        bounds.append(f"at most {count_words(b_simple.high)}")
    known = f"\nWhat is known: B_simple is {' and '.join(bounds)} {noise_scale.unit} (95 %)." if bounds else ""
    steps = f"{noise_scale.num_steps:,} measured step{'' if noise_scale.num_steps == 1 else 's'}"
    return Advice(
        resolved=False, reason=reason, unit=noise_scale.unit, b_simple=b_simple,
        steps_to_resolve=None if noise_scale.resolved else noise_scale.steps_to_resolve,
        text=f"Nothing is advised after {steps}: {reason}{known}",
    )  # fmt: skip


def _target(b_simple: float, low: float | None, high: float | None, batch: int, floor: bool) -> float:
    """The batch to aim for: the present one while it is not told from B_simple, or while B_simple is a floor."""
    if low is not None and batch < low:
        return b_simple
    return b_simple if high is not None and batch > high and not floor else float(batch)


def _cost(batch: int, b_simple: Interval) -> BatchCost:
    # Noise is not negative: a lower end of B_simple below 0 means that nothing is known but that.
    low = max(b_simple.low or 0.0, 0.0)
    assert b_simple.value is not None
    return BatchCost(
        batch=batch,
        steps=Interval(
            value=1 + b_simple.value / batch,
            low=1 + low / batch,
            high=None if b_simple.high is None else 1 + b_simple.high / batch,
        ),
        units=Interval(
            value=1 + batch / b_simple.value,
            low=1.0 if b_simple.high is None else 1 + batch / b_simple.high,
            high=1 + batch / low if low > 0 else None,
        ),
    )


def _hf_arguments(
    unit: str, microbatch: int | None, accumulation: int | None, lr: float | None, tokens_per_sequence: int | None
) -> dict[str, int | float]:
    """Rows of a Hugging Face batch are examples or sequences; where rows cannot be counted, nothing is said."""
    if accumulation is None or microbatch is None:
        return {}
    rows, rest = divmod(microbatch, tokens_per_sequence) if tokens_per_sequence else (microbatch, 0)
    if not (unit in ("examples", "sequences") or (tokens_per_sequence is not None and rest == 0)):
        return {}
    arguments: dict[str, int | float] = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
    }
    return arguments | ({} if lr is None else {"learning_rate": lr})
