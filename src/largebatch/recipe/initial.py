"""Where does a residual net start, so that a large batch can train it?

Each residual block starts as its shortcut alone: gamma of the norm that ends its residual branch is 0. Small batches
hardly mind how a net with BN starts; large ones do (Goyal 2017, sec. 5.1, Table 2b).

Which norm that is, is read from the graph of the block's forward (torch.fx), not from names: where two branches are
added, the one with more layers is the residual branch, the other the shortcut or its downsample branch, which is left
alone. The norm is the last layer of the residual branch, but for dropout, activations, gates and the like.
"""

from __future__ import annotations

import dis
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, cast

from torch import Tensor, fx, nn

from largebatch.errors import ConfigError
from largebatch.recipe.decay import is_norm

Blocks = Sequence[type[nn.Module]] | Mapping[type[nn.Module], str]
"""Types of residual blocks; as a mapping, each with the name of the norm that ends its branch ("bn2", "conv3.bn")."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastNorm:
    """The norm that ends a residual branch."""

    name: str
    """Its name in the model."""
    block: str
    """The name of its residual block; "" where the model is one."""
    norm: nn.Module
    """The norm layer."""


def zero_last_gammas(model: nn.Module, *, blocks: Blocks | None = None) -> tuple[str, ...]:
    """Set gamma to 0 on the norm that ends the residual branch of every residual block.

    Downsample branches are left alone, and so are betas, which start at 0. For a fresh model: one that is trained
    already loses what those gammas learnt.

    Args:
        model: a residual net whose blocks end their branch in a norm: torchvision's and timm's BasicBlock and
            Bottleneck, and any like them.
        blocks: types of residual blocks; only they are looked at, and they may be subclassed. As a mapping it also
            says which norm ends the branch, for a block that cannot be read: `{MyBlock: "norm2"}`. None finds blocks
            by their structure: a module that holds a norm and whose own forward adds two branches.

    Returns:
        The names of the norms whose gamma is 0 now, in the order of the model.

    Raises:
        ConfigError: a block's last norm cannot be told (the sentence names the block and says why), has no gamma or a
            frozen one; or there is no residual block.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    ...     def forward(self, x):
    ...         return x + self.norm(self.conv(x))
    >>> zero_last_gammas(nn.Sequential(Block(), Block()))
    ('0.norm', '1.norm')

    Source: Goyal 2017, sec. 5.1 and Table 2b.
    """
    found, unclear = _look(model, blocks)
    if unclear:
        name, why = next(iter(unclear.items()))
        raise ConfigError(
            f"the norm that ends the residual branch of {name or 'the model'} cannot be told: {why}. Give "
            f"blocks={{Block: 'norm2'}}, the types of the residual blocks, each with the name of its last norm."
        )
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no residual block that ends in a norm: none of its modules holds a norm and "
            f"adds two branches. Leave zero_last_gammas out, or name the types of its blocks in blocks=."
        )
    for last in found:
        gamma = _gamma(last.norm)
        if not isinstance(gamma, nn.Parameter) or not gamma.requires_grad:
            kind = "no gamma" if gamma is None else "a frozen gamma"
            raise ConfigError(
                f"{last.name}, the norm that ends the residual branch of {last.block or 'the model'}, has {kind} "
                f"({type(last.norm).__name__}): the branch could never leave 0. Use a norm with a trained gamma."
            )
    for last in found:
        nn.init.zeros_(cast(Tensor, _gamma(last.norm)))
    return tuple(last.name for last in found)


def last_norms(model: nn.Module, *, blocks: Blocks | None = None) -> tuple[LastNorm, ...]:
    """The norms that end a residual branch, as far as they can be told; nothing is changed.

    Args:
        model: any model.
        blocks: as of `zero_last_gammas`.

    Returns:
        One entry a branch, in the order of the model; empty for a model without residual blocks that end in a norm.

    Raises:
        ConfigError: a type in `blocks` is not in the model, or a name in it is not a norm of its block.
    """
    return tuple(_look(model, blocks)[0])


def gammas_are_zero(last: LastNorm) -> bool:
    """Whether gamma of that norm is 0 throughout; False without a gamma."""
    gamma = _gamma(last.norm)
    return gamma is not None and not bool(gamma.detach().any())


def init_classifier(model: nn.Module, std: float = 0.01, *, name: str | None = None) -> str:
    """Draw the weights of the classifier from N(0, std^2) and set its bias to 0.

    Args:
        model: a classifier. Its last layer with parameters must be an nn.Linear.
        std: standard deviation, > 0.
        name: the classifier's name, where it cannot be told.

    Returns:
        The classifier's name.

    Raises:
        ConfigError: the classifier cannot be told, or `std` is out of range.

    >>> init_classifier(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    '2'

    Source: Goyal 2017, sec. 5.1.
    """
    if not 0 < std < float("inf"):
        raise ConfigError(f"std is a finite number above 0; got {std!r}.")
    linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    if name is None:
        name = _find_classifier(model, linears)
    elif name not in linears:
        raise ConfigError(f"{name!r} is not an nn.Linear of the model. Its Linears are: {', '.join(linears)}.")
    nn.init.normal_(linears[name].weight, std=std)
    bias = cast("Tensor | None", linears[name].bias)
    if bias is not None:
        nn.init.zeros_(bias)
    return name


def _find_classifier(model: nn.Module, linears: dict[str, nn.Linear]) -> str:
    def unclear(why: str) -> ConfigError:
        return ConfigError(
            f"the classifier of {type(model).__name__} cannot be told: {why}. Give its name: "
            f"init_classifier(model, name=...); the Linears are: {', '.join(linears) or 'none'}."
        )

    owners = [(path, module) for path, module in model.named_modules() if any(True for _ in module.parameters(False))]
    if not owners:
        raise unclear("the model has no parameters")
    name, last = owners[-1]
    if not isinstance(last, nn.Linear):
        raise unclear(f"its last layer with parameters is {name or 'the model itself'}, a {type(last).__name__}")
    parent, _, _ = name.rpartition(".")
    rivals = [
        path
        for path, linear in linears.items()
        if path != name and path.rpartition(".")[0] == parent and linear.out_features == last.out_features
    ]
    if rivals and not isinstance(model.get_submodule(parent), nn.Sequential):
        raise unclear(f"{rivals[-1]} and {name} both have {last.out_features} outputs")
    kinds = Counter(type(module) for module in model.modules())
    while parent:
        kind = type(model.get_submodule(parent))
        if kinds[kind] > 1 and kind not in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
            raise unclear(f"its last Linear, {name}, is part of one of {kinds[kind]} {kind.__name__} modules")
        parent = parent.rpartition(".")[0]
    shared = [
        path
        for path, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is last.weight and path != f"{name}.weight"
    ]
    if shared:
        raise unclear(f"the weight of {name} is also {shared[0]}")
    return name


def _gamma(norm: nn.Module) -> Tensor | None:
    tensors = (getattr(norm, name, None) for name in ("weight", "gamma", "scale", "g"))
    return next((tensor for tensor in tensors if isinstance(tensor, Tensor)), None)


class _UnclearError(Exception):
    """Why the last norm of a block cannot be told."""


def _look(model: nn.Module, blocks: Blocks | None) -> tuple[list[LastNorm], dict[str, str]]:
    """The last norms that can be told, in the model's order, and why those of the other blocks cannot."""
    modules = dict(model.named_modules())
    given = dict(blocks) if isinstance(blocks, Mapping) else dict.fromkeys(blocks or ())
    for kind in given:
        if not any(isinstance(module, kind) for module in modules.values()):
            kinds = sorted(
                {type(module).__name__ for module in modules.values() if any(True for _ in module.children())}
            )
            raise ConfigError(f"the model has no block of type {kind.__name__}. Its types are: {', '.join(kinds)}.")
    norms, unclear = dict[str, str](), dict[str, str]()
    for name, block in modules.items():
        kind = next((kind for kind in given if isinstance(block, kind)), None)
        if not (_may_add_branches(block) if blocks is None else kind):
            continue
        prefix = f"{name}." if name else ""
        if kind is not None and given[kind] is not None:
            last = prefix + str(given[kind])
            if last not in modules or not is_norm(modules[last]):
                inside = [path for path, module in block.named_modules() if is_norm(module)]
                raise ConfigError(f"{last} is not a norm layer. The norms of that block are: {', '.join(inside)}.")
            norms[last] = name
            continue
        try:
            norms |= {prefix + norm: name for norm in _branch_ends(block)}
        except _UnclearError as error:
            unclear[name] = str(error)
    # What holds clear blocks adds their outcomes on another level (a fusion of scales, a whole model): it is no block.
    clear = set(norms.values())
    levels = {
        name for name in clear | unclear.keys() if any(_is_inside(block, name) for block in clear if block != name)
    }
    found = [
        LastNorm(name=name, block=norms[name], norm=module)
        for name, module in modules.items()
        if name in norms and (norms[name] not in levels or blocks is not None)
    ]
    return found, {name: why for name, why in unclear.items() if name not in levels}


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _branch_ends(block: nn.Module) -> list[str]:
    """The norms that end a residual branch of this block, by their names in it.

    Raises:
        _UnclearError: the forward cannot be traced, or a branch does not end in a norm.
    """
    tracer = _Tracer(block)
    optional = {
        name: parameter.default
        for name, parameter in inspect.signature(block.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    try:
        graph = tracer.trace(block, concrete_args=optional or None)
    except Exception as error:  # a user's forward may do anything
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise _UnclearError(f"its forward cannot be traced ({first})") from error
    modules = dict(block.named_modules())
    depth = dict[fx.Node, int]()  # layers with parameters between the block's input and here, on the longest way
    ends = list[str]()
    for node in graph.nodes:
        inputs = [depth[source] for source in node.all_input_nodes if source in depth]
        if node.op == "placeholder":
            depth[node] = 0
        elif inputs:  # all but constants
            depth[node] = max(inputs) + (node.op == "call_module" and _is_layer(modules[str(node.target)]))
        sides = [side for side in node.args[:2] if isinstance(side, fx.Node) and side in depth]
        if _name(node) in _SUMS and tracer.is_own(node) and len(sides) == 2 and max(depth[side] for side in sides) > 0:
            short, branch = sorted(sides, key=depth.__getitem__)
            if depth[short] == depth[branch]:
                raise _UnclearError(f"it adds two branches of {depth[branch]} layers each")
            norm = _ending_norm(branch, modules)
            if not _goes_past(norm, node):
                ends.append(str(norm.target))
    return ends


def _goes_past(norm: fx.Node, total: fx.Node) -> bool:
    """Whether the norm's output is used for anything but this sum: then it is no branch (Res2Net's steps are such)."""
    todo, seen = [norm], {total}
    while todo:
        node = todo.pop()
        if node.op == "output":
            return True
        if node not in seen:
            seen.add(node)
            todo += list(node.users)
    return False


def _ending_norm(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node:
    """The norm whose output, when it is 0, makes the output of this node 0."""
    target, name = str(node.target), _name(node)
    if node.op == "call_module":
        module = modules[target]
        if is_norm(module):
            return node
        if not _keeps_0(module):
            raise _UnclearError(f"its residual branch ends in {target}, a {type(module).__name__}, not in a norm")
        sides = [node.args[0]]
    elif name in _PRODUCTS:
        sides = list(node.args[:2])
    elif name in _KEEP_0:
        sides = [node.args[0]]
    else:
        raise _UnclearError(f"its residual branch ends in {name}, not in a norm")
    reasons = list[_UnclearError]()
    for side in sides:
        if isinstance(side, fx.Node):
            try:
                return _ending_norm(side, modules)
            except _UnclearError as error:
                reasons.append(error)
    raise reasons[0] if reasons else _UnclearError(f"its residual branch ends in {name}, not in a norm")


class _Tracer(fx.Tracer):
    """Follows a block down to its layers and norms."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self._depths = dict[fx.Node, int]()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether the module is one node."""
        if m is self.block:
            return False
        plain = not any(True for _ in m.children()) or not any(True for _ in m.parameters())
        return is_norm(m) or plain or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Remember in which module each node was made."""
        node = super().create_node(*args, **kwargs)
        self._depths[node] = len(self.module_stack)
        return node

    def is_own(self, node: fx.Node) -> bool:
        """Whether the block's own forward made the node, not that of a module inside."""
        return self._depths[node] <= 0


_SUMS = frozenset({"add", "add_", "iadd"})
_PRODUCTS = frozenset({"mul", "mul_", "imul"})
_KEEP_0 = frozenset({
    "relu", "relu_", "relu6", "leaky_relu", "elu", "silu", "gelu", "tanh", "hardswish", "dropout", "dropout2d",
    "dropout3d", "drop_path", "stochastic_depth", "div", "div_", "truediv", "neg", "clone", "contiguous", "to", "float",
    "type_as", "view", "reshape", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze",
    "avg_pool2d", "max_pool2d", "adaptive_avg_pool2d", "interpolate", "pad", "mean", "sum", "getitem",
})  # fmt: skip
_MOVE_0 = (nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Softmax, nn.LogSoftmax, nn.Softplus)


def _name(node: fx.Node) -> str:
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target) if node.op == "call_method" else node.op


def _is_layer(module: nn.Module) -> bool:
    return not is_norm(module) and any(True for _ in module.parameters())


def _keeps_0(module: nn.Module) -> bool:
    return not any(True for _ in module.parameters()) and not any(isinstance(m, _MOVE_0) for m in module.modules())


def _may_add_branches(module: nn.Module) -> bool:
    """Whether a module holds a norm, and its own forward, or a method that this calls, has a sum in its code."""
    kind = type(module)
    if kind.__module__.startswith("torch.nn.") or not any(
        is_norm(child) for child in module.modules() if child is not module
    ):
        return False
    methods, seen = [kind.forward], set[Any]()
    while methods:
        method = inspect.unwrap(methods.pop())
        if method in seen or not isinstance(method, FunctionType):
            continue
        seen.add(method)
        for code in _codes(method.__code__):
            if _SUMS & set(code.co_names) or any(
                step.opname == "BINARY_OP" and step.argrepr in ("+", "+=") for step in dis.get_instructions(code)
            ):
                return True
            methods += [
                getattr(kind, name) for name in code.co_names if hasattr(kind, name) and not hasattr(nn.Module, name)
            ]
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
