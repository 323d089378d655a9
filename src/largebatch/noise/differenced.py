"""How noisy is a gradient, told from two steps in a row?

For loops with one backward a step and no way to divide it: two consecutive steps serve as two microbatches of one, so
that nothing but p.grad is needed. It is BIASED, because the weights move in between, along the noise of the first
gradient, so that the second one is turned against it. For SGD on a quadratic with Hessian H, learning rate eps and
batch B

    E[tr(Sigma)^] = tr(Sigma) + eps tr(H Sigma) + (eps^2 / 2) (tr(H^2 Sigma) + B G'H^2 G)
    E[|G|^2^]     = G'(1 - eps H) G - eps tr(H Sigma) / B

tr(Sigma) comes out too large and |G|^2 too small: near eps_opt(B) the noise scale may be several times too large.
Where it can be had, accumulation, a second worker or `per_example=True` has no such bias.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.errors import CheckpointError, ConfigError
from largebatch.noise.collect.layout import find_layout, named_trainable
from largebatch.noise.collect.norms import flat_view, sq_norm
from largebatch.noise.collect.scaler import is_unscaled, loss_scale
from largebatch.noise.estimate import NoiseScale, RunningNoiseScale
from largebatch.noise.moments import StepMoments, solve_moments
from largebatch.units import Duration

logger = logging.getLogger(__name__)


class DifferencedNoise:
    """The noise scale from pairs of consecutive steps; biased by the step between them (see above).

    Holds one copy of the gradients between the two steps of a pair, and none otherwise. Every pair ends with one
    transfer to the host.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> noise = DifferencedNoise(model, batch=8, every=2)
    >>> for row in ([3.0, 4.0], [1.0, 2.0]):
    ...     model.zero_grad()
    ...     model(torch.tensor([row])).sum().backward()
    ...     moments = noise.step()
    >>> moments.trace_cov, moments.grad_sq_norm
    (32.0, 11.0)

    Source: the differenced form of the many-worker estimator (McCandlish et al. 2018, eq. A.2, with two steps as two
    workers), as Qiao et al. 2021 (Pollux) use it where there is a single gradient a step. The bias is derived here.
    """

    caveat = "differenced: the weights move between its two gradients, which makes it too large"
    """What is to be said wherever its number is shown."""

    def __init__(
        self,
        model: nn.Module,
        *,
        batch: int,
        unit: str = "examples",
        every: int = 20,
        half_life: float | Duration | None = None,
        grad_scaler: Any = None,
    ) -> None:
        """Watch the gradients of `model`, whose steps are over `batch` units on all workers together.

        Args:
            model: plain, or wrapped in DistributedDataParallel.
            batch: units in one step, >= 1, the same in every step. The gradient is their mean.
            unit: what a batch counts.
            every: begin a pair every this many steps, at least 2.
            half_life: as in NoiseScaleMonitor, in pairs or units.
            grad_scaler: the torch.amp.GradScaler in use.

        Raises:
            ConfigError: a value out of range, or a model whose gradients are sharded or cannot be read.
        """
        for name, value, least in (("batch", batch, 1), ("every", every, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is a whole number of at least {least}; got {value!r}.")
        self._layout = find_layout(model)
        if self._layout.kind == "fsdp":
            raise ConfigError("sharded gradients are not differenced: NoiseScaleMonitor measures them, without bias.")
        self.num_steps = 0
        """Calls of `step`."""
        self.num_skipped = 0
        """Pairs with a gradient that was not finite."""
        self._model, self._batch, self._every, self._scaler = model, batch, every, grad_scaler
        self._running = RunningNoiseScale(half_life=half_life, unit=unit)
        self._first: dict[str, Tensor] | None = None
        logger.warning("noise scale: %s.", self.caveat)

    @property
    def noise_scale(self) -> NoiseScale:
        """B_simple over the pairs so far; its interval knows of the noise, not of the bias."""
        return self._running.estimate()

    def step(self) -> StepMoments | None:
        """Take in the step's gradients; call once a step, before clipping and optimizer.step().

        Returns:
            The moments of the pair that this step ends; None if it ends none, or a gradient is not finite.

        Raises:
            ConfigError: no parameter has a gradient.
        """
        place = self.num_steps % self._every
        self.num_steps += 1
        if place > 1 or (place == 1 and self._first is None):
            return None
        gradients = {
            name: p.grad.detach() for name, p in named_trainable(self._model, self._layout) if p.grad is not None
        }
        if not gradients:
            raise ConfigError("no parameter has a gradient: call step() after the backward and before zero_grad().")
        factor = 1.0 if is_unscaled(self._scaler) else 1 / torch.as_tensor(loss_scale(self._scaler))
        gradients = {name: grad * factor for name, grad in gradients.items()}
        if place == 0:
            self._first = gradients
            return None
        (first, self._first) = (self._first or {}), None
        before, now, between = _sums(
            [sq_norm(grad) for grad in first.values()],
            [sq_norm(grad) for grad in gradients.values()],
            [_dot(first[name], grad) for name, grad in gradients.items() if name in first],
        )
        mean = (before + now + 2 * between) / 4
        if not (math.isfinite(before) and math.isfinite(now) and math.isfinite(between)):
            self.num_skipped += 1
            return None
        moments = solve_moments([before, now], [self._batch] * 2, mean)
        self._running.update(trace_cov=moments.trace_cov, grad_sq_norm=moments.grad_sq_norm, batch=moments.batch)
        return moments

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; half a pair is not among them."""
        return {"num_steps": self.num_steps, "num_skipped": self.num_skipped, "running": self._running.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; raises CheckpointError if it is none."""
        try:
            numbers = int(state["num_steps"]), int(state["num_skipped"])
            self._running.load_state_dict(state["running"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"this is no state of a DifferencedNoise: {error!r}.") from error
        self.num_steps, self.num_skipped = numbers
        self._first = None


def _sums(*lists: Sequence[Tensor]) -> list[float]:
    """The sum of each list of 0-dim tensors, in float64 on the host, after one transfer for all; the first has some."""
    device = lists[0][0].device
    # In float64 where the device has it: float32 squares stay as they are, float64 products lose nothing.
    numbers = iter(torch.stack([value.to(device) for values in lists for value in values]).tolist())
    return [sum(itertools.islice(numbers, len(values))) for values in lists]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    same = a.stride() == b.stride()
    a, b = (flat_view(x) if same else x.reshape(-1) for x in (a, b))
    return torch.dot(a.double(), b.double()) if a.device.type != "mps" else torch.dot(a.float(), b.float())
