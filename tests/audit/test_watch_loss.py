"""Is the weight of a unit, as read from a loss's graph, the one that its gradient has?

The oracle reads no graph: it divides the gradient that arrives at the model's outputs by that of one unit's loss,
written out in numpy (for a cross-entropy softmax(z) - onehot, for a squared error 2 (z - t)).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from largebatch.audit.watch_loss import UnreadError, read_terms


def cross_entropy_weights(logits, labels, grad):
    """Of each unit, the gradient at its logits over that of its own loss."""
    z = logits.detach().double().numpy()
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    own = p - np.eye(z.shape[1])[labels.clamp(min=0).numpy()]
    own[labels.numpy() < 0] = 0
    g = grad.double().numpy()
    counted = labels.numpy() >= 0
    return (g[counted] * own[counted]).sum(1) / (own[counted] ** 2).sum(1)


HOW = {
    "mean / k": lambda z, y, k: F.cross_entropy(z, y) / k,
    "mean * (1 / k)": lambda z, y, k: F.cross_entropy(z, y) * (1 / k),
    "sum / tensor": lambda z, y, k: F.cross_entropy(z, y, reduction="sum") / torch.tensor(float(k)),
    "none, mask": lambda z, y, k: (F.cross_entropy(z, y, reduction="none") * (y >= 0)).sum() / (y >= 0).sum() / k,
    "minus gathered": lambda z, y, k: -(z.log_softmax(1).gather(1, y.clamp(min=0)[:, None])[y >= 0]).mean() / k,
    "weights of classes": lambda z, y, k: F.cross_entropy(z, y, weight=torch.full((3,), 2.0)) / k,
    "with an auxiliary loss": lambda z, y, k: 0.5 * z.square().mean() * 0 + F.cross_entropy(z, y) / k,
    "stacked": lambda z, y, k: torch.stack([F.cross_entropy(z, y), z.mean() * 0]).sum() / k,
}


@pytest.mark.parametrize("how", HOW)
@given(
    labels=st.lists(st.sampled_from([0, 1, 2, -100]), min_size=2, max_size=9).filter(lambda y: max(y) >= 0),
    k=st.integers(1, 7),
)
def test_the_weight_of_a_unit_is_the_one_in_its_gradient(how, labels, k):
    generator = torch.Generator().manual_seed(len(labels))
    logits = torch.randn(len(labels), 3, generator=generator, requires_grad=True)
    y = torch.tensor(labels)
    loss = HOW[how](logits, y, k)
    terms = read_terms(loss, {})
    loss.backward()
    expected = cross_entropy_weights(logits, y, logits.grad)
    if how == "with an auxiliary loss":
        term = terms[-1]
    else:
        term = terms[0]
    if how == "none, mask":  # a sum over all, of which the mask lets some through
        assert term.count == len(labels) and term.divisor == (y >= 0).sum()
    else:
        assert term.count == (y >= 0).sum()
    weight = term.factor / term.count if term.is_mean else term.factor
    np.testing.assert_allclose(expected, weight, rtol=2e-4, atol=1e-7)  # float32 gradients, nearly 0 where p is 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@given(rows=st.integers(1, 6), width=st.integers(1, 4), k=st.integers(1, 5))
def test_squared_errors_are_read_too(reduction, rows, width, k):
    outputs = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width).requires_grad_()
    loss = F.mse_loss(outputs, outputs.detach() - 1, reduction=reduction) / k
    (term,) = read_terms(loss, {})
    loss.backward()
    weight = term.factor / term.count if term.is_mean else term.factor
    assert term.count == rows * width
    np.testing.assert_allclose(outputs.grad.numpy() / 2, weight, rtol=1e-6)


def test_a_mean_over_rows_of_sums_is_a_mean_over_rows():
    outputs = torch.ones(6, 3, requires_grad=True)
    (term,) = read_terms(outputs.mean(0).sum() / 2, {})
    assert (term.count, term.is_mean, term.factor) == (6, True, 0.5)
    (term,) = read_terms(outputs.sum(1).mean(), {})
    assert (term.count, term.is_mean, term.factor) == (6, True, 1.0)


def test_a_scaler_s_scale_is_left_out():
    outputs = torch.ones(6, 3, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaled = scaler.scale(outputs.mean())
    (term,) = read_terms(scaled / 4, {scaled.grad_fn: 512.0})
    assert term.factor == 0.25


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Own.apply, "OwnBackward"),
        (lambda x: x.sum() * x.mean(), "MulBackward0 of two losses"),
        (lambda x: x * 2, r"shape \(3,\)"),
        (lambda x: x.max(), "MaxBackward1"),
        (lambda x: x.detach().sum(), "a loss without a graph"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(make, named):
    with pytest.raises(UnreadError, match=named):
        read_terms(make(torch.ones(3, requires_grad=True)), {})


def test_a_sum_of_very_many_losses_is_refused_and_does_not_fall_over():
    x = nn.Parameter(torch.ones(()))
    loss = torch.zeros(())
    for _ in range(5000):
        loss = loss + x
    with pytest.raises(UnreadError):
        read_terms(loss, {})
