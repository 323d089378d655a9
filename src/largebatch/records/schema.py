"""What does a run put on disk, key by key?

These dataclasses are the schema (docs/records.md explains each key). They hold numbers and text only, so
that a report can be drawn without torch. Wall times live in other files (`timing.json`), so that two runs
with the same seed leave the same bytes here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

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
    """"constant", or "goyal": gradual warmup and step decay of the task's recipe."""
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
    spec: RunSpec
    status: str
    """"reached" (its last goal), "stopped" (could not win any more), "exhausted" (max_steps), "diverged"."""
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

    @staticmethod
    def from_json(document: dict[str, Any]) -> RunRecord:
        """Rebuild the record from its JSON form."""
        spec = dict(document["spec"])
        spec["goals"], spec["stop_after"] = tuple(spec["goals"]), tuple(spec["stop_after"])
        values = {**document, "spec": RunSpec(**spec)}
        values["crossings"], values["epochs"] = tuple(document["crossings"]), tuple(document["epochs"])
        return RunRecord(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A number with its 95 % interval; `low` or `high` None means unbounded on that side."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseWindow:
    """The noise scale over a stretch of steps of the measured run, from that window's mean moments."""

    first_step: int
    last_step: int
    loss: float
    """Mean training loss in the window."""
    trace_cov: float
    grad_sq_norm: float
    b_simple: Interval
    resolved: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GoalPrediction:
    """What one measured run predicts for one goal (McCandlish 2018, D.1)."""

    goal: float
    min_steps: Interval
    min_units: Interval
    b_crit: Interval
    b_simple: Interval
    """Ratio of the mean moments up to the crossing."""
    resolved: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontierPoint:
    """One batch size on the steps-examples front of one goal."""

    batch: int
    lr: float
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
    definition: str
    """Which of the several definitions of the critical batch size this is."""
    min_steps: Interval
    min_units: Interval
    b_crit: Interval
    resolved: bool
    reason: str
    points: tuple[FrontierPoint, ...]
    residual_std: float | None
    """Standard deviation of log S about the fit."""
    b_simple_over_b_crit: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedNumber:
    """One number of a recipe with the rule that gave it."""

    name: str
    value: float | int | str
    rule: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeRun:
    """Full training at one batch by one rule, over several seeds, beside the baseline."""

    batch: int
    rule: str
    """"baseline", "linear" (Goyal 2017) or "noise" (eps_max / (1 + B_simple / B))."""
    role: str
    """"baseline", "recommended", "large" or "past the elbow"."""
    lr: float
    errors: tuple[float | None, ...]
    """Per seed: the median of the last 5 epochs' held-out error, in percent; None where it diverged."""
    mean: float | None
    std: float | None
    difference: Interval
    """Error minus the baseline's, in points."""
    verdict: str
    """"matches", "worse", "unresolved" or "diverged"."""
    recipe: tuple[ResolvedNumber, ...]
    curves: tuple[tuple[dict[str, float], ...], ...]
    """Per seed: the per-epoch records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The batch that is worth it, and why."""

    batch: int
    lr: float
    source: str
    """"front" (the fitted hyperbola) or "noise" (the prediction alone)."""
    reason: str
    extra_units: float
    """Predicted extra units over the baseline batch, as a fraction (0.2 = 20 %)."""
    fewer_steps: float
    """Predicted steps as a fraction of the baseline's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """result.json: the whole answer of a study."""

    schema_version: int = SCHEMA_VERSION
    task: str
    unit: str
    seed: int
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
    b_simple: Interval
    """Over the whole measured run."""
    eps_max: float | None
    """Optimal learning rate without noise, from the tuned rate; None when the noise scale is not positive."""
    predictions: tuple[GoalPrediction, ...]
    fronts: tuple[GoalFront, ...]
    large: tuple[LargeRun, ...]
    winner: str
    """One sentence: which learning-rate rule did better at large batch."""
    recommendation: Recommendation
    warnings: tuple[str, ...] = ()
    summary: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON form, keys as documented in docs/records.md."""
        return asdict(self)
