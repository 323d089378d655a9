"""Do uneven parts add up to the gradient of the whole?"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.recipe.loss import normalise


def problem(num_units: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_units, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(num_units, dtype=torch.float64, generator=generator)
    return x, y, torch.randn(3, dtype=torch.float64, generator=generator)


def summed_gradient(x: Tensor, y: Tensor, w: Tensor, parts: list[int], divisors: list[float]) -> Tensor:
    """What a summing all-reduce over workers with these parts gives."""
    total = torch.zeros_like(w)
    for rows, targets, divisor in zip(x.split(parts), y.split(parts), divisors, strict=True):
        weights = w.clone().requires_grad_()
        normalise(nn.functional.mse_loss(rows @ weights, targets, reduction="sum"), divisor).backward()
        assert weights.grad is not None
        total += weights.grad
    return total


def whole_gradient(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return 2 * x.T @ (x @ w - y) / len(x)  # closed form of the gradient of the mean squared error


@settings(max_examples=30)
@given(parts=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_the_sum_of_gradients_of_losses_over_kn_is_the_single_process_gradient(parts: list[int], seed: int):
    # Goyal 2017, remark 3, for any split, even or not; float64, so the order of sums costs about 1e-15.
    x, y, w = problem(sum(parts), seed)
    gradient = summed_gradient(x, y, w, parts, [sum(parts)] * len(parts))
    torch.testing.assert_close(gradient, whole_gradient(x, y, w), rtol=1e-10, atol=1e-12)


def test_an_average_of_averages_is_right_for_even_parts_only():
    x, y, w = problem(12, seed=0)
    for parts, agrees in (([4, 4, 4], True), ([1, 4, 7], False)):
        average = summed_gradient(x, y, w, parts, [len(parts) * part for part in parts])
        assert torch.allclose(average, whole_gradient(x, y, w), rtol=1e-10, atol=1e-12) is agrees


def test_a_loss_that_is_not_one_number_is_refused():
    with pytest.raises(ConfigError, match=r"shape \(4,\)\. Use reduction='sum'"):
        normalise(torch.ones(4), 4)


@pytest.mark.parametrize("total", [0, -3, float("nan")])
def test_a_step_of_no_units_is_refused(total: float):
    with pytest.raises(ConfigError, match=f"above 0; got {total}"):
        normalise(torch.tensor(1.0), total)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_the_mean_over_workers_is_undone(workers: int):
    loss = torch.tensor(3.0, dtype=torch.float64)
    mean = normalise(loss, 7, averaged_over=workers) / workers
    torch.testing.assert_close(mean, normalise(loss, 7), rtol=1e-15, atol=0)


def test_an_average_over_no_workers_is_refused():
    with pytest.raises(ConfigError, match="averaged over at least 1 worker; got averaged_over=0"):
        normalise(torch.tensor(1.0), 4, averaged_over=0)
