"""The loop that no one else wrote: what an integration must measure, from gradients taken one microbatch at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from oracles.weighted_moments import of_weighted

Step = Sequence[Any]
"""The microbatches of one optimizer step, of all workers."""


def plain_loop(
    model: nn.Module,
    steps: Sequence[Step],
    *,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    size_of: Callable[[Any], int],
    weight_of: Callable[[Any, Step], float],
    lr: float,
    clip: float,
) -> list[tuple[float, float, float]]:
    """Train by clipped SGD; for each step (tr(Sigma), |G|^2) and |gbar|^2 + tr/B, which tolerances refer to.

    `loss_of` is the MEAN over a microbatch, `weight_of` what the step's gradient multiplies its gradient by.
    """
    model = copy.deepcopy(model)
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found: list[tuple[float, float, float]] = []
    for step in steps:
        gradients = [torch.autograd.grad(loss_of(model, part), used) for part in step]
        weights = [weight_of(part, step) for part in step]
        means = np.stack([torch.cat([g.flatten() for g in part]).double().numpy() for part in gradients])
        sizes = [size_of(part) for part in step]
        trace, signal = of_weighted(means, sizes, weights)
        found.append((trace, signal, abs(signal) + trace / sum(sizes)))
        for index, parameter in enumerate(used):
            parameter.grad = sum(w * part[index] for w, part in zip(weights, gradients, strict=True))
        nn.utils.clip_grad_norm_(used, clip)
        with torch.no_grad():
            for parameter in used:
                parameter -= lr * parameter.grad
    return found


def assert_same(
    moments: Sequence[Any], expected: Sequence[tuple[float, float, float]], tolerance: float = 1e-5
) -> None:
    """Every step's moments within 1e-5 of the size of its norms: float32 gradients, summed in another order."""
    assert len(moments) == len(expected)
    for measured, (trace, signal, size) in zip(moments, expected, strict=True):
        assert measured.trace_cov / measured.batch == pytest.approx(trace / measured.batch, abs=tolerance * size)
        assert measured.grad_sq_norm == pytest.approx(signal, abs=tolerance * size)
