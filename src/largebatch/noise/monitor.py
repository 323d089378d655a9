"""Is my batch too small or too large? The noise scale of a training loop, while it runs.

Three lines in a loop that accumulates K >= 2 backwards a step:

    monitor = NoiseScaleMonitor(model, microbatch=32)
    monitor.step()  # after the last backward, before clipping and optimizer.step()
    print(monitor.noise_scale)
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, get_args

from torch import nn

from largebatch.errors import ConfigError
from largebatch.noise.collect import Collected, GradientCollector
from largebatch.noise.estimate import NoiseScale, RunningNoiseScale
from largebatch.noise.moments import StepMoments, solve_moments
from largebatch.units import Duration, check_unit

LossScaling = Literal["step_mean", "microbatch_mean", "sum"]

logger = logging.getLogger(__name__)


class NoiseScaleMonitor:
    """Measures tr(Sigma), |G|^2 and B_simple of a model in training, and changes nothing in it.

    Each backward is taken for one microbatch (`microbatch` says otherwise), and the microbatches of a step for
    independent draws. Gradients, weights and random numbers stay as they are, bit for bit; gradients are read,
    not kept. One transfer to the host per measured step.

    One process without a gradient scaler for now; layers that couple examples (batch norm in training,
    contrastive losses) make the noise of a microbatch more than that of its units.

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
        microbatch: int,
        loss_scaling: LossScaling = "step_mean",
        unit: str = "examples",
        every: int = 1,
        dataset_size: int | None = None,
        half_life: float | Duration | None = None,
    ) -> None:
        """Hook into the parameters of `model` that require a gradient now.

        Args:
            model: the model in training, not wrapped in DDP or FSDP.
            microbatch: units in one backward, >= 1; uneven ones go through `microbatch(units)`.
            loss_scaling: how the loss of microbatch i (b_i of the step's B units) is scaled before its backward.
                "step_mean": its sum over the units divided by B (for even microbatches: its mean over the
                number of microbatches). "microbatch_mean": its mean. "sum": its sum.
            unit: what a batch counts.
            every: measure every this many steps, the first one included.
            dataset_size: examples that a step draws from without replacement; the target is then the gradient
                over these examples, without it the gradient over the population (see `solve_moments`).
            half_life: None averages over the whole run; else measured steps (a number or a Duration in steps)
                or units (a Duration in `unit`) of measured steps after which a step's weight has halved.

        Raises:
            ConfigError: a value out of range, nothing to train, or a model that is wrapped for many processes.
        """
        if loss_scaling not in get_args(LossScaling):
            options = ", ".join(map(repr, get_args(LossScaling)))
            raise ConfigError(f"loss_scaling {loss_scaling!r} is not known. Use one of: {options}.")
        for name, value in (("microbatch", microbatch), ("every", every), ("dataset_size", dataset_size)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is a whole number of at least 1; got {value!r}.")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError("DistributedDataParallel is not supported yet: its gradients are averaged over workers.")
        self.unit = check_unit(unit)
        self.num_steps = 0
        """Calls of `step`, measured or not."""
        self.num_skipped = 0
        """Steps that were to be measured but had a gradient that is not finite, or were given up."""
        self._loss_scaling: LossScaling = loss_scaling
        self._every = every
        self._dataset_size = dataset_size
        self._running = RunningNoiseScale(half_life=half_life, unit=unit)
        self._collector = GradientCollector(model.parameters(), default_units=microbatch)

    @property
    def noise_scale(self) -> NoiseScale:
        """B_simple over the steps measured so far, with its 95 % interval or the reason why there is none."""
        return self._running.estimate()

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
            The step's moments; None if it was not to be measured (`every`), or was skipped because a gradient
            was not finite or a context had its first unforeseen second backward.

        Raises:
            ConfigError: one microbatch only, no backward, gradients zeroed too early or not at all, or more
                units than `dataset_size`.
        """
        measured = self._collector.enabled
        self.num_steps += 1
        self._collector.enabled = self.num_steps % self._every == 0
        if not measured:
            return None
        collected = self._collector.take()
        norms = (*collected.sq_norms, collected.sq_norm_step)
        if not collected.exact or not all(map(math.isfinite, norms)):
            self.num_skipped += 1
            cause = "a gradient is not finite" if collected.exact else "a microbatch had an unforeseen second backward"
            logger.warning("noise scale: step %d is not measured: %s.", self.num_steps, cause)
            return None
        moments = self._solve(collected)
        self._running.update(trace_cov=moments.trace_cov, grad_sq_norm=moments.grad_sq_norm, batch=moments.batch)
        return moments

    def _solve(self, collected: Collected) -> StepMoments:
        """From the norms of what was accumulated, a_i g_i, to the moments of the mean gradient."""
        batch = sum(collected.units)
        if self._loss_scaling == "step_mean":
            coefficients = [units / batch for units in collected.units]
        elif self._loss_scaling == "microbatch_mean":
            coefficients = [1.0] * len(collected.units)
        else:
            coefficients = [float(units) for units in collected.units]
        return solve_moments(
            [norm / a**2 for norm, a in zip(collected.sq_norms, coefficients, strict=True)],
            collected.units,
            collected.sq_norm_step,
            coefficients=coefficients,
            dataset_size=self._dataset_size,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, to be saved between steps; what `load_state_dict` goes on from, bit for bit."""
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "buffering": self._collector.buffering,
            "running": self._running.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; raises CheckpointError if it was saved with another half-life or unit."""
        self._running.load_state_dict(state["running"])
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self._collector.buffering = state["buffering"]
        self._collector.enabled = self.num_steps % self._every == 0

    def close(self) -> None:
        """Remove the hooks; the noise scale measured so far stays readable."""
        self._collector.close()

    def __enter__(self) -> NoiseScaleMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
