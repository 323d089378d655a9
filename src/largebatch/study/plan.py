"""Which numbers does a study fix before it starts, so that every choice later is a function of the results?"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from largebatch.errors import ConfigError
from largebatch.study.choose import SEARCH_FACTOR
from largebatch.tasks.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """The rules of a study; all of it goes into result.json."""

    goal_fractions: tuple[float, ...] = (0.1, 0.2, 0.4)
    """Fractions of the baseline run's steps whose losses become the goals."""
    num_microbatches: int = 8
    """Microbatches a step in the measured run, at most."""
    max_measured_runs: int = 7
    """Measured runs at most; more than one only while the noise scale's interval is wide."""
    lr_factor: float = SEARCH_FACTOR
    """Step of the learning-rate search."""
    num_seeds: int = 3
    """Fresh seeds at the chosen learning rate of each batch, at first."""
    max_seeds: int = 7
    """Seeds are added, two at a time, up to so many while an interval is wide."""
    wide_ratio: float = 2.5
    """An interval (of B_crit or B_simple) whose high is more than this many times its low is wide."""
    batches_below: int = 3
    """Doublings below the predicted critical batch size that are swept."""
    batches_above: int = 3
    """Doublings above it."""
    max_batches: int = 10
    """Batch sizes swept at most, extensions included."""
    step_allowance: float = 3.0
    """A run may take this many times the steps that perfect scaling would need, then it is a bound."""
    extra_units: float = 0.2
    """The recommended batch costs at most this fraction more units than the baseline."""
    num_large_seeds: int = 5
    """Seeds of every full training run."""
    large_factor: int = 8
    """Full training is always tried at this multiple of the reference batch."""
    elbow_factor: int = 32
    """Where the search for a batch that visibly fails begins, as a multiple of the reference batch."""
    fail_points: float = 2.0
    """Points of error above the baseline that count as a visible failure."""
    match_points: float = 0.5
    """A large-batch run matches when the interval of its extra error stays below this."""


def derive_seed(seed: int, *parts: object) -> int:
    """A seed of its own for every purpose, 31 bits, fixed by (seed, parts)."""
    text = ":".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def microbatch_for(batch: int, protocol: Protocol, task: Task) -> int:
    """The smallest microbatch that splits `batch` into `num_microbatches` (more where memory asks for it).

    A smaller microbatch lowers the variance of the noise scale; the last one may be smaller still. A task whose loss
    depends on the microbatch keeps its own.

    Raises:
        ConfigError: a batch of 1 cannot be split.
    """
    if batch < 2:
        raise ConfigError(
            "noise scale needs two batch sizes, a batch and its microbatches; got a batch of 1. Use 2 or more."
        )
    return task.microbatch or min(math.ceil(batch / protocol.num_microbatches), task.max_microbatch)


def batch_grid(center: float, num_units: int, protocol: Protocol) -> list[int]:
    """Powers of two around `center`, from 1 to half the training data."""
    limit = math.floor(math.log2(max(num_units / 2, 2)))
    middle = min(round(math.log2(max(center, 1.0))), limit)
    # A fit needs room: what one end cuts off is added at the other.
    bottom = max(0, min(middle - protocol.batches_below, limit - 5))
    top = min(limit, max(middle + protocol.batches_above, bottom + 5))
    return [2**exponent for exponent in range(bottom, top + 1)]


def more_batches(swept: Sequence[int], b_crit: float | None, num_units: int, protocol: Protocol) -> list[int]:
    """Batch sizes to add so that at least two lie on either side of the fitted critical batch size."""
    if b_crit is None or len(swept) >= protocol.max_batches:
        return []
    lowest, highest = min(swept), max(swept)
    added: list[int] = []
    if sum(batch < b_crit for batch in swept) < 2 and lowest > 1:
        added += [lowest // 2**step for step in (1, 2) if lowest // 2**step >= 1]
    if sum(batch > b_crit for batch in swept) < 2:
        added += [highest * 2**step for step in (1, 2) if highest * 2**step <= num_units / 2]
    return sorted(set(added))[: protocol.max_batches - len(swept)]


def pick_goals(curve: Sequence[tuple[int, float]], protocol: Protocol) -> tuple[float, ...]:
    """Goals from a baseline run: the losses it had reached at fixed fractions of its steps.

    Args:
        curve: (step, loss on the goal examples), in order.

    Raises:
        ConfigError: the loss did not fall enough to set goals apart.
    """
    last = curve[-1][0]
    goals = [
        min(loss for step, loss in curve if step <= max(fraction * last, 1)) for fraction in protocol.goal_fractions
    ]
    goals = [float(f"{goal:.3g}") for goal in goals]
    first = curve[0][1]
    if not all(later < earlier for earlier, later in itertools.pairwise([first, *goals])):
        raise ConfigError(
            f"the baseline run does not learn: its loss went from {first:.4g} to {goals[-1]:.4g} "
            f"in {last} steps. Check the task's loss and reference_lr, or state `goals` in the task."
        )
    return tuple(goals)
