"""What is wrong in the order of the examples that were drawn?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from largebatch.audit.findings import Finding
from largebatch.audit.watch_draws import Pass

_FEWEST = 8
"""Draws that two epochs must share in order before that is no accident."""


def find_in_order(passes: Sequence[Pass]) -> list[Finding]:
    """LB301: two epochs of one sampler in the same order."""
    for source in {one.source for one in passes}:
        for first, second in pairwise([one for one in passes if one.source == source]):
            num = min(len(first.drawn), len(second.drawn))
            head = list(first.drawn[:num])
            if first.epoch is None or first.epoch != second.epoch or not first.shuffles or num < _FEWEST:
                continue
            if head == list(second.drawn[:num]) and head != sorted(head):
                order = ", ".join(map(str, head[:4]))
                seen = f"Two epochs drew {num} examples in the same order ({order}, ...), at epoch={first.epoch} both."
                return [Finding(code="LB301", seen=seen)]
    return []


def find_between_orders(passes_of_workers: Sequence[Sequence[Pass]]) -> list[Finding]:
    """LB302 and LB303: examples that several workers drew in one epoch."""
    found: dict[str, Finding] = {}
    for passes in zip(*passes_of_workers, strict=False):
        finding = _repeats(passes)
        if finding is not None:
            found.setdefault(finding.code, finding)
    return list(found.values())


def _repeats(passes: Sequence[Pass]) -> Finding | None:
    """What examples that were drawn more than once in one epoch are a sign of."""
    if len({one.data for one in passes}) > 1 or len({one.source for one in passes}) > 1:
        return None  # every worker has data of its own
    drawn = [np.asarray(one.drawn, dtype=np.int64) for one in passes]
    if any(len(np.unique(own)) < len(own) for own in drawn):
        return None  # drawn with replacement, or repeated on purpose
    together = np.concatenate(drawn)
    num_unique = len(np.unique(together))
    num_repeated = len(together) - num_unique
    if not num_repeated:
        return None
    world_size, num_examples = len(passes), passes[0].num_examples
    whole = num_unique == num_examples
    most = world_size * passes[0].local_batch if whole else world_size
    padded = num_repeated < most and (whole or passes[0].pads)
    workers = f"{world_size} workers drew {len(together)} examples in an epoch"
    if padded:
        of = f" of {num_examples}" if num_examples is not None else ""
        return Finding(code="LB303", seen=f"{workers}{of}, {num_repeated} of them repeated to come out even.")
    return Finding(code="LB302", seen=f"{workers}, and only {num_unique} different ones.")
