"""Which parameters get weight decay?

Decay is left out by the type of the module that owns a parameter, never by the parameter's name: names such as "bn"
miss the norm of a residual net's downsample branch and every norm that is called something else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from largebatch.errors import ConfigError

NORM_LAYERS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
"""torch's norm layers; subclasses (torchvision's LayerNorm2d) count too. `is_norm` knows more."""

_EPS = ("eps", "epsilon", "variance_epsilon", "norm_eps", "layer_norm_eps")
_GAMMAS = frozenset({"weight", "gamma", "scale", "g"})
_OTHERS = frozenset({"bias", "beta", "shift", "offset", "b", "tau", "v"})  # tau, v: filter response and Evo norms
_NORM_TYPE = re.compile(r"norm(?!al)", re.IGNORECASE)  # RMSNorm, but not NormalPrior


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm layer: one of torch's, or built like one.

    Built like one means that it owns a gamma (weight, gamma, scale or g), perhaps a beta, and nothing else to train,
    no parameter wider than one axis, none in a child; and that it keeps an eps, or its type is called a norm. So are
    the RMS norms of transformers, timm and apex, which are not torch's, and a layer norm written by hand. Layers with
    a weight a channel that normalise nothing (PReLU, LayerScale) are none.

    Args:
        module: any module.

    Returns:
        True for a norm layer.

    >>> is_norm(nn.GroupNorm(2, 4)), is_norm(nn.PReLU(4)), is_norm(nn.Linear(1, 1))
    (True, False, False)
    """
    if isinstance(module, NORM_LAYERS):
        return True
    own = dict(module.named_parameters(recurse=False))
    own |= {name: buffer for name, buffer in module.named_buffers(recurse=False) if name in _GAMMAS}  # frozen BN
    names = own.keys()
    return (
        bool(names & _GAMMAS)
        and names <= _GAMMAS | _OTHERS
        and all(_has_one_axis(tensor) for tensor in own.values())
        and (any(isinstance(getattr(module, eps, None), float) for eps in _EPS) or _is_called_a_norm(module))
        and not any(True for child in module.children() for _ in child.parameters())
    )


def decay_groups(
    model: nn.Module, *, exclude_biases: bool = False, no_decay: Sequence[str] = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """The trainable parameters of a model, split into those with weight decay and those without.

    Args:
        model: frozen parameters are left out; a shared parameter comes once, without decay if any of the modules
            that own it says so. Parameters that live on a module of no known type (a position embedding, a class
            token, LayerScale's gamma) are decayed unless `no_decay` names them.
        exclude_biases: also leave the biases of other layers without decay. Goyal 2017 excludes only gamma and beta
            of BN, hence False.
        no_decay: glob patterns of more parameters to leave without decay, matched against the whole name as
            `model.named_parameters()` gives it: "pos_embed", "*.gamma".

    Returns:
        (decayed, not_decayed), each in the order of `model.parameters()`.

    Raises:
        ConfigError: a pattern matches no parameter.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> [len(group) for group in decay_groups(model)]
    [2, 2]
    >>> [len(group) for group in decay_groups(model, no_decay=["0.*"])]
    [0, 4]

    Source: Goyal 2017, sec. 5.1.
    """
    excluded = _matched(model, no_decay)
    for module in model.modules():
        norm = is_norm(module)
        for name, parameter in module.named_parameters(recurse=False):
            if norm or (exclude_biases and is_bias(name)):
                excluded.add(parameter)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in trained if p not in excluded], [p for p in trained if p in excluded]


def is_bias(name: str) -> bool:
    """Whether a parameter of that name, on its module, is a bias.

    >>> [is_bias(name) for name in ("bias", "in_proj_bias", "bias_ih_l0", "relative_position_bias_table")]
    [True, True, True, False]
    """
    return name.endswith("bias") or name.startswith("bias_")


def _matched(model: nn.Module, patterns: Sequence[str]) -> set[Tensor]:
    if isinstance(patterns, str):
        raise ConfigError(f"no_decay is a list of patterns; got the string {patterns!r}. Use [{patterns!r}].")
    named = dict(model.named_parameters(remove_duplicate=False))
    matched = set[Tensor]()
    for pattern in patterns:
        hits = {parameter for name, parameter in named.items() if fnmatchcase(name, pattern)}
        if not hits:
            raise ConfigError(
                f"the pattern {pattern!r} of no_decay matches none of the {len(named)} parameters. "
                f"The nearest names are: {', '.join(_nearest(pattern, named)) or 'none, the model has no parameter'}."
            )
        matched |= hits
    return matched


def _nearest(pattern: str, names: Iterable[str]) -> list[str]:
    plain = re.sub(r"[*?\[\]]", "", pattern)
    # A pattern often gives a name without the path to it: the better of the whole name and its last parts counts.
    ends = {name: [name] + [name[match.end() :] for match in re.finditer(r"\.", name)] for name in names}

    def likeness(name: str) -> float:
        return max(difflib.SequenceMatcher(None, plain.strip("."), end).ratio() for end in ends[name])

    return sorted(ends, key=likeness, reverse=True)[:3]


def _has_one_axis(tensor: Tensor) -> bool:
    if isinstance(tensor, UninitializedParameter):
        return False
    return sum(size != 1 for size in tensor.shape) <= 1  # (C,), and (1, C, 1, 1) of norms that broadcast


def _is_called_a_norm(module: nn.Module) -> bool:
    return _NORM_TYPE.search(type(module).__name__) is not None
