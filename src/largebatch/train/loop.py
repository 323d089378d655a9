"""How is a task trained? The one loop: microbatches, backward, measure, step, record.

Every run is a pure function of (task, spec): killed and resumed from any checkpoint it ends in the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from largebatch.errors import CheckpointError, ConfigError, RecordError
from largebatch.noise.moments import StepMoments
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.recipe.loss import normalise
from largebatch.recipe.optimizer import build_optimizer
from largebatch.recipe.sampler import ShuffledStream, draws
from largebatch.records.files import JsonLines, read_json, write_json
from largebatch.records.schema import RunRecord, RunSpec
from largebatch.tasks.task import Task
from largebatch.train.checkpoint import delete_checkpoints, load_checkpoint, save_checkpoint
from largebatch.train.evaluate import crossing, goal_batches, held_out, mean_loss, to_device

EVALUATION_RATIO = 1.02
"""Goals are evaluated at least every 2 % of the steps taken so far (and at every step before the 50th)."""


@dataclass(kw_only=True)
class Progress:
    """Where a run stands; all of it goes into the checkpoint."""

    step: int = 0
    units: int = 0
    next_evaluation: int = 0
    last_evaluation: tuple[int, float] | None = None
    crossings: list[float | None] = field(default_factory=list[float | None])
    epochs: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    epoch_loss: float = 0.0
    epoch_units: int = 0


StepCallback = Callable[[Progress, float, NoiseScaleMonitor | None], None]
"""Called after every step with the progress, the step's mean loss and the monitor."""


