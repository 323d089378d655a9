"""Which layers were called, on which examples, on the way to the loss?

Hooks on the modules of a model: the outermost call says what the examples are, each layer that holds parameters
leaves a `Call`, and hooks on its output bring the gradient to the backward that runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree

from largebatch.errors import ConfigError
from largebatch.noise.collect.backwards import backward_id
from largebatch.noise.per_example import fallback
from largebatch.noise.per_example.calls import (
    KEPT,
    Call,
    Deliver,
    Scope,
    Use,
    consumers,
    first_shape,
    keep,
    reduce_examples,
)
from largebatch.noise.per_example.forms import Summed
from largebatch.noise.per_example.hooks import Clock
from largebatch.noise.per_example.rules import DERIVABLE, couples, fast_pays, num_dims, rule_for

BROADCASTS = {"AddBackward0", "ExpandBackward0"}
"""Operations that give all examples one tensor: position embeddings, class tokens."""
RESHAPES = {"UnsqueezeBackward0", "ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0", "TBackward0"}
"""Operations behind which it is not followed what becomes of a row."""

UseOf = Callable[[Call], Use | None]
Derive = Callable[[Call, Tensor, Tensor], Sequence[Tensor]]


class _Thread(local):
    """What is under way in one thread."""

    replaying = False


class CallWatcher:
    """Keeps what layers are called with, and hands each gradient of an output to its `Use`."""

    def __init__(
        self,
        model: nn.Module,
        index: Mapping[int, int],
        *,
        layers: Set[str],
        use_of: UseOf,
        derive: Derive | None,
        clock: Clock,
    ) -> None:
        """Hook into the modules.

        Args:
            model: whatever module is called from outside owns the examples.
            index: id of each parameter to be measured -> its index.
            layers: names of the modules that are listened to.
            use_of: what the running backward has of a call; None if it keeps nothing.
            derive: (call, input, gradient of the output) -> gradients of its parameters, for the fast mode.
            clock: what hooks are timed by.
        """
        self._enabled = False
        self._index, self._use_of, self._derive, self._clock = index, use_of, derive, clock
        self._anchor = torch.zeros((), requires_grad=True)
        self._scope: Scope | None = None
        self._thread = _Thread()
        self._frozen: tuple[nn.Module, dict[str, Tensor]] | None = None
        self._thawed: tuple[nn.Module, dict[str, Tensor]] | None = None
        self._handles: list[Any] = []
        self._places = [
            (
                name,
                module,
                name in layers,
                derive is not None and name in layers and isinstance(module, DERIVABLE),
                isinstance(module, _BatchNorm) or (name in layers and bool(self._own(module))),
            )
            for name, module in model.named_modules()
        ]
        """Each module: its name, whether it is listened to, may be derived, and keeps its calls."""
        self.enabled = True

    @property
    def enabled(self) -> bool:
        """Whether calls are watched; while not, the modules have no hooks."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if enabled == self._enabled:
            return
        self._enabled = enabled
        if enabled:
            self._attach()
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._frozen is not None:
            self._thaw(self._frozen[0], None, None)
        self._scope = self._thawed = None

    def _attach(self) -> None:
        """Hook into the modules: after others on the way in, before others on the way out, whoever came first."""
        weakly, add = self._clock.weakly, self._handles.append
        for name, module, listening, derived, kept in self._places:
            add(module.register_forward_pre_hook(weakly(self._on_enter), with_kwargs=True))
            add(module.register_forward_hook(weakly(self._on_leave), prepend=True, always_call=True))
            if kept:
                on_call = weakly(self._on_call, name, listening)
                add(module.register_forward_hook(on_call, prepend=True, with_kwargs=True))
            if derived:
                add(module.register_forward_pre_hook(weakly(self._freeze)))
                add(module.register_forward_hook(weakly(self._thaw), prepend=True, always_call=True))

    @property
    def replaying(self) -> bool:
        """Whether this thread runs a layer again by torch.func: such calls are none."""
        return self._thread.replaying

    @replaying.setter
    def replaying(self, replaying: bool) -> None:
        self._thread.replaying = replaying

    def _own(self, module: nn.Module) -> dict[int, str]:
        """Index of each parameter that is measured by this module's calls -> its name in the module."""
        # MultiheadAttention uses the weight of its child without calling it.
        whole = isinstance(module, nn.MultiheadAttention)
        named = module.named_parameters(recurse=whole)
        return {
            self._index[id(parameter)]: name
            for name, parameter in named
            if id(parameter) in self._index and parameter.requires_grad
        }

    def _watching(self) -> bool:
        return self.enabled and not self.replaying and torch.is_grad_enabled()

    def _on_enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The outermost call says what an example is."""
        if self._frozen is not None:  # Ctrl-C inside a layer: no hook is called after that
            self._thaw(self._frozen[0], None, None)
        if self._scope is not None and self._scope.owner is module and not self.replaying and not _is_inside(module):
            self._scope = None  # the same: nobody has closed it
        if self._scope is not None:
            self._scope.depth += self._scope.owner is module and not self.replaying
        elif self._watching():
            shape = first_shape((args, kwargs)) or ()
            self._scope = Scope(owner=module, num_examples=shape[0] if shape else None, num_dims=len(shape))

    def _on_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """The outermost call ends: find out to whom the tensors went that may be the same for all examples."""
        scope = self._scope
        if scope is None or scope.owner is not module or self.replaying:
            return
        if scope.depth:
            scope.depth -= 1
            return
        self._scope = None
        calls, scope.candidates = scope.candidates, []
        if calls:
            self._find_shared(calls, [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)])

    def _freeze(self, module: nn.Module, args: Any) -> None:
        """The fast mode: let the layer run without its parameters' gradients, which `Deliver` will make."""
        if not self._watching() or len(args) != 1 or rule_for(module) is None or not fast_pays(module, args[0]):
            return
        own = dict(module.named_parameters(recurse=False))
        names = list(self._own(module).values())
        if "weight" in names:
            self._frozen = (module, {name: own[name] for name in names})
            for parameter in self._frozen[1].values():
                parameter.requires_grad_(False)

    def _thaw(self, module: nn.Module, args: Any, output: Any) -> None:
        """The layer has run, or raised: its parameters are as they were."""
        if self._frozen is not None and self._frozen[0] is module:
            for parameter in self._frozen[1].values():
                parameter.requires_grad_(True)
            self._thawed, self._frozen = self._frozen if output is not None else None, None

    def _on_call(self, name: str, listening: bool, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """A layer was called: keep what its rule will need, and listen to its output."""
        thawed, self._thawed = self._thawed if self._thawed and self._thawed[0] is module else None, None
        scope = self._scope
        if scope is None or not self._watching():
            return None
        reason = couples(module)
        if reason is not None:
            scope.refusal = scope.refusal or f"{name!r}: {reason}"
        names = self._own(module) if listening else {}
        if not names:
            return None
        call = Call(module=module, name=name, scope=scope, rule=rule_for(module), names=names, open=set(names))
        again = backward_id() >= 0
        if again:
            call.refusal = (
                f"{name!r} ran inside a backward, as activation checkpointing does with use_reentrant=True. Use "
                "use_reentrant=False."
            )
        if call.rule is None:
            self._keep_all(call, args, kwargs, output)
            return None
        x = args[0] if args else next(iter(kwargs.values()))
        call.refusal = call.refusal or self._misshapen(call, x)
        if thawed is not None:
            assert self._derive is not None and thawed[1].keys() == set(names.values()), name
            return Deliver.apply(output, x, self._clock.timed(self._derive, call), *thawed[1].values())
        if "weight" in names.values():
            call.kept = keep(self._anchor, [x])
        # A Linear over several leading dims gives a view of its result; written into, its hooks move to that.
        whole = output._base if output._is_view() else None
        if output.requires_grad:
            target = whole if whole is not None and whole.numel() == output.numel() else output
            target.register_hook(self._clock.weakly(self._on_output, call, 0, output.shape))
            shareable = isinstance(module, nn.Embedding) and not again
            if shareable and (call.refusal is not None or x.dim() == 1 < scope.num_dims):
                call.shape, call.node = output.shape, output.grad_fn
                scope.candidates.append(call)
        return None

    def _misshapen(self, call: Call, x: Tensor) -> str | None:
        """Why this input has no examples in dim 0; None if it has, for all that its shape says."""
        num_examples = call.scope.num_examples
        if x.dim() >= num_dims(call.module) and x.shape[0] == num_examples:
            return None
        return (
            f"{call.name!r} ({type(call.module).__name__}) got an input of shape {tuple(x.shape)} while "
            f"{type(call.scope.owner).__name__} was called with {num_examples} examples. Keep the examples in dim 0 of "
            "every layer's input: (batch, time, features) instead of (batch * time, features)."
        )

    def _keep_all(self, call: Call, args: Any, kwargs: Any, output: Any) -> None:
        """No rule: keep all inputs, and listen to all outputs."""
        module, scope = call.module, call.scope
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        again = call.refusal is not None
        call.inputs = pytree.tree_unflatten([KEPT if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        call.kept = keep(self._anchor, tensors)
        call.refusal = call.refusal or fallback.refusal(module)
        if call.refusal is None:
            call.refusal = self._misshapen(call, tensors[0] if tensors else torch.empty(0))
        kind = tensors[0].device.type if tensors else "cpu"
        call.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for position, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._clock.weakly(self._on_output, call, position, leaf.shape))
        whole = isinstance(module, nn.MultiheadAttention) or next(module.children(), None) is None
        if not whole and not again:
            scope.candidates.append(call)

    def _on_output(self, call: Call, position: int, shape: torch.Size, grad: Tensor) -> None:
        """The gradient of an output of a call."""
        use = None if call.shared else self._use_of(call)
        if use is None:
            return
        use.grads[position] = grad.view(shape) if grad.shape != shape else grad
        dim = fallback.example_dim(call.module, position)
        if call.refusal is None and (len(shape) <= dim or shape[dim] != call.scope.num_examples):
            call.refusal = (
                f"{call.name!r} ({type(call.module).__name__}) gave an output of shape {tuple(shape)}, with "
                f"{call.scope.num_examples} examples in it that are not rows. Keep them in dim {dim}."
            )

    def _find_shared(self, calls: list[Call], outputs: list[Tensor]) -> None:
        """Listen where a tensor is given to all examples: there its gradient still has a row for each of them."""
        nodes: dict[Call, dict[str, Any]] = {}
        for call in calls:
            own = dict(call.module.named_parameters(recurse=False))
            edges = {name: torch.autograd.graph.get_gradient_edge(own[name]).node for name in call.names.values()}
            nodes[call] = edges if call.node is None else {"weight": call.node}
            call.node = None
        found = consumers(outputs, {node for edges in nodes.values() for node in edges.values()})
        for call, edges in nodes.items():
            takers = {name: found[node] for name, node in edges.items()}
            kinds = {taker.name() for taken in takers.values() for taker in taken}
            if not kinds <= BROADCASTS or (call.rule is not None and not kinds):
                if call.refusal is None and kinds & RESHAPES:
                    call.refusal = (
                        f"it cannot be told whether the {call.scope.num_examples} rows that {call.name!r} looks up "
                        "are one for each example or shared by all. Look up (batch, time) indices."
                    )
                continue
            if call.rule is not None:
                call.shared, call.refusal = True, None
                self._listen(call, "weight", call.shape or torch.Size(), takers["weight"])
                continue
            for index, name in call.names.items():
                own = call.module.get_parameter(name)
                part = Call(
                    module=call.module, name=call.name, scope=call.scope, rule=None, names={index: name}, open={index}
                )
                self._listen(part, name, own.shape, takers[name])
            call.names, call.kept, call.shared = {}, None, True

    def _listen(self, call: Call, name: str, shape: torch.Size, takers: list[Any]) -> None:
        for taker in takers:
            taker.register_prehook(self._clock.weakly(self._on_shared, call, name, shape))

    def _on_shared(self, call: Call, name: str, shape: torch.Size, grads: tuple[Tensor | None, ...]) -> None:
        """The gradient, example by example, of a tensor of `shape` that all of them got."""
        use, grad, num_examples = self._use_of(call), grads[0], call.scope.num_examples
        if use is None or grad is None or num_examples is None:
            return
        rows = grad if call.rule is not None and grad.shape == shape else None
        try:
            if grad.dim() == 0 or grad.shape[0] != num_examples:
                raise ConfigError(
                    f"{call.name!r} was added to a tensor of shape {tuple(grad.shape)} while the model was called with "
                    f"{num_examples} examples. Keep the examples in dim 0."
                )
            rows = reduce_examples(grad, shape) if rows is None else rows
        except ConfigError as error:
            call.refusal = str(error)
            return
        if call.rule is None:
            before = use.delivered.get(name)
            rows = rows if before is None else rows + before.dense()
            use.delivered[name] = Summed(rows.unsqueeze(1))
            return
        if grad.shape != shape:
            use.tensors = (use.tensors[0].reshape(1, -1).expand(num_examples, -1),)
            rows = rows.view(num_examples, -1, shape[-1])
        use.grads[0] = rows + use.grads[0] if 0 in use.grads else rows


def _is_inside(module: nn.Module) -> bool:
    """Whether the call of `module` that begins now was made inside another one of it."""
    frame, num_calls = sys._getframe(1), 0  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            num_calls += 1
        frame = frame.f_back
    return num_calls > 1
