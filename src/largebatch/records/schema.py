"""What does a run put on disk, key by key?

These dataclasses are the schema (docs/records.md explains each key). They hold numbers and text only, so
that a report can be drawn without torch. Wall times live in other files (`timing.json`), so that two runs
with the same seed leave the same bytes here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from largebatch.errors import RecordError

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """One training run, whole: the same spec gives the same numbers on the same machine."""

    task: str
    """The task's name."""
    role: str
    """Why it is run: "baseline", "measure", "search", "seed" or "large"."""
    batch: int
    """Units in one optimizer step."""
    microbatch: int | None = None
    """Units in one forward/backward; None means the whole batch."""
    lr: float
    """Peak learning rate."""
    schedule: str = "constant"
    """Either constant, or goyal: gradual warmup and step decay of the task's recipe."""
    seed: int
    """Seeds the weights, the shuffling and every other draw."""
    max_steps: int
    """The run ends here at the latest."""
    goals: tuple[float, ...] = ()
    """Losses on the goal examples, hardest last; each crossing is recorded and the last one ends the run."""
    stop_after: tuple[float, ...] = ()
    """One bound in steps per goal: past it this run can no longer be the fastest to that goal."""
    trace_loss: bool = False
    """Whether the loss on the goal examples is recorded although there is no goal."""
    monitor: bool = False
    """Whether the gradient noise scale is measured at every step."""
    evaluate_epochs: bool = False
    """Whether the held-out error is taken at every epoch's end."""

    @property
    def key(self) -> str:
        """A readable, unique folder name."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.role}-b{self.batch}-lr{self.lr:.4g}-s{self.seed}-{digest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What one run came to (`run.json`); it exists only once the run has ended."""

    schema_version: int = SCHEMA_VERSION
    """Version of this layout."""
    spec: RunSpec
    """The run, whole."""
    status: str
    """One of reached (its last goal), stopped (could not win any more), exhausted (max_steps), diverged."""
    steps: int
    """Optimizer steps taken."""
    units: int
    """Units seen."""
    crossings: tuple[float | None, ...] = ()
    """Per goal: the step, interpolated in log loss, at which it was first crossed; None if it was not."""
    epochs: tuple[dict[str, float], ...] = ()
    """Per epoch: {"epoch", "train_loss", "error" (fraction wrong, held-out), "held_out_loss"}."""
    goal_loss: float | None = None
    """The last loss on the goal examples."""
    num_step_lines: int = 0
    """Lines of steps.jsonl; fewer on disk mean that something else has cut the file."""
    num_evaluation_lines: int = 0
    """Lines of evaluations.jsonl."""

    @staticmethod
    def from_json(document: dict[str, Any]) -> RunRecord:
        """Rebuild the record from its JSON form."""
        try:
            values, spec = dict(document), dict(document["spec"])
            spec["goals"], spec["stop_after"] = tuple(spec["goals"]), tuple(spec["stop_after"])
            values["spec"] = RunSpec(**spec)
            values["crossings"], values["epochs"] = tuple(values["crossings"]), tuple(values["epochs"])
            return RunRecord(**values)
        except (KeyError, TypeError) as error:
            raise RecordError(
                f"a run.json is no run's record ({error}). Delete its folder to have it trained again."
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A number with its 95 % interval; `low` or `high` None means unbounded on that side."""

    value: float | None
    """The estimate; None where there is none."""
    low: float | None = None
    """Lower end."""
    high: float | None = None
    """Upper end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseWindow:
    """The noise scale over a stretch of steps of the measured run, from that window's mean moments."""

    first_step: int
    """First step, counted from 0."""
    last_step: int
    """Last step, inclusive."""
    loss: float
    """Mean training loss in the window."""
    trace_cov: float
    """Mean tr(Sigma), per unit."""
    grad_sq_norm: float
    """Mean |G|^2."""
    b_simple: Interval
    """tr(Sigma) / |G|^2 in units, with Fieller's interval."""
    resolved: bool
    """Whether |G|^2 is told from 0 in this window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoalPrediction:
    """What one measured run predicts for one goal (McCandlish 2018, D.1)."""

    goal: float
    """Loss on the goal examples."""
    min_steps: Interval
    """S_min, optimizer steps."""
    min_units: Interval
    """E_min, units."""
    b_crit: Interval
    """E_min / S_min, units."""
    b_simple: Interval
    """Ratio of the mean moments up to the crossing."""
    resolved: bool
    """Whether all of these have an estimate and an interval."""
    reason: str
    """Why not; empty if so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontierPoint:
    """One batch size on the steps-examples front of one goal."""

    batch: int
    """Units in one optimizer step."""
    lr: float
    """The chosen constant learning rate."""
    steps: tuple[float, ...]
    """Steps to the goal of each fresh seed that reached it."""
    bounds: tuple[float, ...] = ()
    """Steps at which the censored seeds were stopped without having reached it."""
    search: tuple[tuple[float, float | None, float], ...] = ()
    """The learning-rate search: (lr, steps to the goal or None, steps taken)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoalFront:
    """The fitted steps-examples front of one goal: S = S_min + E_min / B."""

    goal: float
    """Loss on the goal examples."""
    definition: str
    """Which of the several definitions of the critical batch size this is."""
    min_steps: Interval
    """S_min, optimizer steps."""
    min_units: Interval
    """E_min, units."""
    b_crit: Interval
    """E_min / S_min, units."""
    resolved: bool
    """Whether the batches lie on both sides of B_crit, so that it has an estimate and an interval."""
    reason: str
    """Why not; empty if so."""
    points: tuple[FrontierPoint, ...]
    """One per batch size."""
    residual_std: float | None
    """Standard deviation of log S about the fit."""
    b_simple_over_b_crit: Interval
    """Noise scale up to this goal over the fitted critical batch size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedNumber:
    """One number of a recipe with the rule that gave it."""

    name: str
    """What it is."""
    value: float | int | str
    """Its value."""
    rule: str
    """How it came about."""
    source: str
    """Who found the rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeRun:
    """Full training at one batch by one rule, over several seeds, beside the baseline."""

    batch: int
    """Units in one optimizer step."""
    rule: str
    """One of baseline, linear (Goyal 2017), noise (eps_max / (1 + B_simple / B))."""
    role: str
    """One of baseline, recommended, large, past the elbow."""
    lr: float
    """Peak learning rate, from the rule."""
    errors: tuple[float | None, ...]
    """Per seed: the median of the last 5 epochs' held-out error, in percent; None where it diverged."""
    mean: float | None
    """Mean of `errors`; None where a seed diverged."""
    std: float | None
    """Their sample standard deviation."""
    difference: Interval
    """Error minus the baseline's, in points."""
    verdict: str
    """One of baseline, matches, worse, unresolved, diverged."""
    recipe: tuple[ResolvedNumber, ...]
    """Every number of the run with its rule and source."""
    curves: tuple[tuple[dict[str, float], ...], ...]
    """Per seed: the per-epoch records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The batch that is worth it, and why."""

    batch: int
    """The batch that is worth it."""
    lr: float
    """Peak learning rate at it by the linear rule, within the task's schedule."""
    source: str
    """One of front (the fitted hyperbola), noise (the prediction alone), baseline (neither was resolved)."""
    reason: str
    """One sentence."""
    extra_units: float
    """Predicted extra units over the baseline batch, as a fraction (0.2 = 20 %)."""
    fewer_steps: float
    """Predicted steps as a fraction of the baseline's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """result.json: the whole answer of a study."""

    schema_version: int = SCHEMA_VERSION
    """Version of this layout."""
    task: str
    """The task's name."""
    unit: str
    """What every batch and noise scale counts."""
    seed: int
    """Every draw follows from it."""
    num_units: int
    """Training units."""
    reference: dict[str, Any]
    """The baseline recipe: batch, lr, epochs, momentum, ..."""
    tuned_lr: float
    """The constant learning rate that was fastest to the hardest goal at the reference batch."""
    goals: tuple[float, ...]
    """Losses on the goal examples, hardest last."""
    protocol: dict[str, Any]
    """How goals, learning rates, seeds, bounds and intervals were chosen."""
    windows: tuple[NoiseWindow, ...]
    """The noise scale along the measured run."""
    b_simple: Interval
    """Over the whole measured run."""
    b_simple_resolved: bool
    """Whether that noise scale is resolved."""
    b_simple_reason: str
    """Why not; empty if so."""
    num_measured_runs: int
    """Measured runs that were averaged: 1, or more where one left the noise scale unresolved or wide."""
    eps_max: float | None
    """Optimal learning rate without noise, from the tuned rate; None when the noise scale is not resolved."""
    predictions: tuple[GoalPrediction, ...]
    """Per goal, from the measured run alone."""
    fronts: tuple[GoalFront, ...]
    """Per goal, fitted to the verified runs."""
    large: tuple[LargeRun, ...]
    """Full training runs."""
    winner: str
    """One sentence: which learning-rate rule did better at large batch."""
    recommendation: Recommendation
    """What to do."""
    warnings: tuple[str, ...] = ()
    """What was left out or limited."""
    summary: str = ""
    """The answer in a paragraph, the advice first."""

    def to_json(self) -> dict[str, Any]:
        """The JSON form, keys as documented in docs/records.md."""
        return asdict(self)
