"""What does a layer's gradient look like, example by example, when no rule tells it?

The layer is run again, one example at a time, from the inputs it got and the gradients its outputs received:
exact for whatever treats its examples alike, at the price of one more forward and backward of that layer, and of
one gradient of it per example in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from largebatch.errors import ConfigError


def refusal(module: nn.Module) -> str | None:
    """Why this layer, as it is set now, cannot be run again example by example; None if it can."""
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.training and module.num_layers > 1:
        return f"{kind} with dropout={module.dropout:g} draws at random and cannot be run again. Use dropout=0."
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first:
        return f"{kind} has its examples in dim 1. Use batch_first=True."
    return None


def example_dim(module: nn.Module, position: int) -> int:
    """Which dim of the tensor at this position of inputs or outputs is the example: states of RNNs have it second."""
    return 1 if isinstance(module, nn.RNNBase) and position > 0 else 0


def gradients_by_example(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    cotangents: Mapping[int, Tensor],
    *,
    num_examples: int,
    autocast: AbstractContextManager[Any],
) -> dict[str, Tensor]:
    """Each example's gradient of some parameters of a layer.

    Args:
        module: the layer; it treats its examples alike and draws nothing at random.
        parameters: those of its own parameters that are asked for, by name.
        inputs: args and kwargs of the call. Tensors whose first dim is the example's are split, others shared.
        cotangents: gradients of the outputs, by their position in the flattened output.
        num_examples: B.
        autocast: the precision the call was made in.

    Returns:
        One tensor per parameter, shape (B, numel), float32 or wider.

    Raises:
        ConfigError: the layer cannot be run again one example at a time: it draws at random (dropout), changes a
            buffer, or decides by values of its input.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    dims = [_dim(module, position, leaf, num_examples) for position, leaf in enumerate(leaves)]
    split = [position for position, dim in enumerate(dims) if dim is not None]
    outputs = list(cotangents)

    def one(tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, Tensor]:
        """All gradients for one example; its tensors keep the dim of the example, of size 1."""
        mine = list(leaves)
        for position, tensor in zip(split, tensors, strict=True):
            mine[position] = tensor
        args, kwargs = pytree.tree_unflatten(mine, spec)

        def call(values: dict[str, Tensor]) -> list[Tensor]:
            result = pytree.tree_leaves(functional_call(module, values, args, kwargs))
            return [result[position] for position in outputs]

        with autocast:
            result, pull, *_ = vjp(call, dict(parameters))
        return pull([grad.to(value.dtype) for grad, value in zip(grads, result, strict=True)])[0]

    tensors = [leaves[position].movedim(dims[position] or 0, 0) for position in split]
    grads = [grad.movedim(example_dim(module, position), 0) for position, grad in cotangents.items()]
    back_in = [dims[position] or 0 for position in split]
    back_out = [example_dim(module, position) for position in outputs]

    def placed(tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, Tensor]:
        return one(
            [tensor.unsqueeze(dim) for tensor, dim in zip(tensors, back_in, strict=True)],
            [grad.unsqueeze(dim) for grad, dim in zip(grads, back_out, strict=True)],
        )

    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "there is a performance drop": known
            if isinstance(module, nn.RNNBase):  # vmap cannot: nothing batches over their kernels
                found = [placed([t[i] for t in tensors], [g[i] for g in grads]) for i in range(num_examples)]
                stacked = {name: torch.stack([one[name] for one in found]) for name in parameters}
            else:
                stacked = vmap(placed, randomness="error")(tensors, grads)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"{type(module).__name__} has no rule and torch.func cannot run it example by example ({reason}). Measure "
            "by microbatches, or freeze its parameters."
        ) from error
    wide = {name: value.detach().reshape(num_examples, -1) for name, value in stacked.items()}
    return {name: value if value.dtype == torch.float64 else value.float() for name, value in wide.items()}


def _dim(module: nn.Module, position: int, leaf: object, num_examples: int) -> int | None:
    """The example's dim of an input; None where it has none."""
    dim = example_dim(module, position)
    if isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == num_examples:
        return dim
    return None
