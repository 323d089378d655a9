"""What are the few numbers to remember, and what follows from them?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from largebatch.records.schema import StudyResult
from largebatch.report.reading import typed_result
from largebatch.report.verdicts import batch_words, first_failure, recommended_run, verdict_words
from largebatch.report.words import Part, Said, counted, finite, number, percent, say, tidy

_SOURCES = {
    "front": "from the measured front",
    "noise": "from the noise scale alone",
    "baseline": "nothing larger is shown to pay",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyNumber:
    """One number of the summary."""

    label: str
    said: Said
    unit: str = ""
    note: str = ""
    """What it is measured on or compared with."""
    primary: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One thing to do next."""

    title: str
    text: tuple[Part, ...]
    code: str = ""


def summary_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Give the summary as rows of a table, for the terminal.

    Args:
        result: The parsed result.json.
    Returns:
        (what, value with its unit, interval or reason or comparison), in the page's order.
    Raises:
        RecordError: It is not a result of this schema.
    """
    rows = []
    for key in key_numbers(typed_result(result)):
        value = (
            f"{key.said.plain_headline} {key.unit}" if key.unit and has_number(key.said) else key.said.plain_headline
        )
        rows.append((key.label, value, "; ".join(tidy(part) for part in (key.said.plain_detail, key.note) if part)))
    return rows


def has_number(said: Said) -> bool:
    """Whether the headline shows a number that a unit can follow."""
    return any(part.value is not None for part in said.headline)


def key_numbers(result: StudyResult) -> tuple[KeyNumber, ...]:
    """The recommended batch, the two noise scales and their ratio, and what is gained and paid."""
    chosen, front, unit = result.recommendation, result.fronts[-1], result.unit
    baseline = result.reference.get("batch")
    against = f"predicted, against batch {number(baseline)}" if isinstance(baseline, int) else "predicted"
    hardest = f"goal: loss {number(front.goal)}, the hardest"
    saved = percent(1 - chosen.fewer_steps)
    ratio = say(front.b_simple_over_b_crit, resolved=front.resolved, reason=front.reason)
    return (
        KeyNumber(
            label="Recommended batch",
            said=Said((counted(chosen.batch),), (Part("learning rate "), counted(chosen.lr))),
            unit=unit,
            note=_SOURCES.get(chosen.source, chosen.source),
            primary=True,
        ),
        KeyNumber(
            label="Noise scale B_simple",
            said=say(result.b_simple),
            unit=unit,
            note=f"over the whole run at batch {number(baseline)}"
            if isinstance(baseline, int)
            else "over the whole run",
        ),
        KeyNumber(
            label="Critical batch B_crit",
            said=say(front.b_crit, resolved=front.resolved, reason=front.reason),
            unit=unit,
            note=hardest,
        ),
        KeyNumber(label="B_simple / B_crit", said=ratio, note="1 would mean that the noise alone tells the front"),
        KeyNumber(label="Steps saved", said=Said((Part(saved.text, finite(chosen.fewer_steps)),)), note=against),
        KeyNumber(
            label=f"Extra {unit}",
            said=Said((percent(chosen.extra_units, signed=True),)),
            note=against,
        ),
    )


def next_steps(result: StudyResult) -> tuple[Step, ...]:
    """Plain steps: use the batch, split it if it does not fit, spread it, and know when to measure again."""
    chosen = result.recommendation
    baseline = result.reference.get("batch")
    small = baseline if isinstance(baseline, int) else None
    steps = [_use(result, small)]
    if small is not None and chosen.batch > small:
        steps += [_accumulate(result, small), _spread(result)]
    if failure := first_failure(result):
        batch, runs = failure
        words = batch_words(runs)
        text = (
            Part("At batch "),
            counted(batch),
            Part(f" {words}, and no rule is shown to keep the baseline's error. "),
        )
        tail = Part("Before you go that far, compare one full run with your baseline.")
        steps.append(Step(title="Know where it may break", text=(*text, tail)))
    if unresolved := _unresolved(result):
        steps.append(unresolved)
    steps.append(_again(result, small))
    return tuple(steps)


def _use(result: StudyResult, small: int | None) -> Step:
    chosen, run = result.recommendation, recommended_run(result)
    text: tuple[Part, ...] = (
        Part("Set the batch to "),
        counted(chosen.batch),
        Part(f" {result.unit} in one optimizer step and the peak learning rate to "),
        counted(chosen.lr),
        Part(", with the recipe above. Keep the number of epochs: an epoch then has fewer steps, which is the gain."),
    )
    if small == chosen.batch:
        why = f"a larger one is predicted to cost more extra {result.unit} than the study allows."
        if chosen.source == "baseline":
            why = "nothing that was measured shows that a larger one pays."
        text = (
            Part("Stay at batch "),
            counted(chosen.batch),
            Part(" and learning rate "),
            counted(chosen.lr),
            Part(f": {why}"),
        )
    elif run is not None and run.verdict != "matches":
        text += (Part(f" In the full runs here this batch {verdict_words(run)}, so compare with your baseline first."),)
    if chosen.source == "noise":
        text += (Part(" This rests on the noise scale alone, so compare one full run with your baseline first."),)
    return Step(title="Use it" if small != chosen.batch else "Stay where you are", text=text)


def _accumulate(result: StudyResult, small: int) -> Step:
    chosen = result.recommendation.batch
    count, rest = divmod(chosen, small)
    split = f"{count:,} microbatches of {small:,}" if rest == 0 else f"microbatches of at most {small:,}"
    text = (
        Part("If "),
        counted(chosen),
        Part(f" {result.unit} do not fit in memory, accumulate gradients: {split}, then one optimizer step. "),
        Part("Divide each microbatch's summed loss by the whole batch, so that uneven microbatches count right."),
    )
    code = (
        f"# {split}\n"
        "for inputs, labels in microbatches:\n"
        f"    loss = loss_sum(model(inputs), labels) / {chosen}\n"
        "    loss.backward()\n"
        "optimizer.step()"
    )
    return Step(title="If it does not fit, accumulate", text=text, code=code)


def _spread(result: StudyResult) -> Step:
    chosen = result.recommendation.batch
    text = (
        Part("Over several workers the batch is the sum of their shares: give each "),
        Part(f"{chosen:,} / world_size {result.unit}, average the gradients, shuffle the whole data once an epoch "),
        Part("and deal it out in disjoint parts. Keep batch-norm statistics within a worker."),
    )
    return Step(title="Or spread it over workers", text=text)


def _unresolved(result: StudyResult) -> Step | None:
    parts: list[str] = []
    if not say(result.b_simple).resolved:
        parts.append("the noise scale B_simple")
    for front in result.fronts:
        if not front.resolved:
            why = tidy(front.reason).rstrip(". ")
            parts.append(f"B_crit at loss {number(front.goal)}" + (f" ({why})" if why else ""))
    if not parts:
        return None
    what = "; ".join(parts)
    text = f"Not resolved: {what}. A study cut short by --budget adds batch sizes and seeds under a larger one."
    return Step(title="What is still open", text=(Part(text),))


def _again(result: StudyResult, small: int | None) -> Step:
    text = (
        Part(
            "The noise scale belongs to this model, these data and this optimizer, "
            "and it often grows as the loss falls (McCandlish 2018). "
        ),
        Part("Measure again when one of them changes, or when you train on to a clearly lower loss. "),
        Part("In your own loop that is three lines (a step needs two microbatches or more):"),
    )
    unit = "" if result.unit == "examples" else f', unit="{result.unit}"'
    code = (
        f"monitor = lb.NoiseScaleMonitor(model, microbatch={max(1, (small or 2) // 2)}{unit})\n"
        "# after the last backward of a step:\n"
        "monitor.step()\n"
        "print(monitor.noise_scale)"
    )
    return Step(title="Measure again when things change", text=text, code=code)
