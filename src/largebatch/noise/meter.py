"""How do the norms of one step get from this worker's hooks to the sums of all workers, without anyone waiting?"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.groups import own_groups, sum_over_workers
from largebatch.noise.collect.collector import GradientCollector
from largebatch.noise.collect.layout import Layout
from largebatch.noise.collect.reduce import LossScaling, StepSums, pack, refusal
from largebatch.noise.collect.scaler import is_unscaled, loss_scale
from largebatch.noise.collect.sharded import ShardedCollector
from largebatch.noise.collect.step_norms import StepNorms
from largebatch.noise.partition import Partition
from largebatch.noise.precondition import metric_of

SCALED_MARKS = 16
"""Gradients, all over the model, that show whether a gradient scaler has unscaled some of them only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A measured step's sums over all workers, on the host."""

    step: int
    """Its number."""
    sums: StepSums
    """The sums."""
    skip: str
    """This worker's reason to skip the step; empty if it has none."""
    wide: bool
    """Whether squares were taken in float64."""


class StepMeter:
    """Collects a step's norms, adds them up over the workers and sends the sums to the host.

    On an accelerator the sums are on their way until `settle` is called; what it returns is then there at once,
    except where it is asked for in the very step.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        partition: Partition,
        *,
        microbatch: int | None,
        per_example: bool | Literal["fast"],
        loss_scaling: LossScaling,
        grad_scaler: Any,
        precondition_by: torch.optim.Optimizer | None,
    ) -> None:
        """Hook into `model`, which `layout` describes; the rest as in NoiseScaleMonitor."""
        self.loss_factor = 1.0
        """What each loss of the coming steps is multiplied by beside what `loss_scaling` says."""
        self._layout, self._scaler = layout, grad_scaler
        self._loss_scaling: LossScaling = loss_scaling
        self._device = next(model.parameters()).device
        self._num_elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.defer = self._device.type != "cpu"
        """Whether a step's sums are read only later."""
        self._groups = own_groups(layout.groups)
        self._under_way: tuple[int, Tensor, Any, StepNorms] | None = None
        kind = partial(ShardedCollector, loss_scaling=loss_scaling) if layout.kind == "fsdp" else GradientCollector
        self.collector: GradientCollector | ShardedCollector = kind(
            model,
            default_units=microbatch or 1,
            read_microbatches=not per_example,
            layout=layout,
            row_of=partition.row_of,
            num_rows=len(partition.names),
            weigh=None if precondition_by is None else metric_of(precondition_by),
            num_marks=1 if grad_scaler is None else SCALED_MARKS,
        )
        self._per_example: Any = None
        if per_example:
            from largebatch.noise.per_example.collector import PerExampleCollector

            self._per_example = PerExampleCollector(
                layout.ddp.module if layout.ddp is not None else model,
                group_of=partition.row_of,
                fast=per_example == "fast",
            )

    @property
    def enabled(self) -> bool:
        """Whether gradients are read."""
        return self.collector.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self.collector.enabled = enabled
        if self._per_example is not None:
            self._per_example.enabled = enabled

    @property
    def wide(self) -> bool:
        """Whether squares are taken in float64."""
        return self.collector.wide

    @wide.setter
    def wide(self, wide: bool) -> None:
        self.collector.wide = wide
        if self._per_example is not None:
            self._per_example.wide = wide

    @property
    def seconds(self) -> float:
        """Host time spent in hooks since the last step."""
        return self.collector.seconds + (0.0 if self._per_example is None else self._per_example.seconds)

    def microbatch(self, units: int) -> AbstractContextManager[None]:
        """All backwards inside are one microbatch."""
        return self.collector.microbatch(units)

    def measure(self, step: int, *, vote: int) -> None:
        """Add up the step's norms over the workers; `vote` is the cadence that this worker wants.

        Raises:
            ConfigError: this worker cannot measure the step. The others learn of it from their sums.
        """
        norms, failure = None, None
        try:
            unscaled = is_unscaled(self._scaler)
            norms = replace(self._take(may_be_unscaled=unscaled), wide=self.collector.wide)
            payload = pack(
                norms, loss_scaling=self._loss_scaling, vote=vote if self._layout.rank == 0 else 0,
                scale=loss_scale(self._scaler), unscaled=unscaled, factor=self.loss_factor,
            )  # fmt: skip
        except ConfigError as error:
            if not self._groups:
                raise
            failure, payload = error, refusal(self.collector.num_rows, self._device)
        sum_over_workers(payload, self._groups)
        if failure is not None or norms is None:
            raise failure or AssertionError("norms or a failure")
        self._under_way = self._send(step, payload, norms)

    def settle(self) -> Reading | None:
        """The last step's sums, if they were not read yet."""
        if self._under_way is None:
            return None
        (step, host, event, norms), self._under_way = self._under_way, None
        if event is not None:
            event.synchronize()
        sums = StepSums(
            values=tuple(host.tolist()), num_rows=self.collector.num_rows, num_elements=self._num_elements,
            world_size=self._layout.world_size, loss_scaling=self._loss_scaling, weighed=norms.weighed,
        )  # fmt: skip
        return Reading(step=step, sums=sums, skip=norms.skip, wide=norms.wide)

    def discard(self) -> None:
        """Forget the step under way and the sums that were not read."""
        self._under_way = None
        self.collector.discard()
        if self._per_example is not None:
            self._per_example.discard()

    def close(self) -> None:
        """Remove every hook."""
        self.collector.close()
        if self._per_example is not None:
            self._per_example.close()

    def _take(self, *, may_be_unscaled: bool) -> StepNorms:
        examples = self._per_example.take() if self._per_example is not None else []
        norms = self.collector.take(may_be_unscaled=may_be_unscaled)
        if self._per_example is None:
            return norms
        examples = examples[-len(norms.units) :]  # those before are of a step that was given up
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
            sq_norms=torch.cat([self._padded(part) for part in examples], dim=1).to(norms.sq_norm_step),
        )

    def _padded(self, norms: Tensor) -> Tensor:
        """With a row of zeros for each group that has no parameter."""
        return torch.nn.functional.pad(norms, (0, 0, 0, self.collector.num_rows - len(norms)))

    def _send(self, step: int, payload: Tensor, norms: StepNorms) -> tuple[int, Tensor, Any, StepNorms]:
        """Set off to the host, without waiting for it."""
        if payload.device.type == "cpu":
            return step, payload, None, norms
        is_cuda = payload.device.type == "cuda"
        host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=is_cuda)
        host.copy_(payload, non_blocking=is_cuda)
        event = torch.cuda.current_stream(payload.device).record_event() if is_cuda else None
        return step, host, event, norms
