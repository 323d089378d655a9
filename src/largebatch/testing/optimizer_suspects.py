"""What parts updates whose gradients agree: the optimizer's numbers, its schedule, its calls?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from largebatch.testing.compare import fit_ratio, flat
from largebatch.testing.evidence import Evidence, along_weights
from largebatch.testing.fixes import cause
from largebatch.testing.observe import StepRecord
from largebatch.testing.report import Cause


def optimizer_causes(seen: Evidence) -> list[Cause]:
    """What the optimizer was seen to be given: other numbers, or other calls."""
    found: list[Cause] = []
    ones, others = seen.one.steps, seen.several[0].steps
    counts = [one.optimizer_steps for one in ones], [other.optimizer_steps for other in others]
    if counts[0] != counts[1]:
        found.append(
            cause(
                "optimizer steps",
                f"optimizer.step() is called {listed(counts[1])} times in a step with {seen.layout}, "
                f"{listed(counts[0])} on one worker.",
            )
        )
        return found
    names = sorted({name for one in ones for group in one.settings for name in group})
    for name in names:
        one, other = _series(ones, name), _series(others, name)
        if all(_same(a, b) for a, b in zip(one, other, strict=True)):
            continue
        words = f"{name} is {listed(other)} in the steps with {seen.layout}, and {listed(one)} on one worker."
        if name == "lr" and _same(one[0], other[0]):
            found.append(_schedule(seen, one, other, words))
        elif name == "lr":
            found.append(cause("learning rate", words))
        else:
            found.append(cause("weight decay" if name == "weight_decay" else "optimizer settings", words))
    return found


def _schedule(seen: Evidence, one: list[object], other: list[object], words: str) -> Cause:
    for times in range(2, len(one)):
        pairs = [(index, times * index) for index in range(len(other)) if times * index < len(one)]
        if len(pairs) > 1 and all(_same(other[a], one[b]) for a, b in pairs):
            words += f" The schedule runs {times} times as fast."
            break
    return cause("schedule", words, codes=("LB402",) if seen.world_size > 1 else ("LB401",))


def _series(steps: Sequence[StepRecord], name: str) -> list[object]:
    values = [tuple(group.get(name) for group in step.settings) for step in steps]
    return [value[0] if len(set(value)) == 1 else value for value in values]


def _same(a: object, b: object) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b


def listed(values: Sequence[object]) -> str:
    """Numbers in words: one where all are the same."""
    if len(set(values)) == 1:
        return _number(values[0])
    return ", ".join(_number(value) for value in values)


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def update_causes(seen: Evidence) -> list[Cause]:
    """Gradients agree and the optimizer's numbers too, and still the updates part."""
    if (decay := along_weights(seen, "update")) is not None:
        return [cause("weight decay", decay)]
    one, several = flat(seen.one.steps[seen.step].updates), flat(seen.several[0].steps[seen.step].updates)
    ratio, rest = fit_ratio(several, one)
    if rest <= seen.close:
        words = f"every update is {ratio:.6g} times that on one worker"
        return [cause("learning rate", f"with {seen.layout}, in step {seen.step}, gradients agree and {words}.")]
    if seen.step > 0:
        words = f"gradients agree in step {seen.step} and so do all updates before it: the optimizer's memory differs"
        return [cause("optimizer settings", f"with {seen.layout}, {words}.")]
    return []
