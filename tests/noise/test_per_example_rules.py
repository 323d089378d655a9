"""Are each layer's per-example norms those of a float64 oracle that shares no code, for every shape of layer?"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.noise.per_example import forms
from largebatch.noise.per_example.collector import PerExampleCollector
from largebatch.noise.per_example.rules import rule_for
from oracles import per_example as oracle

# float32 against float64 on the same numbers, relative to the largest example: rounding of sums of up to some hundred
# products. An example that is much smaller than the largest has no more correct digits than that.
DTYPES = {torch.float64: 1e-10, torch.float32: 1e-5}
QUICK = settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))


def run(layer, x, dtype, *, fast=False):
    """(norms by the collector, gradient of the output as numpy) of one layer under a random linear loss."""
    layer = layer.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    collector = PerExampleCollector(layer, fast=fast)
    output = layer(x)
    g = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
    (output * g).sum().backward()
    (norms,) = collector.take()
    collector.close()
    return norms[0].double().numpy(), g.double().numpy()


def check(layer, x, gradients, *, fast=False):
    """Hold the norms to the oracle's, in both precisions."""
    for dtype, tolerance in DTYPES.items():
        norms, g = run(layer, x, dtype, fast=fast)
        seen = x.to(dtype).double().numpy() if x.is_floating_point() else x.numpy()
        truth = oracle.sq_norms(*gradients(seen, g))
        assert norms == pytest.approx(truth, rel=tolerance, abs=tolerance * truth.max())


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


sizes = st.integers(1, 5)


@QUICK
@given(st.lists(sizes, min_size=1, max_size=3), sizes, sizes, st.booleans(), st.booleans(), st.booleans())
def test_linear_with_any_leading_dims(leading, ins, outs, bias, narrow, fast):
    layer = nn.Linear(ins * 4 if narrow else ins, outs, bias=bias)
    x = normal(*leading, layer.in_features)
    check(layer, x, lambda x, g: oracle.linear(x, g)[: 1 + bias], fast=fast)


def test_the_linear_layer_of_gpt_2_in_transformers():
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(7, 5)  # outputs, inputs
    assert rule_for(layer) is not None

    def gradients(x, g):
        weight, bias = oracle.linear(x, g)
        return weight.swapaxes(1, 2), bias

    for positions in (1, 3, 40):
        check(layer, normal(4, positions, 5), gradients)


@pytest.mark.parametrize("workspace", [1, 100, 2**21])
@pytest.mark.parametrize("positions", [1, 3, 40])
def test_all_ways_to_a_linear_norm_agree_in_any_number_of_parts(positions, workspace, monkeypatch):
    monkeypatch.setattr(forms, "WORKSPACE", workspace)
    ways = []
    for direct in (True, False):
        monkeypatch.setattr(forms, "prefer_direct", lambda *sizes, direct=direct: direct)
        check(nn.Linear(5, 7), normal(4, positions, 5), oracle.linear)
        ways.append(run(nn.Linear(5, 7), normal(4, positions, 5), torch.float64))
    assert len(ways) == 2


