"""What does each layer's gradient look like, example by example?

A rule turns a layer, its input and the gradient of its output into one form per parameter
(`largebatch.noise.per_example.forms`). The first dim of input and output is the example; all other dims that
the parameter does not have are positions, over which its gradient is a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

from largebatch.noise.per_example.forms import Factored, Form, Scattered, Summed, prefer_direct, wide

Rule = Callable[[nn.Module, Tensor | None, Tensor], dict[str, Form]]
"""(layer, input, gradient of the output) -> form of each parameter, by its name in the layer; without an input,
which need not be kept where the weight is frozen, of the bias alone."""

DERIVABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose gradients the fast mode makes."""
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _InstanceNorm, _BatchNorm)
"""Layers that normalise: what the option `only="norm layers"` listens to."""


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of this layer; None if there is none, or if a subclass computes something else.

    >>> rule_for(nn.Linear(2, 3)) is linear, rule_for(nn.LSTM(2, 3))
    (True, None)
    """
    for kind, rule in RULES:
        if isinstance(module, kind):
            forward = _forward(type(module))
            return rule if forward is _forward(kind) or forward in _OWN_FORWARDS else None
    kind = type(module)
    # The layers of GPT-2 in transformers, which is not imported for it.
    return turned_linear if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D") else None


def couples(module: nn.Module) -> str | None:
    """Why this layer, as it is set now, leaves no example a gradient of its own; None if it does not couple them."""
    kind = type(module).__name__
    if isinstance(module, _InstanceNorm):
        return None
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        return (
            f"{kind} normalises by statistics of its batch, so that no example has a gradient of its own. "
            "Use GroupNorm, put it into eval(), or measure by microbatches."
        )
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return (
            f"{kind} with scale_grad_by_freq divides by counts over the batch, so that no example has a gradient of "
            "its own. Use scale_grad_by_freq=False, or measure by microbatches."
        )
    return None


def fast_pays(module: nn.Module, x: Tensor) -> bool:
    """Whether the weight's gradient is formed example by example anyway: the fast mode then takes their sum."""
    if x.dim() < num_dims(module):
        return False
    if isinstance(module, nn.Linear):
        num_positions, groups = math.prod(x.shape[1:-1]), 1
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        num_positions, groups = math.prod(x.shape[2:]) // math.prod(module.stride), module.groups
    else:
        return False
    weight = module.weight
    return num_positions > 1 and prefer_direct(num_positions, weight.shape[0] // groups, weight[0].numel())


def num_dims(module: nn.Module) -> int:
    """Fewest dims of an input that has examples."""
    if isinstance(module, _ConvNd):
        return len(module.kernel_size) + 2
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) + 1
    return 1 if isinstance(module, nn.Embedding) or rule_for(module) is None else 2


def linear(module: nn.Module, x: Tensor | None, grad: Tensor) -> dict[str, Form]:
    """Linear over any leading dims: y = x W^T + b."""
    assert isinstance(module, nn.Linear), type(module)
    rows = wide(grad).reshape(grad.shape[0], -1, grad.shape[-1])
    forms: dict[str, Form] = {"bias": Summed(rows)}
    if x is not None:
        columns = as_seen(x, grad).reshape(x.shape[0], 1, -1, x.shape[-1])
        forms["weight"] = Factored(rows.unsqueeze(1), lambda part: wide(columns[part]), columns.shape[-1])
    return forms


def turned_linear(module: nn.Module, x: Tensor | None, grad: Tensor) -> dict[str, Form]:
    """Linear with its weight the other way round: y = x W + b."""
    told = wide(grad).reshape(grad.shape[0], -1, grad.shape[-1])
    forms: dict[str, Form] = {"bias": Summed(told)}
    if x is not None:
        rows = wide(as_seen(x, grad)).reshape(x.shape[0], 1, -1, x.shape[-1])
        forms["weight"] = Factored(rows, lambda part: told[part].unsqueeze(1), told.shape[-1])
    return forms


def convolution(module: nn.Module, x: Tensor | None, grad: Tensor) -> dict[str, Form]:
    """Conv1d, Conv2d, Conv3d: a linear layer over patches, with positions = output pixels."""
    assert isinstance(module, _ConvNd), type(module)
    pixels = wide(grad).flatten(2)
    forms: dict[str, Form] = {"bias": Summed(pixels.mT)}
    if x is not None:
        seen, size = as_seen(x, grad), grad.shape[2:]
        forms["weight"] = Factored(
            pixels.unflatten(1, (module.groups, -1)).mT,
            lambda part: patches(wide(pad(module, seen[part])), module, size),
            module.weight[0].numel(),
        )
    return forms


