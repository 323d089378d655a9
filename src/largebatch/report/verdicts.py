"""What do the verdicts of the full runs allow to be said, and no more?"""

from __future__ import annotations

from itertools import groupby

from largebatch.records.schema import LargeRun, StudyResult
from largebatch.report.words import Part, finite, listed, number

RULE_NAMES = {"baseline": "baseline", "linear": "linear rule", "noise": "predicted eps(B)"}
UNRESOLVED = "is unresolved (shown neither to match nor to be worse)"


def rule_name(run: LargeRun) -> str:
    """The rule in the page's words."""
    return RULE_NAMES.get(run.rule, run.rule)


def recommended_run(study: StudyResult) -> LargeRun | None:
    """The full run whose recipe is the recommended one: same batch, nearest learning rate."""
    chosen = study.recommendation
    runs = [run for run in study.large if run.batch == chosen.batch and run.recipe]
    return min(runs, key=lambda run: abs(run.lr - chosen.lr), default=None)


def by_batch(study: StudyResult) -> dict[int, list[LargeRun]]:
    """The large-batch runs at each batch, smallest batch first."""
    runs = sorted((run for run in study.large if run.role != "baseline"), key=lambda run: run.batch)
    return {batch: list(group) for batch, group in groupby(runs, key=lambda run: run.batch)}


def verdict_words(run: LargeRun) -> str:
    """One run's verdict as a verb."""
    lost = sum(finite(error) is None for error in run.errors)
    diverges = "diverges" if lost == len(run.errors) else f"diverges in {lost} of {len(run.errors)} seeds"
    words = {"matches": "keeps the baseline's error", "worse": "ends worse", "diverged": diverges}
    return words.get(run.verdict, UNRESOLVED)


def batch_words(runs: list[LargeRun]) -> str:
    """What the rules tried at one batch came to: "the linear rule diverges and predicted eps(B) ends worse"."""
    verdicts = list(dict.fromkeys(verdict_words(run) for run in runs))
    if len(verdicts) == 1 and len(runs) > 1:
        return f"every rule tried {verdicts[0]}"
    return listed([f"{_the(run)} {verdict_words(run)}" for run in runs])


def kept_caption(study: StudyResult) -> tuple[Part, ...]:
    """Which batches are shown to keep the baseline's error, and what is known of every other one."""
    runs = by_batch(study)
    matching = [batch for batch, group in runs.items() if any(run.verdict == "matches" for run in group)]
    if not matching:
        start = "No batch above the baseline's is shown to keep its error."
    else:
        best = [_the(run) for run in runs[matching[-1]] if run.verdict == "matches"]
        start = f"The largest batch shown to keep the baseline's error is {number(matching[-1])}, with {listed(best)}."
    rest = [(batch, batch_words(group)) for batch, group in runs.items() if batch not in matching]
    sentences: list[str] = []
    for words, group in groupby(rest, key=lambda one: one[1]):
        batches = [number(batch) for batch, _ in group]
        sentences.append(f"At batch {listed(batches)} {words.replace(UNRESOLVED, _once(sentences))}.")
    return (Part(" ".join([start, *sentences])),)


def first_failure(study: StudyResult) -> tuple[int, list[LargeRun]] | None:
    """The smallest batch where some run ends worse or diverges and none keeps the error."""
    for batch, runs in by_batch(study).items():
        verdicts = {run.verdict for run in runs}
        if "matches" not in verdicts and verdicts & {"worse", "diverged"}:
            return batch, runs
    return None


def _the(run: LargeRun) -> str:
    return f"the {rule_name(run)}" if run.rule == "linear" else rule_name(run)


def _once(said: list[str]) -> str:
    """The long form the first time, the short one later."""
    return "is unresolved" if any(UNRESOLVED in sentence for sentence in said) else UNRESOLVED
