"""Does one device normalise runs of n as if each were a batch of its own, in every mode that torch's layers have?"""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from largebatch.errors import ConfigError
from largebatch.recipe.batchnorm import GhostBatchNorm
from oracles import recipe_batchnorm as oracle

EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64: only the order of sums differs
SHAPES = st.sampled_from([(), (1,), (5,), (3, 2), (2, 1, 3)])
TORCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def drawn(*shape: int, seed: int = 0, offset: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator) * 2 + offset


def layer_of(channels: int, n: int, **options) -> GhostBatchNorm:
    layer = GhostBatchNorm(channels, n, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(drawn(channels, seed=9, offset=1.0))
    return layer


def twin(layer: GhostBatchNorm, ndim: int, **options) -> nn.Module:
    """torch's own layer with the same state."""
    other = TORCH[ndim](layer.num_features, **options).double()
    other.load_state_dict(layer.state_dict())
    return other


@settings(max_examples=40)
@given(
    k=st.integers(2, 4), n=st.integers(2, 5), channels=st.integers(1, 3), places=SHAPES, seed=st.integers(0, 99),
    last=st.booleans(), apart=st.booleans(),
)  # fmt: skip
def test_every_run_is_normalised_by_itself_forward_and_backward(k, n, channels, places, seed, last, apart):
    # Goyal 2017, eq. (5), for any dimension and memory format; `apart` leaves gaps in memory.
    x, dy = drawn(k * n, channels, *places, seed=seed), drawn(k * n, channels, *places, seed=seed + 1, offset=0.5)
    layer = layer_of(channels, n)
    given_x = torch.stack((x, x), -1)[..., 0] if apart else x.clone()
    if last and x.ndim == 4:
        given_x = given_x.contiguous(memory_format=torch.channels_last)
    given_x.requires_grad_()
    y = layer(given_x)
    y.backward(dy)
    gamma, beta = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    np.testing.assert_allclose(y.detach(), oracle.outputs(x.numpy(), n, gamma, beta), **EXACT)
    found = (given_x.grad, layer.weight.grad, layer.bias.grad)
    for ours, theirs in zip(found, oracle.gradients(x.numpy(), dy.numpy(), n, gamma), strict=True):
        np.testing.assert_allclose(ours, theirs, **EXACT)


@pytest.mark.parametrize("momentum", [0.1, None, 0.0, 1.0, 0.7])
@pytest.mark.parametrize("places", [(), (4,), (2, 3)])
def test_running_statistics_go_where_one_update_a_run_takes_them(momentum, places):
    # Accumulation over microbatches of n does these updates one by one, in torch's own layer.
    layer = layer_of(3, 4, momentum=momentum)
    torchs = twin(layer, 2 + len(places), momentum=momentum)
    state = (np.zeros(3), np.ones(3), 0)
    for step in range(3):
        x = drawn(20, 3, *places, seed=step)
        layer(x)
        for microbatch in x.split(4):
            torchs(microbatch)
        state = oracle.running(x.numpy(), 4, momentum, state)
        for name, theirs in zip(("running_mean", "running_var", "num_batches_tracked"), state, strict=True):
            np.testing.assert_allclose(getattr(layer, name), theirs, **EXACT)
            np.testing.assert_allclose(getattr(layer, name), getattr(torchs, name), **EXACT)


@pytest.mark.parametrize("places", [(), (4,), (2, 3), (2, 1, 2)])
def test_a_local_batch_of_n_and_evaluation_are_torchs_bit_for_bit(places):
    layer = layer_of(3, 6)
    torchs = twin(layer, 2 + len(places))
    x = drawn(6, 3, *places)
    assert torch.equal(layer(x), torchs(x))
    for ours, theirs in zip(layer.state_dict().values(), torchs.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    x = drawn(5, 3, *places)  # which n does not divide
    assert torch.equal(layer.eval()(x), torchs.eval()(x))


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {"bias": False}, {}], ids=str)
def test_a_state_goes_to_torchs_layer_and_back(options):
    layer = layer_of(3, 4, **options)
    x = drawn(8, 3, 2, 2)
    layer(x)
    torchs = twin(layer, 4, **options)
    again = layer_of(3, 4, **options)
    again.load_state_dict(torchs.state_dict())
    assert list(layer.state_dict()) == list(torchs.state_dict())
    gamma = torch.ones(3) if layer.weight is None else layer.weight.detach()
    beta = torch.zeros(3) if layer.bias is None else layer.bias.detach()
    for found in (layer, again, copy.deepcopy(layer)):
        assert torch.equal(found.eval()(x), torchs.eval()(x))
        wanted = oracle.outputs(x.numpy(), 4, gamma.numpy(), beta.numpy())
        np.testing.assert_allclose(found.train()(x).detach(), wanted, **EXACT)


def test_statistics_that_are_switched_off_later_stay_as_they_are():
    layer = layer_of(3, 4)
    layer.track_running_stats = False
    layer(drawn(8, 3))
    assert layer.num_batches_tracked == 0
    assert torch.equal(layer.running_mean, torch.zeros(3).double())


