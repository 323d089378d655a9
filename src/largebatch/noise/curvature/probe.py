"""What are the gradient and its products with the Hessian at these weights, without a trace left in the model?

`torch.autograd.grad` returns gradients and accumulates none, so `.grad` stays as it is. A Hessian-vector product is a
second backward, through the graph of the first (Pearlmutter 1994). Random layers draw from a stream that belongs
to the probe, and buffers that a forward changes are set back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.noise.collect.fsdp import is_fsdp_module

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> the SUM of the losses of the batch's units, a scalar."""
Count = Callable[[Any], int]
"""Units in a batch."""

_NO_SECOND_DERIVATIVE = re.compile(r"derivative for .* is not implemented|differentiate twice|[Dd]ouble.?backward")


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvatureProducts:
    """Products of two mean gradients, g_A and g_B, with the Hessian H_C of another microbatch's mean loss."""

    h_aa: float
    """g_A'H_C g_A."""
    h_ab: float
    """g_A'H_C g_B."""
    h_bb: float
    """g_B'H_C g_B."""
    h_own: float | None
    """(g_A + g_B)'H_C g_C / 2 with the microbatch's own mean gradient g_C; None where it was not asked for."""
    h_cc: float | None
    """g_C'H_C g_C; None where it was not asked for."""
    units_c: int
    """Units of the microbatch."""


class GradientProbe:
    """Gradients and Hessian products of a model at its weights."""

    def __init__(self, model: nn.Module, loss: Loss, count: Count | None = None, *, stream: int = 0) -> None:
        """Check the model.

        Args:
            model: any module whose units do not see each other, not wrapped or sharded for many processes.
            loss: (model, batch) -> sum over units.
            count: units in a batch; None: the length of its first tensor.
            stream: probes whose random layers must not draw the same have different ones.

        Raises:
            ConfigError: nothing to train, batch norm on batch statistics, or a wrapped or sharded model.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError("DistributedDataParallel is not supported: give the model inside it, model.module.")
        for name, module in model.named_modules():
            if is_fsdp_module(module):
                raise ConfigError(
                    f"fully_shard splits the weights of {name or 'the model'!r} over workers, and products with the "
                    "Hessian are not taken through it: measure on a plain copy with the same weights."
                )
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (  # pyright: ignore[reportPrivateUsage]
                module.training or module.running_mean is None
            ):
                raise ConfigError(
                    f"batch norm {name!r} uses batch statistics, which couple the units of a microbatch: their "
                    "gradients are not independent, and the noise would be that of microbatches. Call model.eval() "
                    "while measuring, with running statistics."
                )
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """What gradients are taken with respect to."""
        if not self.parameters:
            raise ConfigError("the model has no parameter that requires a gradient: there is nothing to measure.")
        self._model, self._loss, self._count = model, loss, count or count_first
        self._devices = sorted({p.device.index for p in self.parameters if p.device.type == "cuda"})
        self._buffers = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
        self._stream, self._seed = stream, -1
        self._random: list[Tensor] = []

    def units(self, batch: Any) -> int:
        """Units in a batch; raises ConfigError if that is no whole number of at least 1."""
        units = self._count(batch)
        check_counts(**{"count(batch)": units})
        return units

    def total_loss(self, batch: Any) -> Tensor:
        """The batch's loss, summed over its units; raises ConfigError unless it is one number. Use in `no_trace`."""
        total = self._loss(self._model, batch)
        if total.ndim != 0:
            raise ConfigError(
                f"a loss is one number, the sum over the batch's units; got a tensor of shape {tuple(total.shape)}. "
                "Use reduction='sum'."
            )
        return total

    def mean_gradient(self, batches: Sequence[Any]) -> tuple[list[Tensor], int]:
        """The gradient of the mean loss over all units of the batches, one tensor a parameter, and their number."""
        sums = [torch.zeros_like(parameter) for parameter in self.parameters]
        total = 0
        for batch in batches:
            total += self.units(batch)
            with self.no_trace():
                grads = self._gradients(batch, create_graph=False)
            for kept, grad in zip(sums, grads, strict=True):
                kept.add_(grad)
        return [kept.div_(total) for kept in sums], total

    def inner_products(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[float, float, float]:
        """(a'a, a'b, b'b) over all parameters."""
        aa, ab, bb = torch.stack([_dot(a, a), _dot(a, b), _dot(b, b)]).tolist()
        return aa, ab, bb

    def curvature(
        self, grad_a: Sequence[Tensor], grad_b: Sequence[Tensor], batch: Any, *, own: bool
    ) -> CurvatureProducts:
        """Products of two mean gradients with the Hessian of `batch`; with its own gradient too if `own`.

        Raises:
            ConfigError: a layer that cannot be differentiated twice.
        """
        units = self.units(batch)
        with self.no_trace(), _second_derivatives():
            grads = self._gradients(batch, create_graph=True)
            grad_c = [grad.detach() for grad in grads]
            h_a = self._hessian_times(grads, grad_a, keep_graph=True)
            dots = [_dot(grad_a, h_a), _dot(grad_b, h_a), _dot(grad_c, h_a)]
            h_b = self._hessian_times(grads, grad_b, keep_graph=own)
            dots += [_dot(grad_b, h_b), _dot(grad_c, h_b)]
            if own:
                dots.append(_dot(grad_c, self._hessian_times(grads, grad_c, keep_graph=False)))
        # All are of the summed loss: one factor 1/units for its Hessian, one for each of its gradients.
        h_aa, h_ab, h_ac, h_bb, h_bc, *h_cc = [dot / units for dot in torch.stack(dots).tolist()]
        return CurvatureProducts(
            h_aa=h_aa,
            h_ab=h_ab,
            h_bb=h_bb,
            h_own=(h_ac + h_bc) / 2 / units if own else None,
            h_cc=h_cc[0] / units**2 if own else None,
            units_c=units,
        )

    @contextmanager
    def no_trace(self) -> Generator[None, None, None]:
        """Inside, random layers draw from the probe's own stream; at the end buffers are set back."""
        with torch.random.fork_rng(devices=self._devices):
            self._resume_stream()
            try:
                with torch.enable_grad():
                    yield
            finally:
                self._random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]
                with torch.no_grad():
                    for buffer, version, before in self._buffers:
                        if buffer._version != version:
                            buffer.copy_(before)

    def restart_stream(self) -> None:
        """Let random layers draw again what they drew first, so that two losses differ by the weights alone."""
        self._random = []

    def _resume_stream(self) -> None:
        if self._random:
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            return
        if self._seed < 0:
            # Drawn from torch's stream, which is set back: reproducible, and not what the data were drawn with.
            self._seed = int(torch.randint(2**62, ())) + self._stream
        # torch.manual_seed would also seed devices on which nothing is to change.
        torch.default_generator.manual_seed(self._seed)
        for device in self._devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(self._seed)

    def _gradients(self, batch: Any, *, create_graph: bool) -> Sequence[Tensor]:
        return torch.autograd.grad(
            self.total_loss(batch),
            self.parameters,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )

    def _hessian_times(self, grads: Sequence[Tensor], vector: Sequence[Tensor], *, keep_graph: bool) -> list[Tensor]:
        # A gradient that does not depend on any weight has no graph, and adds nothing.
        pairs = [(grad, part) for grad, part in zip(grads, vector, strict=True) if grad.requires_grad]
        if not pairs:
            return [torch.zeros_like(parameter) for parameter in self.parameters]
        outputs, parts = zip(*pairs, strict=True)
        return list(
            torch.autograd.grad(
                outputs, self.parameters, parts, retain_graph=keep_graph, allow_unused=True, materialize_grads=True
            )
        )


