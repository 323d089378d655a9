"""Is a squared norm right in any dtype, size and layout, without a copy?"""

import pytest
import torch

from largebatch.noise.collect.norms import CHUNK, Tally, flat_view, sq_norm_dots


def sq_norm(tensor):
    return sum(dot.double().item() for dot in sq_norm_dots(tensor))


def exact(tensor):
    flat = tensor.detach().double().flatten()
    return torch.dot(flat, flat).item()


@pytest.mark.parametrize("spread", ["normal", "ramp"])
def test_twenty_five_million_elements_are_right_to_1e_5(spread):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(25_000_000, generator=generator) if spread == "normal" else torch.linspace(1e-4, 1, 25_000_000)
    dots = sq_norm_dots(tensor)
    assert len(dots) == -(-25_000_000 // CHUNK)
    assert CHUNK <= 1_000_000
    assert sq_norm(tensor) == pytest.approx(exact(tensor), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_dtypes_are_summed_in_float32_or_wider(dtype):
    tensor = (torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    truth = tensor.abs().double().square().sum().item()
    assert all(dot.dtype in (torch.float32, torch.float64) for dot in sq_norm_dots(tensor))
    assert sq_norm(tensor) == pytest.approx(truth, rel=1e-5)


def test_channels_last_is_not_copied():
    tensor = torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)
    view = flat_view(tensor)
    assert view.data_ptr() == tensor.data_ptr()
    assert view.shape == (4 * 3 * 5 * 6,)
    assert sq_norm(tensor) == pytest.approx(exact(tensor), rel=1e-6)


def test_a_dense_view_starts_where_its_tensor_starts():
    tensor = torch.arange(12.0).reshape(3, 4)[1:].T
    assert flat_view(tensor).data_ptr() == tensor.data_ptr()
    assert sq_norm(tensor) == exact(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6)[:, ::2],
        torch.tensor([3.0]).expand(5),
        torch.tensor(2.0),
        torch.ones(0, 3),
        torch.arange(6.0).reshape(2, 1, 3).transpose(0, 1),
    ],
    ids=["strided", "expanded", "scalar", "empty", "size one"],
)
def test_any_layout_has_its_norm(tensor):
    assert sq_norm(tensor) == pytest.approx(exact(tensor), rel=1e-6)


@pytest.mark.parametrize("channels_last", [False, True])
def test_weights_go_with_their_elements_whatever_the_layout(channels_last):
    generator = torch.Generator().manual_seed(0)
    tensor, weights = (torch.randn(4, 3, 5, 6, generator=generator) for _ in range(2))
    if channels_last:
        tensor = tensor.to(memory_format=torch.channels_last)
    truth = (weights.double() * tensor.double().square()).sum().item()
    assert sum(dot.item() for dot in sq_norm_dots(tensor, weights)) == pytest.approx(truth, rel=1e-5)


def test_a_tally_adds_up_by_owner_in_float64():
    tally = Tally()
    dots = [torch.tensor(value) for value in (1.0, 2.0**-30, 4.0)]
    for owners, wanted in (([0, 0, 1], [1 + 2.0**-30, 4.0]), ([1, 0, 1], [2.0**-30, 5.0])):
        assert tally.sums(dots, owners, 2, torch.device("cpu")).tolist() == wanted
    assert tally.sums([], [], 2, torch.device("cpu")).tolist() == [0.0, 0.0]
