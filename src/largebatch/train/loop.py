"""How is a task trained? The one loop: microbatches, backward, measure, step, record; on one worker or on many.

Every run is a pure function of (task, spec): killed and resumed from any checkpoint it ends in the same bits. Workers
deal out the same batches, whatever their number; worker 0 alone writes records.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError, RecordError
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.recipe.optimizer import build_optimizer
from largebatch.recipe.sampler import rank_slice
from largebatch.records.files import read_json, write_json
from largebatch.records.schema import RunRecord, RunSpec
from largebatch.tasks.task import Task
from largebatch.train.checkpoint import Checkpoints, save_weights
from largebatch.train.evaluate import goal_batches, held_out, mean_loss, refuse_none
from largebatch.train.feed import Feed, SkippingSplit
from largebatch.train.progress import Progress, StepCallback
from largebatch.train.run_lines import MeasuredRows, RunLines
from largebatch.train.spread import Execution, Spread
from largebatch.train.step import Stepper, StepTaken
from largebatch.train.workers import Workers, reporting_loss


class StoppedError(BaseException):
    """The run was asked to stop: the same call goes on from its last checkpoint, and the message says which that is.

    No error, so that no `except Exception` on the way takes it for one.
    """


class Run:
    """One training run of one spec in one folder.

    Args:
        task: what is trained.
        spec: how; the run is a pure function of both.
        folder: holds `steps.jsonl`, `evaluations.jsonl`, the checkpoints and, at the end, `run.json`.
        device: where the model lives, where `workers` is not given.
        workers: this worker's place among all; every worker makes the same Run.
        execution: DDP or FSDP2, precision, memory format.
        loaders: processes that fetch ahead for each worker; None is the task's own number.
        monitor_every: at which steps the noise scale is measured, as `every` of NoiseScaleMonitor.
        checkpoint_seconds: wall time between checkpoints; it changes no number of the run.
        on_step: see StepCallback; on worker 0 only.
        wants_stop: asked on every worker before each step; where one says yes, all save and stop.
        keep_model: write the final weights to `model.pt`; where training diverged, leave the last good checkpoint.
    """

    def __init__(
        self,
        task: Task,
        spec: RunSpec,
        folder: Path,
        *,
        device: str = "cpu",
        workers: Workers | None = None,
        execution: Execution | None = None,
        loaders: int | None = None,
        monitor_every: int | Literal["auto"] = 1,
        checkpoint_seconds: float = 20.0,
        on_step: StepCallback | None = None,
        wants_stop: Callable[[], bool] = lambda: False,
        keep_model: bool = False,
    ) -> None:
        if spec.batch > len(task.train):
            raise ConfigError(
                f"batch {spec.batch} is larger than the training data of task {task.name!r} "
                f"({len(task.train)} {task.unit}). Use a batch of at most {len(task.train)}."
            )
        self.workers = workers or Workers(device=torch.device(device))
        _, local_batch = rank_slice(0, spec.batch, self.workers.rank, self.workers.world_size)
        self.task, self.spec, self.folder = task, spec, folder
        self.execution = execution or Execution()
        self.loaders = task.loaders if loaders is None else loaders
        self.on_step, self.wants_stop, self.keep_model = on_step, wants_stop, keep_model
        self.monitor_every: int | Literal["auto"] = monitor_every
        self.checkpoint_seconds = checkpoint_seconds
        self.progress = Progress(crossings=[None] * len(spec.goals))
        self.microbatch = min(local_batch, spec.microbatch or task.microbatch or task.max_microbatch)
        self.skipped: dict[str, int] = {}
        """Examples that could not be read, with how often each was left out, before the last resume."""
        self._started = time.perf_counter()
        self._resolved = resolved = task.recipe.resolve(spec.batch, len(task.train), lr=spec.lr, rule="given")
        self._num_lines = {"steps": 0, "evaluations": 0}
        self.schedule: Callable[[int], float] = (
            resolved.schedule.lr_at if spec.schedule == "goyal" else lambda _: spec.lr
        )

    def run(self) -> RunRecord:
        """Train to the end, or return what an earlier call finished.

        Raises:
            StoppedError: `wants_stop` said so; the same call goes on from there.
            LargebatchError: whatever ends it otherwise.
        """
        done = self.folder / "run.json"
        if (record := self.workers.agree(lambda: self._finished(done))) is not None:
            return record
        cuda = self.workers.device.type == "cuda"
        lost = reporting_loss() if self.workers.group is not None else contextlib.nullcontext()
        with torch.random.fork_rng(devices=[self.workers.device] if cuda else []), lost:
            status, goal_loss = self._train()
        progress = self.progress
        record = RunRecord(
            spec=self.spec, status=status, steps=progress.step, units=progress.units,
            crossings=tuple(progress.crossings), epochs=tuple(progress.epochs), goal_loss=goal_loss,
            num_step_lines=self._num_lines["steps"], num_evaluation_lines=self._num_lines["evaluations"],
        )  # fmt: skip
        self.workers.agree(lambda: self._finish(done, record))
        with self.workers.alike():
            if status == "diverged" and self.keep_model:
                self._checkpoints.wait()  # the last good one stands
            else:
                self._checkpoints.delete()
        return record

    def _finished(self, done: Path) -> RunRecord | None:
        if not done.exists():
            return None
        record = RunRecord.from_json(read_json(done))
        if record.spec != self.spec:
            raise RecordError(f"{done} belongs to another run ({record.spec.key}). Choose another --out.")
        return record

    def _finish(self, done: Path, record: RunRecord) -> None:
        seconds, step = self._elapsed(), self.progress.step
        write_json(
            self.folder / "timing.json", {"seconds": seconds, "steps": step, "num_workers": self.workers.world_size}
        )
        if self.task.measures is not None and not self._spread.is_sharded and record.status != "diverged":
            write_json(self.folder / "measures.json", self.task.measures(self._spread.core, self.task.held_out))
        if self.skipped:
            write_json(self.folder / "skipped.json", self.skipped)
        write_json(done, asdict(record))

    def _elapsed(self) -> float:
        """Wall seconds of this run, the sessions before a resume included."""
        return time.perf_counter() - self._started

    def _train(self) -> tuple[str, float | None]:
        task, spec, progress, workers = self.task, self.spec, self.progress, self.workers
        torch.manual_seed(spec.seed)
        model = workers.all_or_none(task.model)
        model.train()
        self._spread = spread = workers.all_or_none(lambda: Spread(model, workers, self.execution))
        self._rows = MeasuredRows()
        with contextlib.ExitStack() as stack:
            self._monitor = None
            if spec.monitor:
                self._monitor = stack.enter_context(workers.all_or_none(lambda: self._watch(spread.model)))
            self._checkpoints = Checkpoints(self.folder, group=workers.group)
            stack.callback(self._checkpoints.settle)
            self._last_saved = time.monotonic()
            with workers.alike():
                written = self._restore()
            self._lines = workers.all_or_none(lambda: RunLines(self.folder, written, writes=workers.is_first))
            stack.callback(self._lines.close)
            self._feed = workers.all_or_none(
                lambda: Feed(
                    task, seed=spec.seed, batch=spec.batch, microbatch=self.microbatch, start=progress.units,
                    device=workers.device, rank=workers.rank, world_size=workers.world_size, loaders=self.loaders,
                )
            )  # fmt: skip
            stack.callback(self._feed.close)
            self._stepper = Stepper(
                task=task, spec=spec, workers=workers, spread=spread, optimizer=self._optimizer,
                schedule=self.schedule, feed=self._feed, microbatch=self.microbatch, monitor=self._monitor,
            )  # fmt: skip
            status = self._take_steps()
            if self._monitor is not None:
                self._monitor.close()
                self._lines.steps(self._rows.take())
            self._num_lines |= self._lines.counts()
            if self.keep_model and status != "diverged":
                weights = self._whole_weights()
                workers.agree(lambda: save_weights(self.folder / "model.pt", task.name, weights))
            self._gather_skipped()
        return status, progress.last_evaluation[1] if progress.last_evaluation else None

    def _watch(self, model: nn.Module) -> NoiseScaleMonitor:
        return NoiseScaleMonitor(
            model, microbatch=self.microbatch, unit=self.task.unit, every=self.monitor_every,
            dataset_size=len(self.task.train), on_measured=self._rows.found,
        )  # fmt: skip

    def _take_steps(self) -> str:
        """Step until the run is over; return its status."""
        task, spec, progress, workers = self.task, self.spec, self.progress, self.workers
        goals: list[Any] | None = None
        if spec.goals or spec.trace_loss:
            goals = self._goal_batches()
        while True:
            if goals is not None and progress.step >= progress.next_evaluation:
                loss = mean_loss(task, self._spread, goals, workers)
                self._lines.evaluation({"step": progress.step, "units": progress.units, "goal_loss": loss})
                if status := progress.judge(spec, loss):
                    return status
            if progress.step >= spec.max_steps:
                return "exhausted"
            measuring = self._monitor is not None and self._monitor.measuring
            is_due = workers.is_first and time.monotonic() - self._last_saved >= self.checkpoint_seconds
            taken = self._stepper.take(progress.step, progress.units, self.wants_stop(), is_due)
            progress.step += 1
            progress.units += spec.batch
            if measuring and workers.is_first:
                lr, loss = self.schedule(progress.step - 1), float(taken.loss_sum) / taken.count
                self._rows.note(progress.step, {"units": progress.units, "lr": lr, "loss": loss})
                self._lines.steps(self._rows.take())
            if self._end_epoch(taken):
                return "diverged"
            if self.on_step is not None and workers.is_first:
                self.on_step(progress, float(taken.loss_sum) / taken.count, self._monitor)
            wants_stop, is_due = taken.asked
            saved = (wants_stop or is_due) and self._save()
            if wants_stop:
                with workers.alike():
                    self._checkpoints.wait()
                stands = (
                    "its checkpoint stands" if saved
                    else "a weight is not finite there, so that no checkpoint was written: the same call goes on from "
                    "the one before, or from the start where there is none"
                )  # fmt: skip
                raise StoppedError(f"stopped after step {progress.step} of {spec.max_steps}; {stands}.")

    def _goal_batches(self) -> list[Any]:
        task, workers = self.task, self.workers
        goals = workers.all_or_none(lambda: goal_batches(task, workers))
        # Taken now, or the next microbatch would give them out as its own.
        skipped = task.train.take_skipped() if isinstance(task.train, SkippingSplit) else []
        self._feed.leave_out(skipped)
        (count,) = workers.sums(sum(task.count(batch) for batch in goals))
        what = f"{min(task.num_goal_examples, len(task.train))} training examples on which goals are measured"
        refuse_none(count, task, what, skipped, workers)
        return goals

    def _end_epoch(self, taken: StepTaken) -> bool:
        """At an epoch's end evaluate on held-out data; return True when training has diverged, on all workers alike."""
        spec, progress = self.spec, self.progress
        if not spec.evaluate_epochs:
            return False
        loss = float(taken.loss_sum)
        if not math.isfinite(loss):
            return True
        progress.epoch_loss += loss
        progress.epoch_units += taken.count
        epoch = progress.units // len(self.task.train)
        last = progress.step == spec.max_steps
        if not last and epoch <= (progress.epochs[-1]["epoch"] if progress.epochs else 0):
            return False
        error, held_out_loss = held_out(self.task, self._spread, self.workers)
        if isinstance(self.task.held_out, SkippingSplit):
            self._feed.leave_out(self.task.held_out.take_skipped())
        epoch = len(progress.epochs) + 1 if last else epoch
        train_loss = progress.epoch_loss / progress.epoch_units
        row = {"epoch": float(epoch), "train_loss": train_loss, "error": error, "held_out_loss": held_out_loss}
        if not math.isfinite(held_out_loss):
            return True
        progress.epochs.append(row)
        progress.epoch_loss, progress.epoch_units = 0.0, 0
        self._lines.evaluation({"step": progress.step, "units": progress.units, **row})
        return False

    def _save(self) -> bool:
        """Begin to write a checkpoint, unless a weight is not finite any more: the last is a good one. Was it begun?"""
        self._last_saved = time.monotonic()
        bad = sum(int(not torch.isfinite(_own(weights)).all()) for weights in self._spread.core.parameters())
        if any(self.workers.sums(bad)):
            return False
        self._gather_skipped()
        monitor = self._monitor.state_dict() if self._monitor is not None else None
        self._lines.steps(self._rows.take())
        self._lines.sync()
        facts = {
            "key": self.spec.key,
            "progress": self.progress.saved(),
            "lines": self._lines.counts(),
            "monitor": monitor,
            "seconds": self._elapsed(),
            "skipped": self.skipped,
        }
        with self.workers.alike():
            self._checkpoints.save(self.progress.step, self._state(), facts)
        return True

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._spread.core, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _restore(self) -> dict[str, int]:
        """Make the optimizer, and stand where the newest checkpoint stood; returns the lines written until then."""
        self._optimizer = build_optimizer(self._spread.core, self._resolved)
        if not self.workers.agree(self._may_go_on):
            return {}
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        facts = self._checkpoints.load(state)
        if facts is None:  # killed within the first save; asking for the state has made some in the optimizer
            self._optimizer = build_optimizer(self._spread.core, self._resolved)
            return {}
        if facts["key"] != self.spec.key:
            raise RecordError(
                f"{self.folder} belongs to another run ({facts['key']}, not {self.spec.key}). "
                "Choose another --out, or delete it."
            )
        self._started -= facts["seconds"]
        set_state_dict(
            self._spread.core, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        if self._monitor is not None:
            self._monitor.load_state_dict(facts["monitor"])
        self.progress.restore(facts["progress"])
        self.skipped = facts["skipped"]
        return facts["lines"]

    def _may_go_on(self) -> bool:
        return any(self.folder.glob("checkpoint*"))

    def _whole_weights(self) -> dict[str, Tensor]:
        """The final weights, on the host, gathered where they are sharded; every worker calls it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        sharded = self._spread.is_sharded
        options = StateDictOptions(full_state_dict=sharded, cpu_offload=sharded)
        found = get_model_state_dict(self._spread.core, options=options)
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _gather_skipped(self) -> None:
        """Add what all workers had to leave out since the last time."""
        since, self._feed.skipped = self._feed.skipped, {}
        for found in self.workers.gather(since):
            for name, count in found.items():
                self.skipped[name] = self.skipped.get(name, 0) + count


def _own(weights: Tensor) -> Tensor:
    return weights.to_local() if hasattr(weights, "to_local") else weights  # pyright: ignore


def train(task: Task, spec: RunSpec, folder: Path, **options: Any) -> RunRecord:
    """Train `task` as `spec` says in `folder`; see Run for the options. Returns the run's record."""
    return Run(task, spec, folder, **options).run()