@st.composite
def convolutions(draw):
    num_dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    small = 3 if num_dims < 3 else 2

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(num_dims))

    kernel, dilation = each(1, small), each(1, 2)
    mode = draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    if draw(st.booleans()):
        stride, padding = (1,) * num_dims, draw(st.sampled_from(["same", "valid"]))
    else:
        stride, padding = each(1, 3), each(0, 2)
    spans = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    # Wide enough for the dilated kernel, and for padding by reflection.
    size = [max(span, 2) + 1 + draw(st.integers(0, 2)) for span in spans]
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[num_dims - 1](
        groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), kernel, stride=stride, padding=padding,
        dilation=dilation, groups=groups, padding_mode=mode, bias=draw(st.booleans()),
    )  # fmt: skip
    if padding == "same":
        amounts = [(span // 2, span - span // 2) for span in spans]
    else:
        amounts = [(p, p) for p in (padding if padding != "valid" else (0,) * num_dims)]
    return layer, normal(draw(st.integers(1, 3)), layer.in_channels, *size), amounts


@QUICK
@given(convolutions(), st.booleans())
def test_convolutions_of_every_kernel_stride_padding_dilation_and_group(drawn, fast):
    layer, x, padding = drawn

    def gradients(x, g):
        found = oracle.convolution(
            x, g, layer.kernel_size, stride=layer.stride, dilation=layer.dilation, padding=padding,
            groups=layer.groups, padding_mode=layer.padding_mode,
        )  # fmt: skip
        return found[: 1 + (layer.bias is not None)]

    check(layer, x, gradients, fast=fast)


def test_channels_last_images_are_read_as_they_lie():
    layer = nn.Conv2d(3, 4, 3)
    x = normal(2, 3, 6, 5).to(memory_format=torch.channels_last)
    assert run(layer, x, torch.float64)[0] == pytest.approx(run(layer, x.contiguous(), torch.float64)[0], rel=1e-12)


@QUICK
@given(st.integers(1, 4), st.lists(sizes, max_size=2), st.integers(1, 6), st.none() | st.just(0))
def test_embedding_with_repeats_and_padding(examples, positions, num_rows, padding_idx):
    ids = torch.randint(num_rows, (examples, *positions), generator=torch.Generator().manual_seed(1))
    layer = nn.Embedding(num_rows, 3, padding_idx=padding_idx)
    check(layer, ids, lambda ids, g: [oracle.embedding(ids, g, num_rows, padding_idx)])


def test_sparse_gradients_of_an_embedding():
    ids = torch.tensor([[0, 2, 2], [1, 0, 3]])
    check(nn.Embedding(5, 3, sparse=True), ids, lambda ids, g: [oracle.embedding(ids, g, 5)])


@QUICK
@given(st.integers(1, 3), st.lists(sizes, max_size=2), st.lists(st.integers(2, 4), min_size=1, max_size=2))
def test_layer_norm_and_rms_norm(examples, leading, shape):
    x = normal(examples, *leading, *shape)
    check(nn.LayerNorm(shape), x, lambda x, g: oracle.layer_norm(x, g, len(shape), 1e-5))
    rms = nn.RMSNorm(shape, eps=1e-3)
    check(rms, x, lambda x, g: oracle.layer_norm(x, g, len(shape), 1e-3, centre=False)[:1])


def test_rms_norm_takes_its_default_epsilon_from_the_precision():
    x = normal(3, 4) * 1e-4
    for dtype, tolerance in DTYPES.items():
        norms, g = run(nn.RMSNorm(4), x, dtype)
        truth = oracle.layer_norm(x.to(dtype).double().numpy(), g, 1, torch.finfo(dtype).eps, centre=False)[0]
        assert norms == pytest.approx(oracle.sq_norms(truth), rel=tolerance)


@QUICK
@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(2, 3), min_size=1, max_size=3))
def test_group_norm_and_instance_norm(examples, groups, size):
    x = normal(examples, 2 * groups, *size)
    check(nn.GroupNorm(groups, 2 * groups), x, lambda x, g: oracle.group_norm(x, g, groups, 1e-5))
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(size) - 1]
    check(kind(2 * groups, affine=True), x, lambda x, g: oracle.group_norm(x, g, 2 * groups, 1e-5))


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_norms_with_fixed_statistics(kind):
    layer = kind(3, affine=True, track_running_stats=True).eval()
    layer.running_mean.copy_(torch.tensor([1.0, -2.0, 0.5]))
    layer.running_var.copy_(torch.tensor([0.5, 2.0, 1.0]))

    def gradients(x, g):
        mean, var = (np.array(values)[:, None, None] for values in ([1.0, -2.0, 0.5], [0.5, 2.0, 1.0]))
        return ((x - mean) / np.sqrt(var + 1e-5) * g).sum((2, 3)), g.sum((2, 3))

    check(layer, normal(4, 3, 2, 5), gradients)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_parameter_is_left_out(frozen):
    layer = nn.Linear(3, 2)
    layer.get_parameter(frozen).requires_grad_(False)
    check(layer, normal(4, 5, 3), lambda x, g: [oracle.linear(x, g)[frozen == "weight"]])
