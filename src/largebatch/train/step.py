"""What happens in one optimizer step? Microbatches, one total over all workers, backwards, measuring, the update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.recipe.loss import normalise
from largebatch.recipe.sampler import forward_seed, rank_slice
from largebatch.records.schema import RunSpec
from largebatch.tasks.task import Task
from largebatch.train.feed import Feed, SkippingSplit
from largebatch.train.spread import Spread
from largebatch.train.workers import Workers


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTaken:
    """What one optimizer step came to, on all workers alike."""

    loss_sum: Tensor
    """Sum of the losses of its units; on one worker still where the model is, so that nothing waits for it."""
    count: int
    """Its units: the batch, less what could not be read."""
    asked: tuple[bool, ...]
    """Of each request that rode along: whether any worker made it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepper:
    """Takes steps of one model on this worker; every worker of the job has one and takes the same steps."""

    task: Task
    """What is trained."""
    spec: RunSpec
    """How."""
    workers: Workers
    """This worker among all."""
    spread: Spread
    """The model on its workers."""
    optimizer: torch.optim.Optimizer
    """Its learning rate is set here, at every step."""
    schedule: Callable[[int], float]
    """Step, counted from 0 -> learning rate."""
    feed: Feed
    """Where microbatches come from."""
    microbatch: int
    """Examples in one forward/backward, at most."""
    monitor: NoiseScaleMonitor | None
    """Measures, where it is wanted."""

    def take(self, step: int, units: int, *asks: bool) -> StepTaken:
        """Take the step numbered `step` from 0, whose batch begins at position `units` of the stream.

        Args:
            step: optimizer steps taken before.
            units: position of the batch in the stream: what was drawn before, unreadable examples included.
            asks: requests of this worker to all, which ride on the sum of the units.

        Raises:
            ConfigError: the task counts other units than rows.
            WorkerLostError: another worker failed, or is gone.
        """
        batches, counts, total, asked = self._fetch(asks)
        self._check_total(total)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(step)
        start, local_batch = rank_slice(units, self.spec.batch, self.workers.rank, self.workers.world_size)
        positions = range(start, start + local_batch, self.microbatch)
        loss_sum = torch.zeros((), device=self.workers.device)
        for position, batch, count in zip(positions, batches, counts, strict=True):
            self._seed_forward(position)
            with contextlib.ExitStack() as around:
                around.enter_context(self.spread.computing(is_last=position == positions[-1]))
                if self.monitor is not None:
                    around.enter_context(self.monitor.microbatch(units=count))
                loss = self.task.loss(self.spread.model, self.spread.arrange(batch))
                if position == positions[0]:
                    # Not before the forward, which would take their memory and leave the backward to ask for new pages:
                    # a step of ResNet-50 on the CPU then took longer.
                    self.optimizer.zero_grad(set_to_none=True)
                # Goyal 2017, remark 3: every loss is divided by the step's total, never by its own share.
                normalise(loss, total, averaged_over=self.spread.averaged_over).backward()
            loss_sum += loss.detach()
        if self.monitor is not None:
            self.monitor.step()
        self.optimizer.step()
        if self.workers.world_size > 1:
            loss_sum = torch.tensor(self.workers.sums(float(loss_sum))[0], dtype=torch.float64)
        return StepTaken(loss_sum=loss_sum, count=total, asked=asked)

    def _fetch(self, asks: tuple[bool, ...]) -> tuple[list[Any], list[int], int, tuple[bool, ...]]:
        """This worker's microbatches with their units, the units of all workers, and what any of them asks."""
        batches, counts, failure = list[Any](), list[int](), None
        try:
            batches = self.feed.step()
            counts = [self.task.count(batch) for batch in batches]
        except Exception as error:  # the others are told, and nobody waits in vain
            failure = error
        total, failed, *asked = self.workers.sums(sum(counts), failure is not None, *asks)
        if failed:
            self.workers.fail_together(failure)
        return batches, counts, int(total), tuple(map(bool, asked))

    def _check_total(self, total: int) -> None:
        task, batch = self.task, self.spec.batch
        if total == batch or isinstance(task.train, SkippingSplit):
            return
        self.workers.fail_together(
            ConfigError(
                f"task {task.name!r} counts {total} {task.unit} in a batch of {batch} rows. Runs and studies need one "
                "unit a row at this version: count rows (unit 'sequences', say), and scale the loss to match."
            )
        )

    def _seed_forward(self, position: int) -> None:
        """Let what the model draws depend on (seed, position) alone: the same after a resume and on other workers."""
        seed = forward_seed(self.spec.seed, position)
        torch.default_generator.manual_seed(seed)
        if self.workers.device.type == "cuda":
            torch.cuda.default_generators[self.workers.device.index or 0].manual_seed(seed)