@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=str)
def test_it_can_be_differentiated_twice(options):
    # Curvature is measured by second derivatives. Central differences of torch against both derivatives.
    layer = layer_of(2, 3, **options)
    layer.track_running_stats = False
    x = drawn(6, 2, 2).requires_grad_()

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(("weight", "bias"), parameters, strict=False)), (x,))

    inputs = (x, *(p.detach().clone().requires_grad_() for p in layer.parameters()))
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("frozen", [{"weight"}, {"bias"}, {"weight", "bias"}])
def test_what_needs_no_gradient_gets_none(frozen):
    layer = layer_of(3, 4)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    layer(drawn(8, 3).requires_grad_()).sum().backward()
    assert {name for name, p in layer.named_parameters() if p.grad is None} == frozen
    twice = torch.autograd.grad(layer(x := drawn(8, 3).requires_grad_()).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(twice[0].square().sum(), x)[0].isfinite().all()


def test_channels_last_stays_channels_last():
    x = drawn(8, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer_of(3, 4)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.backward(torch.ones_like(y))
    assert x.grad is not None and x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_an_activation_may_work_in_place(layout):
    # As in torchvision's and timm's residual blocks.
    layer, grads = layer_of(3, 4), []
    for act in (torch.relu, torch.relu_):
        x = drawn(8, 3, 2, 2).contiguous(memory_format=layout).requires_grad_()
        y = layer(x)
        assert not y._is_view()  # a view would be copied in the backward pass
        act(y).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, **EXACT)


def test_any_other_memory_layout_is_fine():
    x = drawn(8, 3, 4, 5)
    gamma, beta = (p.detach().numpy() for p in layer_of(3, 4).parameters())
    for given_x in (
        x.transpose(2, 3),
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x[:, :, ::2],
        x[:1].expand(8, 3, 4, 5),
    ):
        wanted = oracle.outputs(given_x.numpy(), 4, gamma, beta)
        np.testing.assert_allclose(layer_of(3, 4)(given_x).detach(), wanted, **EXACT)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_normalised_in_float32(half):
    # The input and the output are rounded (2^-9 of a bfloat16 in [1, 4]), the sums over 4096 values are not.
    x = drawn(256, 2, 32, offset=30.0).to(half)
    layer = layer_of(2, 128).float()
    y = layer(x)
    gamma, beta = (p.detach().double().numpy() for p in layer.parameters())
    assert y.dtype == half
    np.testing.assert_allclose(
        y.detach().double(), oracle.outputs(x.double().numpy(), 128, gamma, beta), rtol=2**-8, atol=2**-8
    )
    torch.testing.assert_close(layer.running_mean.double(), 0.19 * x.double().mean((0, 2)), rtol=1e-2, atol=0)


def test_under_autocast_it_follows_the_layer_before_and_keeps_its_statistics_whole():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), GhostBatchNorm(4, 4))
    x = drawn(16, 3, 6, 6).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert model[1].running_var.dtype == model[0].weight.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        state = oracle.running(model[0](x).detach().double().numpy(), 4, 0.1, (np.zeros(4), np.ones(4), 0))
    np.testing.assert_allclose(model[1].running_var, state[1], rtol=1e-5)  # 2^-9 had autocast halved the updates


def test_compiled_whole_it_is_the_same():
    eager = layer_of(3, 4)
    layer = copy.deepcopy(eager)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, dy, results = drawn(8, 3, 2, 2), drawn(8, 3, 2, 2, seed=7), []
    for call, owner in ((eager, eager), (compiled, layer)):
        given_x = x.clone().requires_grad_()
        y = call(given_x)
        y.backward(dy)
        results.append([y, given_x.grad, *(p.grad for p in owner.parameters()), *owner.buffers()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_the_gradients_are_the_same(reentrant):
    layer = layer_of(3, 4)
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        x = drawn(8, 3, 2).requires_grad_()
        layer.zero_grad()
        run(x).square().sum().backward()
        grads.append((x.grad, layer.weight.grad))
    torch.testing.assert_close(*grads, **EXACT)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((100, 3), r"local batch of 100 cannot be cut into runs of n=32 .* The nearest that can: 96 or 128"),
        ((20, 3), r"local batch of 20 .* The nearest that can: 32\."),
        ((64, 4), r"shape \(batch, 3, \.\.\.\); got \(64, 4\)"),
        ((64,), r"got \(64,\)"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(shape, message):
    with pytest.raises(ConfigError, match=message):
        GhostBatchNorm(3, 32)(torch.ones(shape))


def test_one_value_a_channel_and_a_wrong_n_are_refused():
    with pytest.raises(ConfigError, match=r"n=1 example of shape \(3,\) has one value a channel"):
        GhostBatchNorm(3, 1)(torch.ones(4, 3))
    assert GhostBatchNorm(3, 1)(torch.ones(4, 3, 2)).shape == (4, 3, 2)
    for n in (0, -2, 2.0, True):
        with pytest.raises(ConfigError, match=f"at least 1; got {n}"):
            GhostBatchNorm(3, n)


def test_it_says_what_it_is():
    assert repr(GhostBatchNorm(3, 32)).endswith("bias=True, track_running_stats=True, n=32)")