class Run:
    """One training run of one spec in one folder.

    Args:
        task: what is trained.
        spec: how; the run is a pure function of both.
        folder: holds `steps.jsonl`, `evaluations.jsonl`, the checkpoint and, at the end, `run.json`.
        device: where the model lives.
        checkpoint_seconds: wall time between checkpoints; it changes no number of the run.
        on_step: see StepCallback.
        keep_model: write the final weights to `model.pt`.
    """

    def __init__(
        self,
        task: Task,
        spec: RunSpec,
        folder: Path,
        *,
        device: str = "cpu",
        checkpoint_seconds: float = 20.0,
        on_step: StepCallback | None = None,
        keep_model: bool = False,
    ) -> None:
        if spec.batch > len(task.train):
            raise ConfigError(
                f"batch {spec.batch} is larger than the training data of task {task.name!r} "
                f"({len(task.train)} {task.unit}). Use a batch of at most {len(task.train)}."
            )
        self.task, self.spec, self.folder = task, spec, folder
        self.device = torch.device(device)
        self.on_step, self.keep_model = on_step, keep_model
        self.checkpoint_seconds = checkpoint_seconds
        self.checkpoint_path = folder / "checkpoint.pt"
        self.progress = Progress(crossings=[None] * len(spec.goals))
        self.stream = ShuffledStream(len(task.train), spec.seed)
        self._resolved = resolved = task.recipe.resolve(spec.batch, len(task.train), lr=spec.lr, rule="given")
        self._num_lines = {"steps": 0, "evaluations": 0}
        self.schedule: Callable[[int], float] = (
            resolved.schedule.lr_at if spec.schedule == "goyal" else lambda _: spec.lr
        )

    def run(self) -> RunRecord:
        """Train to the end, or return what an earlier call finished. Raises LargebatchError."""
        done = self.folder / "run.json"
        if done.exists():
            record = RunRecord.from_json(read_json(done))
            if record.spec != self.spec:
                raise RecordError(f"{done} belongs to another run ({record.spec.key}). Choose another --out.")
            return record
        self._started = time.perf_counter()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            status, goal_loss = self._train()
        progress = self.progress
        record = RunRecord(
            spec=self.spec, status=status, steps=progress.step, units=progress.units,
            crossings=tuple(progress.crossings), epochs=tuple(progress.epochs), goal_loss=goal_loss,
            num_step_lines=self._num_lines["steps"], num_evaluation_lines=self._num_lines["evaluations"],
        )  # fmt: skip
        write_json(self.folder / "timing.json", {"seconds": self._elapsed(), "steps": progress.step})
        write_json(done, asdict(record))
        delete_checkpoints(self.checkpoint_path)
        return record

    def _elapsed(self) -> float:
        """Wall seconds of this run, the sessions before a resume included."""
        return time.perf_counter() - self._started

    def _train(self) -> tuple[str, float | None]:
        task, spec, progress = self.task, self.spec, self.progress
        torch.manual_seed(spec.seed)
        model = task.model().to(self.device)
        model.train()
        optimizer = build_optimizer(model, self._resolved)
        microbatch = spec.microbatch or min(spec.batch, task.max_microbatch)
        monitor = None
        if spec.monitor:
            monitor = NoiseScaleMonitor(
                model, microbatch=microbatch, unit=task.unit, every=1, dataset_size=len(task.train)
            )
        state = load_checkpoint(self.checkpoint_path, str(self.device))
        if state is not None:
            self._restore(state, model, optimizer, monitor)
        goals = goal_batches(task, self.device) if spec.goals or spec.trace_loss else []
        written: dict[str, int] = state["lines"] if state is not None else {}
        step_lines = JsonLines(self.folder / "steps.jsonl", keep=written.get("steps", 0))
        evaluation_lines = JsonLines(self.folder / "evaluations.jsonl", keep=written.get("evaluations", 0))
        if (step_lines.count, evaluation_lines.count) != (written.get("steps", 0), written.get("evaluations", 0)):
            raise CheckpointError(f"{self.checkpoint_path} counts on lines that {self.folder} has lost.")
        last_saved = time.monotonic()
        try:
            while True:
                if goals and progress.step >= progress.next_evaluation:
                    loss = mean_loss(task, model, goals)
                    evaluation_lines.append({"step": progress.step, "units": progress.units, "goal_loss": loss})
                    if status := self._judge(loss):
                        break
                if progress.step >= spec.max_steps:
                    status = "exhausted"
                    break
                loss, moments = self._step(model, optimizer, monitor, microbatch)
                if moments is not None:
                    step_lines.append(self._step_record(loss, moments))
                if self._end_epoch(model, loss, evaluation_lines):
                    status = "diverged"
                    break
                if self.on_step is not None:
                    self.on_step(progress, float(loss) / spec.batch, monitor)
                if time.monotonic() - last_saved >= self.checkpoint_seconds:
                    step_lines.sync()
                    evaluation_lines.sync()
                    lines = {"steps": step_lines.count, "evaluations": evaluation_lines.count}
                    save_checkpoint(self.checkpoint_path, {**self._state(model, optimizer, monitor), "lines": lines})
                    last_saved = time.monotonic()
        finally:
            self._num_lines = {"steps": step_lines.count, "evaluations": evaluation_lines.count}
            step_lines.close()
            evaluation_lines.close()
            if monitor is not None:
                monitor.close()
        if self.keep_model:
            save_checkpoint(self.folder / "model.pt", {"task": task.name, "model": model.state_dict()})
        return status, progress.last_evaluation[1] if progress.last_evaluation else None

    def _step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, monitor: NoiseScaleMonitor | None, microbatch: int
    ) -> tuple[Tensor, StepMoments | None]:
        """One optimizer step; returns the detached sum of the losses and the step's moments."""
        task, spec, progress = self.task, self.spec, self.progress
        lr = self.schedule(progress.step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        indices = self.stream.indices(progress.units, spec.batch)
        optimizer.zero_grad(set_to_none=True)
        batches = self._microbatches(indices, microbatch)
        counts = [task.count(batch) for batch in batches]
        # Goyal 2017, remark 3: every loss is divided by the step's total, never by its own share.
        total = sum(counts)
        if total != spec.batch:
            raise ConfigError(
                f"task {task.name!r} counts {total} {task.unit} in a batch of {spec.batch} rows. Runs and studies need "
                "one unit a row at this version: count rows (unit 'sequences', say), and scale the loss to match."
            )
        loss_sum = torch.zeros((), device=self.device)
        for batch, count in zip(batches, counts, strict=True):
            loss = task.loss(model, batch)
            if monitor is None:
                normalise(loss, total).backward()
            else:
                with monitor.microbatch(units=count):
                    normalise(loss, total).backward()
            loss_sum += loss.detach()
        moments = monitor.step() if monitor is not None else None
        optimizer.step()
        progress.step += 1
        progress.units += spec.batch
        return loss_sum, moments

    def _microbatches(self, indices: np.ndarray, microbatch: int) -> list[Any]:
        task = self.task
        batches: list[Any] = []
        for start in range(0, len(indices), microbatch):
            part = indices[start : start + microbatch]
            batch = to_device(task.train.fetch(torch.from_numpy(part)), self.device)
            if task.augment is not None:
                epochs = (self.progress.units + start + np.arange(len(part))) // len(task.train)
                random = draws(self.spec.seed, epochs, part)
                batch = task.augment(batch, torch.from_numpy(random).to(self.device, torch.float32))
            batches.append(batch)
        return batches

    def _judge(self, loss: float) -> str | None:
        """Record crossings at this evaluation; return a status when the run is over."""
        spec, progress = self.spec, self.progress
        step = progress.step
        if not math.isfinite(loss):
            return "diverged"
        for index, goal in enumerate(spec.goals):
            if progress.crossings[index] is None and loss <= goal:
                before = progress.last_evaluation
                progress.crossings[index] = crossing(before, (step, loss), goal) if before else float(step)
        progress.last_evaluation = (step, loss)
        progress.next_evaluation = max(step + 1, math.floor(step * EVALUATION_RATIO))
        if progress.crossings and all(found is not None for found in progress.crossings):
            return "reached"
        if spec.stop_after and all(
            found is not None or step >= bound for found, bound in zip(progress.crossings, spec.stop_after, strict=True)
        ):
            return "stopped"
        return None

    def _end_epoch(self, model: nn.Module, loss: Tensor, lines: JsonLines) -> bool:
        """At an epoch's end evaluate on held-out data; return True when training has diverged."""
        spec, progress = self.spec, self.progress
        if not spec.evaluate_epochs:
            return False
        progress.epoch_loss += float(loss)
        progress.epoch_units += spec.batch
        epoch = progress.units // len(self.task.train)
        last = progress.step == spec.max_steps
        if not last and epoch <= (progress.epochs[-1]["epoch"] if progress.epochs else 0):
            return False
        error, held_out_loss = held_out(self.task, model, self.device)
        epoch = len(progress.epochs) + 1 if last else epoch
        train_loss = progress.epoch_loss / progress.epoch_units
        row = {"epoch": float(epoch), "train_loss": train_loss, "error": error, "held_out_loss": held_out_loss}
        if not (math.isfinite(train_loss) and math.isfinite(held_out_loss)):
            return True
        progress.epochs.append(row)
        progress.epoch_loss, progress.epoch_units = 0.0, 0
        lines.append({"step": progress.step, "units": progress.units, **row})
        return False

    def _step_record(self, loss: Tensor, moments: StepMoments) -> dict[str, Any]:
        progress = self.progress
        return {
            "step": progress.step,
            "units": progress.units,
            "lr": self.schedule(progress.step - 1),
            "loss": float(loss) / self.spec.batch,
            **asdict(moments),
        }

    def _state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, monitor: NoiseScaleMonitor | None
    ) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "key": self.spec.key,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "monitor": monitor.state_dict() if monitor else None,
            "progress": asdict(self.progress),
            "rng": torch.get_rng_state(),
            "seconds": self._elapsed(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if cuda else None,
        }

    def _restore(
        self, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer,
        monitor: NoiseScaleMonitor | None,
    ) -> None:  # fmt: skip
        if state["key"] != self.spec.key:
            raise RecordError(
                f"{self.checkpoint_path} belongs to another run ({state['key']}, not {self.spec.key}). "
                "Choose another --out, or delete it."
            )
        self._started -= state["seconds"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if monitor is not None:
            monitor.load_state_dict(state["monitor"])
        self.progress.__dict__.update(state["progress"])
        if self.progress.last_evaluation is not None:
            step, loss = self.progress.last_evaluation
            self.progress.last_evaluation = (step, loss)
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self.device)


def train(task: Task, spec: RunSpec, folder: Path, **options: Any) -> RunRecord:
    """Train `task` as `spec` says in `folder`; see Run for the options. Returns the run's record."""
    return Run(task, spec, folder, **options).run()
