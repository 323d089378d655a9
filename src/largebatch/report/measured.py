"""How was it measured? The study's protocol, definitions and baseline, as facts that read as sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from largebatch.records.schema import Interval, StudyResult
from largebatch.report.words import Part, counted, say

Parts = tuple[Part, ...]
Facts = list[tuple[str, Parts]]

# What a number of the protocol means: the fact's name, and a sentence around the value.
_SENTENCES = {
    "goal_fractions": ("Where the goals lie", "The losses of the baseline run after these fractions of its steps: {}"),
    "num_microbatches": ("Microbatches", "At most {} a step while the noise scale is measured"),
    "lr_factor": ("Learning-rate search", "Steps by a factor of {}"),
    "num_seeds": ("Seeds of the front", "{} fresh ones at each chosen learning rate, at first"),
    "max_seeds": ("Seeds at most", "{}, added while an interval is wide"),
    "wide_ratio": ("Wide", "An interval whose high end is more than {} times its low end"),
    "batches_below": ("Batches below", "{} doublings below the predicted critical batch"),
    "batches_above": ("Batches above", "{} doublings above the predicted critical batch"),
    "max_batches": ("Batches at most", "{}, those added later included"),
    "step_allowance": ("When a run is stopped", "After {} times the steps that perfect scaling would need"),
    "extra_units": ("Allowed extra {unit}", "A fraction of {} over the baseline's, for the recommended batch"),
    "num_large_seeds": ("Seeds of a full run", "{} at every batch and rule"),
    "large_factor": ("Large batch", "Full training is tried at {} times the baseline batch"),
    "elbow_factor": ("Past the elbow", "The search for a batch that fails begins at {} times the baseline batch"),
    "fail_points": ("Visible failure", "{} points of error above the baseline, or a seed that diverges"),
    "match_points": ("Matches", "The interval of the extra error stays below {} points"),
}
_DEFINED = {"goal": "A goal", "steps": "Steps to a goal", "error": "Error"}
_WORDS = {"lr": "learning rate", "num": "number of", "b simple": "B_simple", "b crit": "B_crit", "eps max": "eps_max"}


def measured_facts(study: StudyResult) -> Facts:
    """What was measured and by which rules; a rule this page does not know is shown under its own key.

    Args:
        study: The study's typed result.
    Returns:
        (name, words) in the page's order.
    """
    protocol = dict(study.protocol)
    given = protocol.pop("definitions", {})
    definitions = {str(key): str(value) for key, value in given.items()} if isinstance(given, Mapping) else {}
    if not isinstance(given, Mapping):
        protocol["definitions"] = given
    simple = "The batch at which the noise in the gradient is as strong as the gradient. It costs one run. "
    crit = f"The batch that needs twice the fewest steps and twice the fewest {study.unit}. It costs a run for every "
    crit += "batch, learning rate and seed. "
    here = sentence(definitions.pop("b_simple", "tr(Sigma)/|G|^2, ratio of the mean moments (McCandlish 2018, 2.9)"))
    fitted = sentence(definitions.pop("b_crit", study.fronts[-1].definition))
    facts: Facts = [
        ("B_simple", (Part(simple + here),)),
        ("B_crit", (Part(crit + fitted),)),
        *((_DEFINED.get(key, key_words(key)), (Part(sentence(text)),)) for key, text in definitions.items()),
        (
            "Intervals",
            (Part("95 %. What is not resolved is said with its reason; “at least” and “at most” are bounds."),),
        ),
        ("Goal losses", (*said_value(study.goals), Part(", hardest last."))),
        ("Tuned learning rate", (*said_value(study.tuned_lr), Part(", constant, the fastest at the baseline batch."))),
        ("Study seed", (Part(str(study.seed)),)),
    ]
    return facts + [_rule(key, value, study.unit) for key, value in protocol.items()]


def baseline_facts(study: StudyResult) -> Facts:
    """The baseline's recipe; what it says twice (batch and reference_batch) is shown once."""
    twice = {f"reference_{key}" for key in study.reference}
    first = {key: study.reference[key] for key in ("batch", "lr") if key in study.reference}
    return [
        (re.sub(r"^Units\b", study.unit.capitalize(), key_words(key)), said_value(value))
        for key, value in (first | study.reference).items()
        if key not in twice or value != study.reference[key.removeprefix("reference_")]
    ]


def sentence(text: str) -> str:
    """Set a phrase as a sentence: a capital first, unless it is a formula, and one stop at the end.

    >>> sentence("training loss, first crossing"), sentence("tr(Sigma) / |G|^2")
    ('Training loss, first crossing.', 'tr(Σ) / |G|².')
    """
    text = text.strip().rstrip(".").replace("Sigma", "Σ").replace("|^2", "|²")
    first = text.split(" ")[0]
    return (text if re.search(r"[^\w:,-]", first) else text[:1].upper() + text[1:]) + "." if text else ""


def said_value(value: Any) -> Parts:
    """Say any JSON value of the protocol in words, numbers with their exact value behind."""
    if isinstance(value, bool) or value is None:
        return (Part({True: "yes", False: "no", None: "none"}[value]),)
    if isinstance(value, int | float):
        return (counted(value),)
    if isinstance(value, Mapping):
        if set(value) == {"value", "low", "high"}:
            said = say(Interval(value=value["value"], low=value["low"], high=value["high"]))
            return (*said.headline, Part(" ("), *said.detail, Part(")"))
        pairs = [(Part(f"{key_words(key)}: "), *said_value(item)) for key, item in value.items()]
        return _joined(pairs, "; ")
    if isinstance(value, list | tuple):
        return _joined([said_value(item) for item in value], ", ") if value else (Part("none"),)
    return (Part(str(value)),)


def key_words(key: str) -> str:
    """A key as words.

    >>> key_words("num_steps"), key_words("peak_lr"), key_words("b_simple")
    ('Number of steps', 'Peak learning rate', 'B_simple')
    """
    text = str(key).replace("_", " ")
    for short, long in _WORDS.items():
        text = re.sub(rf"\b{short}\b", long, text)
    return text[:1].upper() + text[1:]


def _rule(key: str, value: Any, unit: str) -> tuple[str, Parts]:
    if key not in _SENTENCES or isinstance(value, str | Mapping):
        said = said_value(value)
        return key_words(key), (*said, Part(".")) if isinstance(value, str) and not value.endswith(".") else said
    name, words = _SENTENCES[key]
    before, after = words.split("{}")
    parts = (Part(before), *said_value(value), Part(f"{after}."))
    return name.format(unit=unit), tuple(part for part in parts if part.text)


def _joined(groups: list[Parts], between: str) -> Parts:
    parts: list[Part] = []
    for index, group in enumerate(groups):
        parts += [Part(between), *group] if index else group
    return tuple(parts)
