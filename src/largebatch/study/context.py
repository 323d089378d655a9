"""What does every phase of a study share?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from largebatch.records.schema import RunRecord, RunSpec
from largebatch.study.launch import Launcher
from largebatch.study.plan import Protocol, derive_seed
from largebatch.tasks.task import Task
from largebatch.train.loop import StepCallback


def _silent(_name: str, _detail: str) -> None:
    pass


@dataclass(kw_only=True)
class Context:
    """One study under way: the task, the rules, the launcher, and who is told about it."""

    task: Task
    out: Path
    seed: int
    protocol: Protocol
    launcher: Launcher
    goals: tuple[float, ...] = ()
    units_allowed: float | None = None
    """Training units the study may spend; None is no limit."""
    on_phase: Callable[[str, str], None] = _silent
    """Called with (phase, one sentence about it) as each phase begins."""
    on_step: StepCallback | None = None
    """Called after every step of the measured run."""
    measured_steps: int = 0
    """Steps the measured run is expected to take."""
    warnings: list[str] = field(default_factory=list[str])

    @property
    def num_units(self) -> int:
        """Training units."""
        return len(self.task.train)

    def spec(self, role: str, batch: int, lr: float, number: int, **fields: object) -> RunSpec:
        """A cell of this study; `number` tells its repeats apart and gives each a seed of its own."""
        seed = derive_seed(self.seed, role, batch, f"{lr:.6g}", number)
        return RunSpec(task=self.task.name, role=role, batch=batch, lr=lr, seed=seed, **fields)  # type: ignore[arg-type]

    def run(self, specs: list[RunSpec], on_step: StepCallback | None = None) -> list[RunRecord]:
        """Run one round of cells; finished ones are read back."""
        return self.launcher.run(specs, on_step)

    def warn(self, sentence: str) -> None:
        """Put a sentence among the result's warnings, once."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def spent_units(self) -> int:
        """Units of all finished cells."""
        return sum(record.units for record in self.launcher.finished.values())
