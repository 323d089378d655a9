"""Which models can be put on paper without building them? Gradient bytes exact, backward time by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from largebatch.errors import ConfigError
from largebatch.parallel.model_profile import LayerProfile, ModelProfile

_FLOAT_BYTES = 4


class _Layer(NamedTuple):
    name: str
    num_parameters: int
    operations: float
    """Of the forward, for one example: multiply-adds; of a norm, elements."""
    whole_backward: bool = True
    """Whether its backward passes a gradient on, which makes it twice the forward; the first layer's is once."""


def known_profile(name: str) -> ModelProfile:
    """A model's layers in backward order, with shares of one second: use `.scaled(backward_seconds)`.

    Shares are those of the arithmetic: a backward costs twice the forward's multiply-adds, and once in the first layer,
    which passes nothing on. Kernels do not all reach the same speed, so a measured profile is better where there is a
    GPU to measure it on. ResNets at 224 x 224, vit_b_16 at 224 x 224, gpt2 at 1,024 tokens; gradients in float32.

    Args:
        name: one of `KNOWN_MODELS`.

    Raises:
        ConfigError: there is none of that name.

    >>> known_profile("resnet50").num_bytes // 4
    25557032

    Source: He et al. 2016, table 1; Dosovitskiy et al. 2021, table 1; Radford et al. 2019, table 2. Names and counts
    as in torchvision and transformers.
    """
    if name not in _MODELS:
        raise ConfigError(
            f"no profile of {name!r} is built in; there are {', '.join(KNOWN_MODELS)}. Measure your own with "
            "largebatch.parallel.profile."
        )
    layers = list(reversed(_MODELS[name]()))
    costs = [layer.operations * (2 if layer.whole_backward else 1) for layer in layers]
    total = math.fsum(costs)
    return ModelProfile(
        name=name, measured=False,
        layers=tuple(
            LayerProfile(name=layer.name, num_bytes=layer.num_parameters * _FLOAT_BYTES, seconds=cost / total)
            for layer, cost in zip(layers, costs, strict=True)
        ),
    )  # fmt: skip


def _convolution(name: str, inputs: int, outputs: int, kernel: int, side: int, *, first: bool = False) -> _Layer:
    weights = inputs * outputs * kernel * kernel
    return _Layer(name, weights, weights * side * side, not first)


def _batch_norm(name: str, channels: int, side: int) -> _Layer:
    return _Layer(name, 2 * channels, channels * side * side)


def _linear(name: str, inputs: int, outputs: int, positions: int, *, extra: float = 0) -> _Layer:
    return _Layer(name, inputs * outputs + outputs, inputs * outputs * positions + extra)


def _resnet(depths: tuple[int, ...], *, bottleneck: bool) -> list[_Layer]:
    layers = [_convolution("conv1", 3, 64, 7, 112, first=True), _batch_norm("bn1", 64, 112)]
    inputs, side = 64, 56
    for stage, depth in enumerate(depths):
        width = 64 << stage
        outputs = 4 * width if bottleneck else width
        for number in range(depth):
            name = f"layer{stage + 1}.{number}"
            halves = stage > 0 and number == 0
            before, side = side, side // 2 if halves else side
            if bottleneck:  # the stride is in the 3 x 3, as in torchvision and in Goyal 2017
                shapes = [(inputs, width, 1, before), (width, width, 3, side), (width, outputs, 1, side)]
            else:
                shapes = [(inputs, width, 3, side), (width, outputs, 3, side)]
            for index, (taken, given, kernel, at) in enumerate(shapes, 1):
                layers.append(_convolution(f"{name}.conv{index}", taken, given, kernel, at))
                layers.append(_batch_norm(f"{name}.bn{index}", given, at))
            if inputs != outputs:
                layers.append(_convolution(f"{name}.downsample.0", inputs, outputs, 1, side))
                layers.append(_batch_norm(f"{name}.downsample.1", outputs, side))
            inputs = outputs
    return [*layers, _linear("fc", inputs, 1000, 1)]


def _vit_b_16() -> list[_Layer]:
    width, hidden, tokens = 768, 3072, 197
    layers = [
        _Layer("conv_proj", 3 * 16 * 16 * width + width, 3 * 16 * 16 * width * 196, whole_backward=False),
        _Layer("(root)", width, width),  # the class token
        _Layer("encoder", tokens * width, tokens * width),  # the positions' embedding
    ]
    for number in range(12):
        name = f"encoder.layers.encoder_layer_{number}"
        attention = 2.0 * tokens * tokens * width
        layers += [
            _Layer(f"{name}.ln_1", 2 * width, tokens * width),
            _linear(f"{name}.self_attention", width, 3 * width, tokens, extra=attention),
            _linear(f"{name}.self_attention.out_proj", width, width, tokens),
            _Layer(f"{name}.ln_2", 2 * width, tokens * width),
            _linear(f"{name}.mlp.0", width, hidden, tokens),
            _linear(f"{name}.mlp.3", hidden, width, tokens),
        ]
    return [*layers, _Layer("encoder.ln", 2 * width, tokens * width), _linear("heads.head", width, 1000, 1)]


def _gpt2() -> list[_Layer]:
    width, hidden, tokens, words = 768, 3072, 1024, 50257
    # The head shares the embedding's weights: its time comes first, and the gradient is whole only at the very end.
    layers = [
        _Layer("transformer.wte", words * width, tokens * width),
        _Layer("transformer.wpe", tokens * width, tokens * width),
    ]
    for number in range(12):
        name = f"transformer.h.{number}"
        attention = 2.0 * tokens * tokens * width
        layers += [
            _Layer(f"{name}.ln_1", 2 * width, tokens * width),
            _linear(f"{name}.attn.c_attn", width, 3 * width, tokens, extra=attention),
            _linear(f"{name}.attn.c_proj", width, width, tokens),
            _Layer(f"{name}.ln_2", 2 * width, tokens * width),
            _linear(f"{name}.mlp.c_fc", width, hidden, tokens),
            _linear(f"{name}.mlp.c_proj", hidden, width, tokens),
        ]
    head = _Layer("lm_head", 0, words * width * tokens)
    return [*layers, _Layer("transformer.ln_f", 2 * width, tokens * width), head]


_MODELS: dict[str, Callable[[], list[_Layer]]] = {
    "resnet18": lambda: _resnet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), bottleneck=True),
    "resnet101": lambda: _resnet((3, 4, 23, 3), bottleneck=True),
    "vit_b_16": _vit_b_16,
    "gpt2": _gpt2,
}

KNOWN_MODELS = tuple(_MODELS)
"""What `known_profile` knows."""
