"""How long is each example's own gradient, found in the one backward?

Module hooks keep what each layer saw and what its output's gradient was; when a parameter's gradient arrives, the
examples' parts of it are measured by the layer's rule (`largebatch.noise.per_example.rules`), or by torch.func
where there is none. A tensor hook reads, and the hook after accumulation commits.

The parts must add up to the gradient that arrived, along a random direction; where they do not, the parameter was
used out of sight of its layer, and nothing is measured.

An example is a row of the model's first input. For a language model that is a sequence: tokens inside one are not
independent, so their gradients are no sample, and the norms are those of sequences. A loss that compares examples
(contrastive, ranking) leaves none with a gradient of its own, which is not to be seen in the layers: ask
`largebatch.noise.per_example.check.check_independent`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.noise.collect.backwards import at_end, backward_id
from largebatch.noise.per_example.backward import (
    TOLERANCE,
    TOLERANCE_HALF,
    TOLERANCE_TF32,
    Arrival,
    Backward,
    Key,
    disagreement,
    excess_of,
    norms_of,
)
from largebatch.noise.per_example.calls import Call, Use
from largebatch.noise.per_example.forms import Factored, Form, Known, Probe, Summed, combine
from largebatch.noise.per_example.hooks import Clock
from largebatch.noise.per_example.rules import NORMS
from largebatch.noise.per_example.watch import CallWatcher

REMEDY = "Call it through its own layer with examples in dim 0, freeze it, or measure by microbatches."


class PerExampleCollector:
    """Reads the squared norm of every example's contribution to the gradients, in the backward that makes them.

    Exact for Linear, Conv1d/2d/3d, Embedding, LayerNorm, RMSNorm, GroupNorm, InstanceNorm and fixed BatchNorm,
    tied or called repeatedly; for tensors added to all examples (position embeddings, class tokens); by torch.func
    for other layers that hold parameters. Gradients stay as they are to the last bit, except with `fast`.

    Nothing is kept of a forward that no backward goes through, and one backward goes through a forward once.
    What cannot be told apart: a layer whose input has as many rows as there are examples, but other ones.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> collector = PerExampleCollector(model)
    >>> model(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).sum().backward()
    >>> collector.take()
    [tensor([[25.,  4.]])]

    Source: Goodfellow 2015 (arXiv:1510.01799) for the idea, Gray et al. 2024 (arXiv:2411.00999) for sequences;
    the check, the sums over several uses and convolutions are ours.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        group_of: Callable[[str], int] | None = None,
        fast: bool = False,
        only: Literal["norm layers"] | None = None,
    ) -> None:
        """Hook into every layer that holds a parameter.

        Args:
            model: called with examples in dim 0 of its first tensor.
            group_of: from a parameter's name in `model.named_parameters()` to the index of its group. None: one.
            fast: where the gradient of a Linear's or a convolution's weight is formed example by example, their
                sum becomes the gradient, which autograd then need not form: equal to about 1e-6, not bit by bit.
            only: "norm layers" measures the parameters of normalisation layers and nothing else.

        Raises:
            ConfigError: nothing to measure, or a model that is compiled, sharded or not initialised.
        """
        if only not in (None, "norm layers"):
            raise ConfigError(f"only={only!r} is not known. Use 'norm layers', or None for all parameters.")
        if any(hasattr(module, "_orig_mod") for module in model.modules()):
            raise ConfigError("a compiled model runs no hooks of its layers: measure before torch.compile.")
        layers = {name: module for name, module in model.named_modules() if only is None or isinstance(module, NORMS)}
        held = {id(parameter) for layer in layers.values() for parameter in layer.parameters(recurse=False)}
        named = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in held}
        if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in named.values()):
            raise ConfigError("a lazy layer has no parameters yet: run one forward before measuring.")
        if any(hasattr(parameter, "to_local") for parameter in named.values()):
            raise ConfigError(
                "sharded parameters (DTensor) have no per-example gradients here: use an unsharded model."
            )
        self._frozen = [parameter for parameter in named.values() if not parameter.requires_grad]
        self._named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        if not self._named:
            raise ConfigError(
                f"the model has no parameter that requires a gradient{' in norm layers' if only else ''}: there is "
                "nothing to measure."
            )
        self._group = [0 if group_of is None else group_of(name) for name in self._named]
        self._names = list(self._named)
        self._device = next(iter(self._named.values())).device
        generator = torch.Generator().manual_seed(0)
        self._probes = [Probe.draw(parameter, generator) for parameter in self._named.values()]
        self._group_sizes = [0] * (max(self._group) + 1)
        for group, parameter in zip(self._group, self._named.values(), strict=True):
            self._group_sizes[group] += parameter.numel()
        self._verified: set[Key] = set()
        self.wide = False
        """Whether squares are taken in float64, for gradients whose squares leave float32's range."""
        self._clock, self._lock, self._closed = Clock(), Lock(), False
        self._handles: list[Any] = []
        self.discard()
        self._watcher = CallWatcher(
            model,
            {id(parameter): index for index, parameter in enumerate(self._named.values())},
            layers=set(layers),
            use_of=self._use_of,
            derive=self._derive if fast else None,
            clock=self._clock,
        )
        self._attach()

    @property
    def seconds(self) -> float:
        """Host time spent in hooks since the last `take` or `discard`."""
        return self._clock.seconds

    @property
    def enabled(self) -> bool:
        """Whether backwards are measured; while not, the model has no hooks. To be set between steps."""
        return self._watcher.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if enabled != self.enabled and not self._closed:
            self._clock.timed(self._set_enabled)(enabled)

    def _set_enabled(self, enabled: bool) -> None:
        self._watcher.enabled = enabled
        if enabled:
            self._attach()
        else:
            self._detach()

    def _attach(self) -> None:
        for index, parameter in enumerate(self._named.values()):
            frozen = not parameter.requires_grad  # for now only: its gradients are not to be missed later
            parameter.requires_grad_(True)
            self._handles += (
                parameter.register_hook(self._clock.weakly(self._on_gradient, index)),
                parameter.register_post_accumulate_grad_hook(self._clock.weakly(self._on_accumulated, index)),
            )
            parameter.requires_grad_(not frozen)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._pending.clear()

    def take(self) -> list[Tensor]:
        """Return the squared norms of each backward since the last `take`, and forget them.

        Returns:
            One tensor per backward that reached a parameter, shape (num_groups, num_examples), float32 or wider,
            on the device of the model's first parameter. Norms are of what was accumulated: for a mean over B
            examples, B^2 times too small. The host waits for the device the first time that a parameter is
            used in a layer, to hold the parts against the whole; from then on they are held on the device, and
            norms that would be wrong are NaN.

        Raises:
            ConfigError: no example has a gradient of its own (BatchNorm in training), or a parameter was used
                where its examples are not seen; says where, and what to do. All that was collected is forgotten.

        Source: Goodfellow 2015 (arXiv:1510.01799); as in `PerExampleCollector`.
        """
        backwards = list(self._backwards.values())
        self.discard()
        if any(parameter.grad is not None for parameter in self._frozen):
            raise ConfigError(
                "a parameter that was frozen when its examples' hooks were made has a gradient: make them after "
                "unfreezing."
            )
        for backward in backwards:
            refusal = backward.refusal or disagreement(list(backward.scopes.values()))
            if refusal is not None:
                raise ConfigError(refusal)
        self._verify([check for backward in backwards for check in backward.checks])
        return [norms_of(backward, self._group_sizes, self._device) for backward in backwards]

    def discard(self) -> None:
        """Forget what was collected since the last `take`."""
        self._backwards: dict[int, Backward] = {}
        self._running: Backward | None = None
        self._pending: dict[int, Arrival] = {}
        self._clock.seconds = 0.0

    def close(self) -> None:
        """Remove every hook."""
        self.enabled, self._closed = False, True
        self.discard()

    def _verify(self, checks: list[tuple[Key, Tensor]]) -> None:
        """Hold new uses of parameters to their gradient, on the host; one that is not finite says nothing yet."""
        new = [(key, excess) for key, excess in checks if key not in self._verified]
        if not new:
            return
        for (name, *layers), excess in zip(
            (key for key, _ in new), torch.stack([excess for _, excess in new]).tolist(), strict=True
        ):
            if excess > 1:
                raise ConfigError(
                    f"the gradient of {name!r} is not the sum of what came through {', '.join(map(repr, layers))}: it "
                    f"is used elsewhere too, or the layer draws at random. {REMEDY}"
                )
            if excess <= 1:
                self._verified.add((name, *layers))

    def _backward(self, number: int) -> Backward:
        """The backward that runs, which may have begun just now, on this device's thread or on another's."""
        running = self._running
        if running is not None and running.number == number:
            return running
        with self._lock:
            running = self._running
            if running is None or running.number != number:
                self._pending.clear()
                running = self._backwards.get(number) or Backward(number=number)
                at_end(partial(self._end, number))
                self._running = running
        return running

    def _end(self, number: int) -> None:
        """Let go what a backward left behind (a probe leaves all)."""
        if self._running is not None and self._running.number == number:
            self._running = None

    def _use_of(self, call: Call) -> Use | None:
        """What the running backward has of a call, while it goes through it; None if nothing is to be kept."""
        number = backward_id()
        if not self.enabled or number < 0:
            return None
        backward = self._backward(number)
        use = backward.by_call.get(id(call))
        if use is None:
            gone, tensors = call.take_tensors(number)
            use = Use(call=call, tensors=tensors, gone=gone, waiting=set(call.names))
            backward.by_call[id(call)] = use
            for index in call.names:
                backward.uses.setdefault(index, []).append(use)
        return use

    def _derive(self, call: Call, x: Tensor, grad: Tensor) -> list[Tensor]:
        """The fast mode: a layer's gradients from those of its examples, whose norms are found on the way."""
        assert call.rule is not None, call.name
        use = self._use_of(call)
        gradients: list[Tensor] = []
        with _widely(grad):
            forms = call.rule(call.module, x, grad)
            for index, name in call.names.items():
                (form,), probe = self._precise([forms[name]], index)
                parameter = self._named[self._names[index]]
                assert isinstance(form, Factored | Summed), call.name
                total, measured = form.sum_and_measure(probe)
                gradients.append(total.view_as(parameter).to(parameter.dtype))
                if use is not None:
                    use.delivered[name] = Known(form, measured)
        return gradients

    def _on_gradient(self, index: int, grad: Tensor) -> None:
        """Measure the examples' parts of one gradient on its way; whether it stays is not known yet."""
        if not self.enabled:
            return
        number = backward_id()
        name = self._names[index]
        backward = self._backward(number)
        uses = backward.uses.pop(index, [])
        for use in uses:
            use.waiting.discard(index)
            if not use.waiting:
                del backward.by_call[id(use.call)]
        refusal = next((use.gone or use.call.refusal for use in uses if use.gone or use.call.refusal), None)
        if not uses:
            refusal = f"the gradient of {name!r} came from outside the layers whose examples are seen. {REMEDY}"
        if refusal is not None:
            self._pending[index] = Arrival(backward=backward, uses=uses, refusal=refusal)
            return
        self._watcher.replaying = True
        key = (name, *(use.call.name for use in uses))
        dtypes = [grad.dtype, *(tensor.dtype for use in uses for tensor in use.grads.values())]
        allowed = max(TOLERANCE.get(dtype, TOLERANCE_HALF) for dtype in dtypes)
        allowed = allowed if grad.device.type == "cpu" else max(allowed, TOLERANCE_TF32)
        new = key not in self._verified
        try:
            with _widely(grad):
                forms, probe = self._precise([use.form(use.call.names[index]) for use in uses], index)
                if len(forms) == 1:
                    measured = forms[0].measure(probe, careful=new)
                else:
                    measured = combine(forms, probe, careful=new)
                whole = probe.of(grad)
                gap, moved = measured.projected - whole, measured.projected.abs() + whole.abs()
                check = (key, excess_of(gap, grad, measured, allowed)) if new else None
        except ConfigError as error:
            self._pending[index] = Arrival(backward=backward, uses=uses, refusal=str(error))
        else:
            self._pending[index] = Arrival(
                backward=backward,
                uses=uses,
                sq_norms=measured.sq_norms,
                gap=gap,
                moved=moved,
                allowed=allowed,
                check=check,
            )
        finally:
            self._watcher.replaying = False

    def _on_accumulated(self, index: int, _: Tensor) -> None:
        """Commit what `_on_gradient` read, now that the parameter has taken the gradient."""
        arrival = self._pending.pop(index, None)
        if arrival is None or arrival.backward.number != backward_id():
            return
        with self._lock:
            self._commit(index, arrival)

    def _commit(self, index: int, arrival: Arrival) -> None:
        backward = self._backwards.setdefault(arrival.backward.number, arrival.backward)
        backward.refusal = backward.refusal or arrival.refusal
        for use in arrival.uses:
            backward.scopes[id(use.call.scope)] = use.call.scope
            backward.refusal = backward.refusal or use.call.commit(index, backward.number)
        if backward.refusal is not None or arrival.sq_norms is None or arrival.gap is None or arrival.moved is None:
            return
        backward.norms.setdefault(self._group[index], []).append(arrival.sq_norms)
        backward.moved.setdefault(self._group[index], []).append(arrival.moved)
        backward.gaps.append(arrival.gap)
        backward.allowed = max(backward.allowed, arrival.allowed)
        if arrival.check is not None:
            backward.checks.append(arrival.check)

    def _precise(self, forms: list[Form], index: int) -> tuple[list[Form], Probe]:
        """Forms of a parameter and its probe, in float64 if that is asked for and the device has it."""
        probe = self._probes[index]
        if not self.wide or probe.rows.device.type == "mps":
            return forms, probe
        return [form.double() for form in forms], probe.double()


@contextmanager
def _apart(kind: str) -> Generator[None, None, None]:
    """No autograd and no autocast."""
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        yield


def _widely(tensor: Tensor) -> AbstractContextManager[None]:
    """Squared norms are made in float32 or wider, and leave no graph; nothing is entered where that is so already."""
    kind = tensor.device.type
    return _apart(kind) if torch.is_grad_enabled() or torch.is_autocast_enabled(kind) else nullcontext()
