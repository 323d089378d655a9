"""Which backwards of a step belong to one microbatch?

Those of one forward do, in whatever order forwards and backwards come: two heads, each with a loss of its own. Where a
step has more forwards than it is meant to have microbatches, those of one draw do: the real and the fake batch of a
GAN's discriminator, whose losses are added. Batches that are drawn before any of their backwards are one draw, so that
microbatches of which all forwards come first are told apart by `accumulation` only.
"""

from __future__ import annotations

from largebatch.audit.watch_loss import Term
from largebatch.audit.watch_record import Step

UNKNOWN = (
    "more forwards with a backward than microbatches in an optimizer step: say accumulation= if they are microbatches"
)
"""What is said where backwards may be microbatches, whose losses are divided, or losses that are added on purpose."""


UNSEEN = "the first step, at whose beginning not all gradients of a fully_shard model could be seen: watch one more"
"""What is said where a step's losses may hold some whose gradients were zeroed."""


def find_microbatches(step: Step, accumulation: int) -> list[tuple[Term, ...]] | None:
    """The loss of each microbatch, which is the sum of its backwards' losses; None where it cannot be told.

    What was zeroed may be among the losses of a step of which not all gradients could be seen.

    Args:
        step: an optimizer step.
        accumulation: microbatches that it is meant to have.
    """
    if not step.is_known:
        return None
    of_forwards = [origin.forward for origin in step.origins]
    if len(set(of_forwards)) <= max(accumulation, 1):
        return _joined(step, of_forwards)
    draws = [origin.draw for origin in step.origins]
    if len({None if draw is None else draw[0] for draw in draws}) > 1 or None in draws:
        return None  # nothing was drawn, or from several data sets, whose losses are added
    number, of_draws = 0, [0]
    for last, origin in zip(step.origins, step.origins[1:], strict=False):
        number += origin.forward != last.forward and origin.draw != last.draw
        of_draws.append(number)
    return _joined(step, of_draws)


def _joined(step: Step, numbers: list[int]) -> list[tuple[Term, ...]]:
    """The terms of the losses that have one number, together."""
    joined: dict[int, tuple[Term, ...]] = {}
    for number, loss in zip(numbers, step.losses, strict=True):
        joined[number] = joined.get(number, ()) + loss
    return list(joined.values())
