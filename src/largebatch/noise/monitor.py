"""Is my batch too small or too large? The noise scale of a training loop, while it runs.

Three lines in a loop that accumulates K >= 2 backwards a step, or that runs on two workers or more:

    monitor = NoiseScaleMonitor(model, microbatch=32)
    monitor.step()  # after the last backward, before clipping and optimizer.step()
    print(monitor.noise_scale)
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from largebatch.errors import CheckpointError, ConfigError
from largebatch.noise.advice import Advice, OptimizerKind
from largebatch.noise.advise import advise
from largebatch.noise.cadence import Cadence
from largebatch.noise.collect.layout import find_layout, named_trainable, warn_of_batch_norm
from largebatch.noise.collect.reduce import LossScaling
from largebatch.noise.estimate import NoiseScale
from largebatch.noise.ledger import Ledger, MeasuredStep
from largebatch.noise.meter import StepMeter
from largebatch.noise.moments import StepMoments
from largebatch.noise.options import as_sinks, check_options
from largebatch.noise.partition import REST, Groups, Partition
from largebatch.units import Duration, check_unit

logger = logging.getLogger(__name__)


class NoiseScaleMonitor:
    """Measures tr(Sigma), |G|^2 and B_simple of a model in training, and changes nothing in it.

    Each backward is taken for one microbatch (`microbatch` says otherwise), and the microbatches of a step, on all
    workers, for independent draws. Gradients, weights and random numbers stay as they are, bit for bit; gradients
    are read, not kept. One sum over the workers per measured step. The host never waits for an accelerator: there
    a step's numbers are read when the next one is measured, or when they are asked for.

    On several workers every worker makes one and calls `step()` at every step. Layers that couple examples (batch
    norm in training, contrastive losses) make the noise of a microbatch more than that of its units.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Linear(2, 1)
    >>> with NoiseScaleMonitor(model, microbatch=8) as monitor:
    ...     for part in torch.randn(4, 8, 2):
    ...         (model(part).square().mean() / 4).backward()
    ...     moments = monitor.step()
    >>> moments.batch, moments.num_microbatches
    (32, 4)

    Source: McCandlish et al. 2018, app. A.1, with the microbatches of a step as the small batches.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        microbatch: int | None = None,
        per_example: bool | Literal["fast"] = False,
        loss_scaling: LossScaling = "step_mean",
        unit: str = "examples",
        every: int | Literal["auto"] = "auto",
        overhead: float = 0.01,
        groups: Groups = None,
        dataset_size: int | None = None,
        half_life: float | Duration | None = None,
        grad_scaler: Any = None,
        precondition_by: torch.optim.Optimizer | None = None,
        on_measured: Callable[[MeasuredStep], None] | Sequence[Callable[[MeasuredStep], None]] = (),
    ) -> None:
        """Hook into the parameters of `model` that require a gradient.

        Args:
            model: the model in training, as it is called: wrapped in DistributedDataParallel, sharded by
                fully_shard, or plain.
            microbatch: units in one backward of one worker, >= 1; uneven ones go through `microbatch(units)`.
                With `per_example` it is left out.
            per_example: read the squared norm of every example's own gradient in the one backward, so that neither
                accumulation nor a second worker is needed and the noise is known best. An example is a row of
                dim 0: for a language model a sequence, whose tokens are not independent. "fast" takes the weight
                gradients from the examples' ones where these are made anyway, equal to 1e-6 but not to the bit.
            loss_scaling: what the sum of a backward's losses over its b_i units is divided by, where the step has
                B units on W workers: "step_mean" by B / W (on one worker: by B; for even microbatches the same as
                their mean over the accumulation), "local_mean" by the worker's own units in the step,
                "microbatch_mean" by b_i, "sum" by 1. Gradients are then averaged over the workers, as DDP does.
            unit: what a batch counts.
            every: measure every this many steps, the first one included; "auto" keeps the cost under `overhead`.
            overhead: share of a step's time that measuring may take on average, in (0, 1); for "auto".
            groups: moments of groups of parameters beside the total, see `Groups`.
            dataset_size: examples that a step draws from without replacement; the target is then the gradient
                over these examples, without it the gradient over the population (see `solve_moments`).
            half_life: None averages over the whole run; else measured steps (a number or a Duration in steps)
                or units (a Duration in `unit`) of measured steps after which a step's weight has halved.
            grad_scaler: the torch.amp.GradScaler in use; its scale is divided out, unscaled already or not.
            precondition_by: an Adam-like optimizer; moments also in its metric P = 1 / (sqrt(v) + eps).
            on_measured: one function or several, called with each MeasuredStep, in order, on rank 0 only.

        Raises:
            ConfigError: a value out of range, nothing to train, or a model that is spread in a way that is not
                measured (the message says which and what to do).
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a torch.nn.Module; got {type(model).__name__}.")
        check_options(
            microbatch=microbatch, per_example=per_example, loss_scaling=loss_scaling, unit=unit, every=every,
            overhead=overhead, dataset_size=dataset_size, half_life=half_life, grad_scaler=grad_scaler,
            precondition_by=precondition_by,
        )  # fmt: skip
        self.unit = check_unit(unit)
        self.num_steps = 0
        """Calls of `step`, measured or not."""
        self.num_skipped = 0
        """Steps that were to be measured but had a gradient that is not finite, or were given up."""
        self._microbatch = microbatch
        self._dataset_size, self._on_measured = dataset_size, as_sinks(on_measured)
        self._cadence = Cadence(overhead=overhead) if every == "auto" else None
        self._every = self._voted = 1 if every == "auto" else every
        self._next, self._wide, self._closed = 0, False, False
        self._layout = find_layout(model)
        names = [name for name, _ in named_trainable(model, self._layout)]
        self._partition = Partition(groups, names)
        warn_of_batch_norm(model)
        self._ledger = Ledger(self._partition.names, half_life=half_life, unit=unit)
        self._last_end: float | None = None
        self._meter = StepMeter(
            model, self._layout, self._partition, microbatch=microbatch, per_example=per_example,
            loss_scaling=loss_scaling, grad_scaler=grad_scaler, precondition_by=precondition_by,
        )  # fmt: skip

    @property
    def noise_scale(self) -> NoiseScale:
        """B_simple over the steps measured so far, with its 95 % interval or the reason why there is none."""
        self._settle()
        return self._ledger.total.estimate()

    @property
    def group_noise_scales(self) -> dict[str, NoiseScale]:
        """`noise_scale` of each group of parameters; `REST` only where no pattern fits some of them."""
        self._settle()
        found = {name: running.estimate() for name, running in self._ledger.groups.items()}
        return {name: estimate for name, estimate in found.items() if name != REST or not self._partition.is_whole}

    @property
    def preconditioned_noise_scale(self) -> NoiseScale:
        """tr(P Sigma) / (G' P G) in the metric P of `precondition_by`; see `noise/precondition`."""
        self._settle()
        return self._ledger.preconditioned.estimate()

    def advise(
        self,
        *,
        lr: float | None = None,
        batch: int | None = None,
        optimizer: OptimizerKind | None = None,
        tokens_per_sequence: int | None = None,
    ) -> Advice:
        """What batch, learning rate and accumulation the noise scale supports now, by `largebatch.noise.advise`.

        Args:
            lr: learning rate now, > 0, taken for well tuned at `batch`; None is not said, and a factor is given.
            batch: in `unit`, >= 1, in a step now; None is the median of the last 31 measured steps.
            optimizer: "sgd", "adam" (also AdamW, RMSProp), or None for not said: both rules' factors are given.
            tokens_per_sequence: for a monitor in tokens, those in a row of a Hugging Face batch, for `hf_arguments`.

        Returns:
            Advice: `print` it to read it. While the noise scale is unresolved its `resolved` is False, `reason` says
            why, and nothing is advised.

        Raises:
            ConfigError: a value that is none of these.
        """
        return advise(
            self.noise_scale, batch=self._ledger.typical_batch if batch is None else batch, microbatch=self._microbatch,
            world_size=self._layout.world_size, lr=lr, optimizer=optimizer, tokens_per_sequence=tokens_per_sequence,
        )  # fmt: skip

    @property
    def every(self) -> int:
        """Every how many steps are measured now."""
        return self._every

    @property
    def measuring(self) -> bool:
        """Whether the step under way is measured, so that units need counting."""
        return self._meter.enabled

    def microbatch(self, units: int) -> AbstractContextManager[None]:
        """Take all backwards inside the context for one microbatch of `units` units.

        For uneven or token-counted microbatches, several losses with a backward each, and reentrant
        checkpointing. It costs nothing while each parameter gets one gradient inside. The first time one gets
        a second, that step is skipped (and logged); from then on the gradients of a context are added up in a
        buffer while it is open, so that the norm of their sum is exact: memory for one copy of the gradients.
        """
        return self._meter.microbatch(units)

    def step(self) -> StepMoments | None:
        """Measure the step whose backwards are done; call once a step, before clipping and optimizer.step().

        Returns:
            The step's moments; None if it was not to be measured (`every`), if it was skipped because a gradient
            was not finite, a context had its first unforeseen second backward or a later step one microbatch only (an
            epoch's end), and on an accelerator, where `on_measured` and `noise_scale` get them later.

        Raises:
            ConfigError: one microbatch only, no backward, gradients changed, zeroed too early or not at all, more
                units than `dataset_size`, or such an error on another worker.
        """
        if self._closed:
            raise ConfigError("the monitor is closed: make a new one, and hand it state_dict() to go on.")
        self.num_steps += 1
        if not self._meter.enabled:
            self._end_step()
            return None
        try:
            return self._measure()
        finally:  # whatever a refusal or a sink raises here, the workers stay in step
            self._next = self.num_steps + self._every
            self._end_step()

    def _end_step(self) -> None:
        self._enable()
        self._last_end = time.perf_counter()

    def give_up(self, reason: str) -> None:
        """Have the step under way skipped and counted, on all workers, because of `reason`; call before `step`."""
        self._meter.collector.give_up(reason)

    @property
    def loss_factor(self) -> float:
        """What each loss is multiplied by beside what `loss_scaling` says; 1 unless set, read at each `step`.

        For loops that divide the mean loss of every microbatch by a number of their own, such as a nominal
        accumulation that an epoch's last step does not reach: "microbatch_mean" with 1 / that number.
        """
        return self._meter.loss_factor

    @loss_factor.setter
    def loss_factor(self, factor: float) -> None:
        if isinstance(factor, bool) or not isinstance(factor, float | int) or not 0 < factor < math.inf:
            raise ConfigError(f"loss_factor is a positive number; got {factor!r}.")
        self._meter.loss_factor = float(factor)

    def _measure(self) -> StepMoments | None:
        started, in_hooks = time.perf_counter(), self._meter.seconds
        self._settle()
        self._every = self._voted
        vote = self._cadence.every() if self._cadence is not None else self._every
        self._meter.measure(self.num_steps, vote=vote)
        moments = None if self._meter.defer else self._settle()
        if self._cadence is not None and self._last_end is not None:
            now = time.perf_counter()
            self._cadence.note(step_seconds=now - self._last_end, cost_seconds=in_hooks + now - started)
        return moments

    def _settle(self) -> StepMoments | None:
        """Read the sums of the last measured step, if that was not done yet, and take its moments in."""
        reading = self._meter.settle()
        if reading is None:
            return None
        step, sums = reading.step, reading.sums
        if sums.num_refused:
            raise ConfigError(
                f"step {step}: {sums.num_refused} other worker(s) refused to measure it; their message says why."
            )
        self._voted = sums.vote
        if sums.stale:
            raise ConfigError("gradients were not zero before this step's first backward: call zero_grad() each step.")
        self._wide = sums.leaves_float32()
        first = self._ledger.last_batch is None
        cause = sums.why_skipped(own=reading.skip, wide=reading.wide, may_be_lone=first)
        if cause:
            self.num_skipped += 1
            logger.warning("noise scale: step %d is not measured: %s.", step, cause)
            return None
        if sums.changed:
            raise ConfigError(
                "gradients were changed after the last backward: call step() before clipping and optimizer.step(), and "
                "give the GradScaler, where there is one, to the monitor as grad_scaler."
            )
        found = self._ledger.add(step, sums.moments(self._dataset_size), weighed=sums.weighed)
        if self._layout.rank == 0:
            for sink in self._on_measured:
                sink(found)
        return found.moments

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, to be saved between steps; what `load_state_dict` goes on from, bit for bit."""
        self._settle()
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "every": self._every,
            "voted": self._voted,
            "next": self._next,
            "buffering": self._meter.collector.buffering,
            "wide": self._wide,
            "ledger": self._ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; raises CheckpointError if it is none, or was saved with other settings."""
        try:
            numbers = {name: int(state[name]) for name in ("num_steps", "num_skipped", "every", "voted", "next")}
            buffering, wide = bool(state["buffering"]), bool(state["wide"])
            if min(numbers.values()) < 0 or min(numbers["every"], numbers["voted"]) < 1:
                raise ValueError(f"counts of {numbers}")
            self._ledger.load_state_dict(state["ledger"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"this is no state of a NoiseScaleMonitor: {error!r}.") from error
        self._meter.discard()
        self.num_steps, self.num_skipped, self._every, self._voted, self._next = numbers.values()
        self._meter.collector.buffering, self._wide = buffering, wide
        self._enable()

    def _enable(self) -> None:
        self._meter.enabled, self._meter.wide = self.num_steps + 1 >= self._next, self._wide

    def close(self) -> None:
        """Remove the hooks; the noise scale measured so far stays readable."""
        self._closed = True
        try:
            self._settle()
        finally:
            self._meter.close()

    def __enter__(self) -> NoiseScaleMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # a sum that was not read is no reason to hide the error
            self._closed = True
            self._meter.close()
