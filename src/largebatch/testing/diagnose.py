"""Why do the updates of one worker and of several part?

Each suspect is tried by itself. In the quiet runs nothing is clipped, batch norm uses its running statistics and
nothing is drawn: what still differs there is the loss's normalisation or the data. Then clipping, and then batch norm,
comes back alone: what differs only then is that suspect's. Runs on each part of the batch by itself say how the parts
were put together.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from largebatch.testing.compare import fit_ratio
from largebatch.testing.evidence import Evidence, Parts, along_weights, largest_gap
from largebatch.testing.fixes import cause
from largebatch.testing.optimizer_suspects import listed, optimizer_causes, update_causes
from largebatch.testing.report import Cause


def find_causes(seen: Evidence) -> list[Cause]:
    """Every cause for which there is evidence; one named "unknown" where there is none."""
    found = [*_apart(seen), *_data(seen), *_randomness(seen), *optimizer_causes(seen)]
    if not seen.agree("as it is"):
        found += _gradients(seen, explained=bool(found))
    elif not found:
        found += update_causes(seen)
    return found or [cause("unknown", _not_found(seen))]


def _apart(seen: Evidence) -> list[Cause]:
    if seen.worker_gap <= seen.tolerance:
        return []
    return [
        cause(
            "gradients not averaged",
            f"with {seen.layout}, the workers' own updates differ from each other by {seen.worker_gap:.2g} of their "
            f"size in step {seen.step}: they hold different models from there on.",
        )
    ]


def _data(seen: Evidence) -> list[Cause]:
    one, several = seen.variants.get("quiet", (seen.one, seen.several))
    found: list[Cause] = []
    for step in range(min(len(one.steps), len(several[0].steps))):
        expected = Counter(one.steps[step].rows)
        got: Counter[int] = Counter()
        for worker in several:
            got.update(worker.steps[step].rows)
        if not expected or not got or expected == got:
            continue
        shared = sum(
            count > 1 for count in Counter(row for worker in several for row in set(worker.steps[step].rows)).values()
        )
        found.append(
            cause(
                "data",
                f"with {seen.layout}, in step {step}, {sum((expected - got).values())} of the "
                f"{sum(expected.values())} rows that one worker's model saw are not seen by any worker, "
                f"{sum((got - expected).values())} are new or seen once more, and {shared} are seen by several workers "
                "(compared by a hash of each row of the model's first input).",
            )
        )
        break
    return found


def _randomness(seen: Evidence) -> list[Cause]:
    for name, words in (
        ("same draws", "one worker run twice with the same seeds"),
        ("other draws", "one worker run again with other random numbers in its steps"),
    ):
        again = seen.again.get(name)
        if again is None:
            continue
        gap = max(largest_gap(seen.one, again, step) for step in range(len(again.steps)))
        if gap > seen.tolerance:
            rest = ""
            if "quiet" in seen.variants:
                verb = "are equal" if seen.agree("quiet") else "still differ"
                rest = f" With dropout and draws held constant (and no clipping, batch norm fixed) gradients {verb}."
            return [cause("randomness", f"{words} differs from itself by {gap:.2g}.{rest}")]
    return []


def _gradients(seen: Evidence, explained: bool) -> list[Cause]:
    if (decay := along_weights(seen, "gradient")) is not None:
        return [cause("weight decay", decay)]
    quiet = seen.gradients("quiet")
    if quiet is None:
        return [] if explained else [cause("unknown", _not_found(seen))]
    one, several = quiet
    ratio, rest = fit_ratio(several, one)
    found: list[Cause] = []
    if rest <= seen.close:
        if abs(ratio - 1) > seen.close:
            found.append(_normalisation(seen, ratio))
        found += _clipping(seen, ratio)
        found += _batch_norm(seen)
    elif uneven := _uneven(seen, one, several):
        found.append(uneven)
    if found or explained:
        return found
    return [cause("unknown", _not_found(seen))]


def _normalisation(seen: Evidence, ratio: float) -> Cause:
    num, on_one = (len(parts[0]) if parts else 1 for parts in (seen.parts, seen.parts_on_one))
    names: list[tuple[float, str]] = []
    if seen.world_size > 1:
        names += [(seen.world_size, "the number of workers"), (1 / seen.world_size, "1 over the number of workers")]
    if num != on_one:
        names.append((num / on_one, f"a worker's microbatches, {num}, over those on one worker, {on_one}"))
    fitting = [name for value, name in names if abs(ratio - value) <= seen.close * value]
    called = f" ({'; or '.join(fitting)})" if fitting else ""
    return cause(
        "loss normalisation",
        f"with {seen.layout}, every gradient in step {seen.step} is {ratio:.6g} times that on one worker{called}, "
        "before any clipping.",
        codes=("LB405",) if any("microbatches" in name for name in fitting) else (),
    )


def _clipping(seen: Evidence, quiet_ratio: float) -> list[Cause]:
    found = seen.gradients("clipping")
    if found is None:
        return []
    one, several = found
    ratio, rest = fit_ratio(several, one)
    turned = rest > seen.close
    scaled = abs(quiet_ratio - 1) <= seen.close and abs(ratio - 1) > seen.close
    if not turned and not scaled:
        return []
    how = f"point elsewhere ({rest:.2g} of their size)" if turned else f"are {ratio:.6g} times those on one worker"
    return [
        cause(
            "clipping",
            f"gradients made 2^-20 as large, which no limit reaches, agree; as large as they are, those with "
            f"{seen.layout} {how}: their norm is {float(several.norm()):.6g} after clipping, and "
            f"{float(one.norm()):.6g} on one worker.",
        )
    ]


def _batch_norm(seen: Evidence) -> list[Cause]:
    found = seen.gradients("batch norm")
    if found is None:
        return []
    one, several = found
    rest = fit_ratio(several, one)[1]
    if rest <= seen.close:
        return []
    local = _put_together(seen, "batch norm", seen.parts, by_size=True)
    start = (
        f"with batch norm on its running statistics, gradients agree; with statistics of the batch, those with "
        f"{seen.layout} differ by {rest:.2g} of their size."
    )
    sizes = sorted({stop - begin for worker in seen.parts for begin, stop in worker})
    before = sorted({stop - begin for worker in seen.parts_on_one for begin, stop in worker})
    if local is None:
        return [cause("batch norm", start)]
    if fit_ratio(several, local)[1] <= seen.close:
        return [
            cause(
                "batch norm",
                f"{start} They are the mean of gradients normalised over n = {listed(sizes)} examples each, against "
                f"n = {listed(before)} on one worker.",
            )
        ]
    return [
        cause(
            "batch norm",
            f"{start} They are not what normalising each worker's n = {listed(sizes)} examples by themselves gives: "
            "statistics are taken over several workers or microbatches.",
            codes=("LB202",),
        )
    ]


def _put_together(seen: Evidence, variant: str, parts: Parts, by_size: bool) -> Tensor | None:
    """The gradient from those of each part alone: weighed by size, or an average of averages."""
    if not parts or any((variant, part) not in seen.alone for worker in parts for part in worker):
        return None
    total = sum(stop - start for worker in parts for start, stop in worker)
    return torch.stack(
        [
            seen.alone[variant, part] * ((part[1] - part[0]) / total if by_size else 1 / (len(parts) * len(worker)))
            for worker in parts
            for part in worker
        ]
    ).sum(0)


def _uneven(seen: Evidence, one: Tensor, several: Tensor) -> Cause | None:
    averages = _put_together(seen, "quiet", seen.parts, by_size=False)
    on_one = _put_together(seen, "quiet", seen.parts_on_one, by_size=False)
    if averages is None or on_one is None:
        return None
    if fit_ratio(several, averages)[1] > seen.close or fit_ratio(one, on_one)[1] > seen.close:
        return None
    sizes = [[stop - start for start, stop in worker] for worker in seen.parts]
    workers_differ = len({sum(worker) for worker in sizes}) > 1
    words = "+".join(str(sum(worker)) for worker in sizes) if workers_differ else str(sizes[0])
    return cause(
        "loss over uneven parts",
        f"with {seen.layout}, the gradient in step {seen.step} is the plain average of the parts' averages ({words} "
        "examples), each part run by itself: an example of a small part counts more.",
        codes=("LB404",) if workers_differ else ("LB403",),
    )


def _not_found(seen: Evidence) -> str:
    quiet = seen.gradients("quiet")
    where = "gradients agree and the updates do not" if seen.agree("as it is") else "gradients differ"
    tried = ""
    if quiet is not None:
        ratio, rest = fit_ratio(quiet[1], quiet[0])
        tried = (
            f" Without clipping, with batch norm fixed and nothing drawn, they are {ratio:.6g} times those on one "
            f"worker, and {rest:.2g} of their size is left over."
        )
    return f"with {seen.layout}, in step {seen.step}, {where}, and no suspect alone explains it.{tried}"
