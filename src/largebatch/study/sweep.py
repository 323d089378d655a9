"""How many steps does each batch size need, at the learning rate that suits it?

The planner works in rounds: what a round runs depends on the rounds before it only, never on which cell ended
first, so `--jobs 1` and `--jobs 2` give the same result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from largebatch.records.schema import FrontierPoint, RunRecord
from largebatch.study.choose import Outcome, best_lr, next_lrs, stop_bound
from largebatch.study.context import Context


@dataclass
class Search:
    """The learning-rate search at one batch size; one run serves every goal."""

    batch: int
    start_lr: float
    records: dict[float, RunRecord] = field(default_factory=dict[float, RunRecord])

    def tried(self, goal: int) -> dict[float, Outcome]:
        """Outcomes for the goal of this index, by learning rate."""
        return {lr: outcome_of(record, goal) for lr, record in self.records.items()}

    def best_steps(self, goal: int) -> float | None:
        """Fewest steps so far."""
        steps = [outcome.steps for outcome in self.tried(goal).values() if outcome.steps is not None]
        return min(steps, default=None)

    def next_lrs(self, num_goals: int, factor: float) -> list[float]:
        """Learning rates that any goal's search wants next."""
        wanted = {lr for goal in range(num_goals) for lr in next_lrs(self.tried(goal), self.start_lr, factor)}
        return sorted(lr for lr in wanted if not any(math.isclose(lr, known, rel_tol=1e-9) for known in self.records))


def outcome_of(record: RunRecord, goal: int) -> Outcome:
    """What one run says about one goal."""
    steps = record.crossings[goal]
    return Outcome(
        steps=steps, bound=math.inf if record.status == "diverged" and steps is None else float(record.steps)
    )


def search_lrs(context: Context, starts: Mapping[int, float], allowance: Mapping[int, int]) -> dict[int, Search]:
    """Search the learning rate at every batch at once, in rounds.

    Args:
        starts: predicted learning rate per batch.
        allowance: most steps a run may take, per batch.
    """
    searches = {batch: Search(batch, start) for batch, start in starts.items()}
    goals = range(len(context.goals))
    while True:
        specs = [
            context.spec(
                "search", search.batch, lr, 0, goals=context.goals, max_steps=allowance[search.batch],
                stop_after=tuple(
                    min(stop_bound([search.best_steps(goal)]), float(allowance[search.batch])) for goal in goals
                ),
            )
            for search in searches.values()
            for lr in search.next_lrs(len(context.goals), context.protocol.lr_factor)
        ]  # fmt: skip
        if not specs:
            return searches
        for spec, record in zip(specs, context.run(specs), strict=True):
            searches[spec.batch].records[spec.lr] = record


def confirm(
    context: Context, searches: Mapping[int, Search], allowance: Mapping[int, int], num_seeds: int
) -> list[list[FrontierPoint]]:
    """Train fresh seeds at every batch's chosen learning rate; one list of points per goal.

    Goals may choose different learning rates; seeds that share a rate serve every goal that chose it. A batch at
    which no run of the search reached a goal enters that goal's front as bounds.
    """
    goals, protocol = context.goals, context.protocol
    chosen = {
        (batch, goal): best_lr(search.tried(goal), protocol.lr_factor)
        for batch, search in searches.items()
        for goal in range(len(goals))
    }
    groups: dict[tuple[int, float], list[int]] = {}
    for (batch, goal), lr in chosen.items():
        if lr is not None:
            groups.setdefault((batch, lr), []).append(goal)
    specs = []
    for (batch, lr), members in groups.items():
        limits = [
            min(protocol.step_allowance * (searches[batch].best_steps(goal) or math.inf), allowance[batch])
            for goal in members
        ]
        specs += [
            context.spec(
                "seed", batch, lr, number, goals=tuple(goals[goal] for goal in members),
                max_steps=math.ceil(max(limits)), stop_after=tuple(limits),
            )
            for number in range(1, num_seeds + 1)
        ]  # fmt: skip
    records = context.run(specs)
    return [
        [_point(search, goal, goals[goal], chosen[batch, goal], records) for batch, search in searches.items()]
        for goal in range(len(goals))
    ]


def _point(search: Search, goal: int, loss: float, lr: float | None, records: Sequence[RunRecord]) -> FrontierPoint:
    tried = search.tried(goal)
    history = tuple((rate, tried[rate].steps, float(search.records[rate].steps)) for rate in sorted(tried))
    if lr is None:
        bounds = [float(search.records[rate].steps) for rate, outcome in tried.items() if math.isfinite(outcome.bound)]
        return FrontierPoint(
            batch=search.batch, lr=search.start_lr, steps=(), bounds=(max(bounds),) if bounds else (), search=history
        )
    mine = [
        record for record in records
        if record.spec.batch == search.batch and record.spec.lr == lr and loss in record.spec.goals
    ]  # fmt: skip
    crossings = [record.crossings[record.spec.goals.index(loss)] for record in mine]
    # A seed that diverged would not have got there by its limit either: its early end is no lucky escape.
    limits = [
        record.spec.stop_after[record.spec.goals.index(loss)] if record.status == "diverged" else float(record.steps)
        for record in mine
    ]
    bounds = tuple(limit for limit, steps in zip(limits, crossings, strict=True) if steps is None)
    return FrontierPoint(
        batch=search.batch, lr=lr, steps=tuple(steps for steps in crossings if steps is not None), bounds=bounds,
        search=history,
    )  # fmt: skip