def pad(module: _ConvNd, x: Tensor) -> Tensor:
    """The input with the convolution's padding made explicit; as it is where there is none."""
    amounts = list(module._reversed_padding_repeated_twice)  # pyright: ignore[reportPrivateUsage]
    if not any(amounts):
        return x
    return F.pad(x, amounts, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def patches(x: Tensor, module: _ConvNd, size: Sequence[int]) -> Tensor:
    """What each output position sees of a padded input; shape (b, G, T, channels per group * kernel).

    `size` is the output's. A kernel of one element at stride 1 is a view, anything else is copied once.
    """
    num_dims, groups, kernel = len(size), module.groups, module.kernel_size
    spatial = x.stride()[2:]
    channels = x.shape[1] // groups
    windows = x.as_strided(
        (x.shape[0], groups, channels, *kernel, *size),
        (
            x.stride(0),
            x.stride(1) * channels,
            x.stride(1),
            *(step * gap for step, gap in zip(spatial, module.dilation, strict=True)),
            *(step * jump for step, jump in zip(spatial, module.stride, strict=True)),
        ),
    )
    return windows.flatten(2, 2 + num_dims).flatten(3).mT


def embedding(module: nn.Module, x: Tensor | None, grad: Tensor) -> dict[str, Form]:
    """Rows of a table by index; padding_idx gets nothing."""
    assert isinstance(module, nn.Embedding) and x is not None, type(module)
    columns = wide(grad).reshape(grad.shape[0], -1, grad.shape[-1])
    ids = x.reshape(x.shape[0], -1)
    if module.padding_idx is not None:
        columns = columns.masked_fill((ids == module.padding_idx).unsqueeze(-1), 0.0)
    return {"weight": Scattered(ids, columns, module.num_embeddings)}


def layer_norm(module: nn.Module, x: Tensor | None, grad: Tensor) -> dict[str, Form]:
    """LayerNorm and RMSNorm: scale and shift of what is normalised over the last dims."""
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm), type(module)
    shape, eps, grad = list(module.normalized_shape), module.eps, wide(grad)
    size = (grad.shape[0], -1, math.prod(shape))
    forms: dict[str, Form] = {"bias": Summed(grad.reshape(size))}
    if x is not None:
        if isinstance(module, nn.RMSNorm):
            normal = F.rms_norm(wide(x), shape, None, torch.finfo(x.dtype).eps if eps is None else eps)
        else:
            normal = F.layer_norm(wide(x), shape, None, None, module.eps)
        forms["weight"] = Summed((normal * grad).reshape(size))
    return forms


def channel_norm(module: nn.Module, x: Tensor | None, grad: Tensor) -> dict[str, Form]:
    """GroupNorm, InstanceNorm, and BatchNorm with fixed statistics: scale and shift of each channel (dim 1)."""
    size, grad = (*grad.shape[:2], -1), wide(grad)
    forms: dict[str, Form] = {"bias": Summed(grad.reshape(size).mT)}
    if x is not None:
        if isinstance(module, nn.GroupNorm):
            normal = F.group_norm(wide(x), module.num_groups, None, None, module.eps)
        else:
            assert isinstance(module, _InstanceNorm | _BatchNorm), type(module)
            mean, var = module.running_mean, module.running_var
            if isinstance(module, _InstanceNorm) and (module.training or mean is None):
                normal = F.instance_norm(wide(x), None, None, None, None, True, 0.0, module.eps)
            else:
                normal = F.batch_norm(wide(x), mean, var, None, None, False, 0.0, module.eps)
        forms["weight"] = Summed((normal * grad).reshape(size).mT)
    return forms


def as_seen(x: Tensor, grad: Tensor) -> Tensor:
    """The input in the precision the layer met it in: autocast narrows it on the way in."""
    return x.to(grad.dtype) if grad.dtype in (torch.float16, torch.bfloat16) else x


def _forward(kind: type[nn.Module]) -> object:
    return kind.forward


RULES: tuple[tuple[type[nn.Module], Rule], ...] = (
    (nn.Linear, linear),
    (nn.Conv1d, convolution),
    (nn.Conv2d, convolution),
    (nn.Conv3d, convolution),
    (nn.Embedding, embedding),
    (nn.LayerNorm, layer_norm),
    (nn.RMSNorm, layer_norm),
    (nn.GroupNorm, channel_norm),
    (_InstanceNorm, channel_norm),
    (_BatchNorm, channel_norm),
)
_OWN_FORWARDS = (_forward(nn.SyncBatchNorm),)