@contextmanager
def _second_derivatives() -> Generator[None, None, None]:
    """Say in our words which layer cannot be differentiated twice."""
    try:
        yield
    except RuntimeError as error:
        if not _NO_SECOND_DERIVATIVE.search(str(error)):
            raise
        raise ConfigError(
            f"B_noise needs second derivatives, and a layer of the model has none ({str(error).splitlines()[0]}). If "
            "it is attention, measure inside `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):`; for a cuDNN "
            "RNN inside `with torch.backends.cudnn.flags(enabled=False):`."
        ) from error


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The inner product over all parameters: products in float32 or wider, summed in float64."""
    dots = [
        (a.float() * b.float() if a.dtype.itemsize < 4 else a * b).sum(dtype=torch.float64)
        for a, b in zip(left, right, strict=True)
    ]
    return torch.stack([dot.to(dots[0].device) for dot in dots]).sum()


def count_first(batch: Any) -> int:
    """Units of a batch that is a tensor, or a tuple or list that starts with one: that tensor's length."""
    first = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(first, Tensor):
        raise ConfigError(f"cannot tell how many units a {type(batch).__name__} holds. Give count: batch -> units.")
    return len(first)


def check_counts(**values: Any) -> None:
    """Raise ConfigError for the first value that is no whole number of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is a whole number of at least 1; got {value!r}.")
