"""Is my batch too small or too large? The noise scale of a training loop, while it runs.

Three lines in a loop that accumulates K >= 2 backwards a step, or that runs on two workers or more:

    monitor = NoiseScaleMonitor(model, microbatch=32)
    monitor.step()  # after the last backward, before clipping and optimizer.step()
    print(monitor.noise_scale)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from largebatch.errors import CheckpointError, ConfigError
from largebatch.groups import sum_over_workers
from largebatch.noise.advice import Advice, OptimizerKind
from largebatch.noise.advise import advise
from largebatch.noise.cadence import Cadence
from largebatch.noise.collect import GradientCollector, StepNorms
from largebatch.noise.estimate import NoiseScale
from largebatch.noise.layout import find_layout, named_trainable
from largebatch.noise.ledger import Ledger, MeasuredStep
from largebatch.noise.moments import StepMoments
from largebatch.noise.partition import Groups, Partition
from largebatch.noise.precondition import metric_of
from largebatch.noise.reduce import LossScaling, StepSums, pack, refusal
from largebatch.noise.scaler import is_unscaled, loss_scale
from largebatch.noise.sharded import ShardedCollector
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
        on_measured: Sequence[Callable[[MeasuredStep], None]] = (),
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
            on_measured: called with each MeasuredStep, in order, on rank 0 only.

        Raises:
            ConfigError: a value out of range, nothing to train, or a model that is spread in a way that is not
                measured (the message says which and what to do).
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a torch.nn.Module; got {type(model).__name__}.")
        if loss_scaling not in get_args(LossScaling):
            options = ", ".join(map(repr, get_args(LossScaling)))
            raise ConfigError(f"loss_scaling {loss_scaling!r} is not known. Use one of: {options}.")
        if per_example not in (False, True, "fast"):
            raise ConfigError(f"per_example is False, True or 'fast'; got {per_example!r}.")
        if per_example and unit == "tokens":
            raise ConfigError(
                "the tokens of a sequence are not independent, so per_example counts rows: use unit='sequences' (times "
                "the tokens in a sequence it is a noise scale in tokens)."
            )
        if per_example and microbatch is not None:
            raise ConfigError(f"per_example counts the examples itself: leave microbatch={microbatch!r} out.")
        counts = {"microbatch": microbatch, "every": 1 if every == "auto" else every, "dataset_size": dataset_size}
        for name, value in counts.items():
            optional = (name == "dataset_size" or per_example) and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is a whole number of at least 1; got {value!r}.")
        if isinstance(overhead, bool) or not isinstance(overhead, float | int) or not 0 < overhead < 1:
            raise ConfigError(f"overhead is a share between 0 and 1; got {overhead!r}.")
        self.unit = check_unit(unit)
        self.num_steps = 0
        """Calls of `step`, measured or not."""
        self.num_skipped = 0
        """Steps that were to be measured but had a gradient that is not finite, or were given up."""
        self._loss_scaling: LossScaling = loss_scaling
        self._microbatch = microbatch
        self._dataset_size, self._scaler, self._on_measured = dataset_size, grad_scaler, tuple(on_measured)
        self._cadence = Cadence(overhead=overhead) if every == "auto" else None
        self._every = self._voted = 1 if every == "auto" else every
        self._next = 0
        self._layout = find_layout(model)
        names = [name for name, _ in named_trainable(model, self._layout)]
        self._partition = Partition(groups, names)
        num_norms = sum(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules())
        if num_norms:
            logger.warning(
                "noise scale: %d batch norm layer(s) in training couple the examples of a microbatch: the noise is "
                "that of microbatches of this size, and another size is another loss (Goyal et al. 2017, sec. 2.3).",
                num_norms,
            )
        self._ledger = Ledger(self._partition.names, half_life=half_life, unit=unit)
        self._unsettled: tuple[int, Tensor, Any, StepNorms] | None = None
        self._last_end: float | None = None
        self._device = next(model.parameters()).device
        self._num_elements, self._wide = sum(p.numel() for p in model.parameters() if p.requires_grad), False
        self._defer = self._device.type != "cpu"
        sharded = partial(ShardedCollector, loss_scaling=loss_scaling)
        self._collector = (sharded if self._layout.kind == "fsdp" else GradientCollector)(
            model,
            default_units=microbatch or 1,
            read_microbatches=not per_example,
            layout=self._layout,
            row_of=self._partition.row_of,
            num_rows=len(self._partition.names),
            weigh=None if precondition_by is None else metric_of(precondition_by),
        )
        self._per_example: Any = None
        if per_example:
            if precondition_by is not None:
                raise ConfigError("per_example does not know an optimizer's metric: leave precondition_by out.")
            from largebatch.noise.per_example import PerExampleCollector

            self._per_example = PerExampleCollector(
                self._layout.ddp.module if self._layout.ddp is not None else model,
                group_of=self._partition.row_of,
                fast=per_example == "fast",
            )

    @property
    def noise_scale(self) -> NoiseScale:
        """B_simple over the steps measured so far, with its 95 % interval or the reason why there is none."""
        self._settle()
        return self._ledger.total.estimate()

    @property
    def group_noise_scales(self) -> dict[str, NoiseScale]:
        """`noise_scale` of each group of parameters."""
        self._settle()
        return {name: running.estimate() for name, running in self._ledger.groups.items()}

    @property
    def preconditioned_noise_scale(self) -> NoiseScale:
        """tr(P Sigma) / (G' P G) in the metric P of `precondition_by`; see `noise/precondition`."""
        self._settle()
        return self._ledger.preconditioned.estimate()

    def advise(
        self,
        *,
        lr: float,
        batch: int | None = None,
        optimizer: OptimizerKind | None = None,
        tokens_per_sequence: int | None = None,
    ) -> Advice:
        """What batch, learning rate and accumulation the noise scale supports now; `str()` of it is a paragraph.

        `batch`: None is that of the last measured step. The rest as in `largebatch.noise.advise`.
        """
        return advise(
            self.noise_scale, batch=self._ledger.last_batch if batch is None else batch, microbatch=self._microbatch,
            world_size=self._layout.world_size, lr=lr, optimizer=optimizer, tokens_per_sequence=tokens_per_sequence,
        )  # fmt: skip

    @property
    def every(self) -> int:
        """Every how many steps are measured now."""
        return self._every

    def microbatch(self, units: int) -> AbstractContextManager[None]:
        """Take all backwards inside the context for one microbatch of `units` units.

        For uneven or token-counted microbatches, several losses with a backward each, and reentrant
        checkpointing. It costs nothing while each parameter gets one gradient inside. The first time one gets
        a second, that step is skipped (and logged); from then on the gradients of a context are added up in a
        buffer while it is open, so that the norm of their sum is exact: memory for one copy of the gradients.
        """
        return self._collector.microbatch(units)

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
        measured = self._collector.enabled
        self.num_steps += 1
        moments = self._measure() if measured else None
        if measured:
            self._next = self.num_steps + self._every
        self._enable()
        self._last_end = time.perf_counter()
        return moments

    def _measure(self) -> StepMoments | None:
        started, in_hooks = time.perf_counter(), self._collector.seconds
        self._settle()
        self._every = self._voted
        norms, failure = None, None
        try:
            unscaled = is_unscaled(self._scaler)
            norms = replace(self._take(may_be_unscaled=unscaled), wide=self._collector.wide)
            vote = self._cadence.every() if self._cadence is not None else self._every
            payload = pack(
                norms, loss_scaling=self._loss_scaling, vote=vote if self._layout.rank == 0 else 0,
                scale=loss_scale(self._scaler), unscaled=unscaled,
            )  # fmt: skip
        except ConfigError as error:
            if not self._layout.groups:
                raise
            failure, payload = error, refusal(self._collector.num_rows, self._device)
        sum_over_workers(payload, self._layout.groups)
        if failure is not None or norms is None:
            raise failure or AssertionError("norms or a failure")
        self._unsettled = self._send(payload, norms)
        moments = None if self._defer else self._settle()
        if self._cadence is not None and self._last_end is not None:
            now = time.perf_counter()
            self._cadence.note(step_seconds=now - self._last_end, cost_seconds=in_hooks + now - started)
        return moments

    def _take(self, *, may_be_unscaled: bool) -> StepNorms:
        examples = self._per_example.take() if self._per_example is not None else []
        norms = self._collector.take(may_be_unscaled=may_be_unscaled)
        if self._per_example is None:
            return norms
        if len(examples) != len(norms.units):
            raise ConfigError(
                f"{len(norms.units)} backwards reached the parameters, but the examples of {len(examples)} are known: "
                "each backward follows its own forward through the monitored model."
            )
        sizes = [part.shape[1] for part in examples]
        return replace(
            norms,
            units=(1,) * sum(sizes),
            together=tuple(size for size in sizes for _ in range(size)),
            sq_norms=torch.cat([_padded(part, self._collector.num_rows) for part in examples], dim=1).to(
                norms.sq_norm_step
            ),
        )

    def _send(self, payload: Tensor, norms: StepNorms) -> tuple[int, Tensor, Any, StepNorms]:
        """Set off to the host, without waiting for it."""
        if payload.device.type == "cpu":
            return self.num_steps, payload, None, norms
        host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=payload.device.type == "cuda")
        host.copy_(payload, non_blocking=payload.device.type == "cuda")
        event = torch.Event(payload.device) if payload.device.type == "cuda" else None
        if event is not None:
            event.record()
        return self.num_steps, host, event, norms

    def _settle(self) -> StepMoments | None:
        """Read the sums of the last measured step, if that was not done yet, and take its moments in."""
        if self._unsettled is None:
            return None
        (step, host, event, norms), self._unsettled = self._unsettled, None
        if event is not None:
            event.synchronize()
        sums = StepSums(
            values=tuple(host.tolist()), num_rows=self._collector.num_rows, world_size=self._layout.world_size,
            loss_scaling=self._loss_scaling, weighed=norms.weighed,
        )  # fmt: skip
        if sums.num_refused:
            raise ConfigError(
                f"step {step}: {sums.num_refused} other worker(s) refused to measure it; their message says why."
            )
        self._voted = sums.vote
        if sums.stale:
            raise ConfigError("gradients were not zero before this step's first backward: call zero_grad() each step.")
        self._wide = sums.leaves_float32(self._num_elements)
        first = self._ledger.last_batch is None
        cause = sums.why_skipped(self._num_elements, own=norms.skip, wide=norms.wide, may_be_lone=first)
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
            "buffering": self._collector.buffering,
            "wide": self._wide,
            "ledger": self._ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; raises CheckpointError if it is none, or was saved with other settings."""
        try:
            numbers = {name: int(state[name]) for name in ("num_steps", "num_skipped", "every", "voted", "next")}
            buffering, wide = bool(state["buffering"]), bool(state["wide"])
            self._ledger.load_state_dict(state["ledger"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"this is no state of a NoiseScaleMonitor: {error!r}.") from error
        self.num_steps, self.num_skipped, self._every, self._voted, self._next = numbers.values()
        self._collector.buffering, self._wide = buffering, wide
        self._enable()

    def _enable(self) -> None:
        self._collector.enabled, self._collector.wide = self.num_steps + 1 >= self._next, self._wide
        if self._per_example is not None:
            self._per_example.enabled = self._collector.enabled

    def close(self) -> None:
        """Remove the hooks; the noise scale measured so far stays readable."""
        self._settle()
        self._collector.close()
        if self._per_example is not None:
            self._per_example.close()

    def __enter__(self) -> NoiseScaleMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _padded(norms: Tensor, num_rows: int) -> Tensor:
    """With a row of zeros for each group that has no parameter."""
    return torch.nn.functional.pad(norms, (0, 0, 0, num_rows - len(norms)))
