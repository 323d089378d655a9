"""Is whatever has no per-example gradients, or was not seen, refused in one sentence with its remedy?"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from largebatch.errors import ConfigError
from largebatch.noise.per_example.collector import PerExampleCollector
from largebatch.noise.per_example.rules import couples, rule_for


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Net(nn.Module):
    """A model whose forward is given."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.call = forward

    def forward(self, x):
        return self.call(self, x)


def refused(model, x, match, *, loss=torch.sum):
    """The step is refused; the next, with nothing in it, is not."""
    collector = PerExampleCollector(model)
    loss(model(x)).backward()
    with pytest.raises(ConfigError, match=match) as caught:
        collector.take()
    assert collector.take() == []
    return str(caught.value)


IDS = torch.tensor([[0, 1, 2], [3, 3, 0]])


def test_a_tied_weight_used_by_hand_is_noticed():
    model = Net(lambda self, ids: functional.linear(self.emb(ids), self.emb.weight), emb=nn.Embedding(5, 4))
    said = refused(
        model, IDS, "'emb.weight' is not the sum of what came through 'emb'", loss=lambda y: y.square().sum()
    )
    assert "measure by microbatches" in said


def test_a_weight_of_a_layer_used_by_hand_alone_is_noticed():
    model = Net(lambda self, x: functional.linear(x, self.fc.weight), fc=nn.Linear(3, 2, bias=False))
    refused(model, torch.randn(4, 3), "'fc.weight' came from outside")


def test_a_use_that_begins_later_makes_the_norms_nan():
    def forward(self, x):
        return self.fc(x) + (functional.linear(x, self.fc.weight) if self.twice else 0)

    model = Net(forward, fc=nn.Linear(3, 3))
    model.twice = False
    collector = PerExampleCollector(model)
    model(torch.randn(4, 3)).square().sum().backward()
    assert collector.take()[0].isfinite().all()
    model.twice = True
    model(torch.randn(4, 3)).square().sum().backward()
    assert collector.take()[0].isnan().all()


def test_a_penalty_on_the_weights_is_noticed():
    layer = nn.Linear(3, 2)
    collector = PerExampleCollector(layer)
    (layer(torch.randn(4, 3)).sum() + layer.weight.square().sum()).backward()
    with pytest.raises(ConfigError, match="is not the sum of"):
        collector.take()


def test_a_gradient_penalty_is_noticed():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    collector = PerExampleCollector(model)
    x = torch.randn(5, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    with pytest.raises(ConfigError):
        collector.take()


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_training(affine):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine))
    assert "GroupNorm" in refused(model, torch.randn(5, 3), "'1': BatchNorm1d normalises by statistics of its batch")
    model.eval()
    model.zero_grad()
    collector = PerExampleCollector(model)
    model(torch.randn(5, 3)).sum().backward()
    assert collector.take()[0].shape == (1, 5)


def test_batch_norm_over_processes():  # its forward in training needs a GPU
    assert "GroupNorm" in (couples(nn.SyncBatchNorm(4)) or "")
    assert couples(nn.SyncBatchNorm(4).eval()) is None
    assert rule_for(nn.SyncBatchNorm(4)) is not None


def test_frequencies_over_the_batch():
    refused(nn.Embedding(5, 2, scale_grad_by_freq=True), IDS, "scale_grad_by_freq=False")


def test_rows_that_are_no_examples():
    model = Net(lambda self, x: self.fc(x.flatten(0, 1)), fc=nn.Linear(4, 2))
    said = refused(model, torch.randn(3, 5, 4), r"\(15, 4\) while Net was called with 3 examples")
    assert "(batch, time, features)" in said


def test_too_few_dims_to_have_examples():
    refused(nn.Linear(3, 2), torch.randn(3), r"shape \(3,\)")
    refused(nn.LayerNorm((4, 3)), torch.randn(4, 3), r"shape \(4, 3\)")
    refused(nn.Conv1d(4, 2, 1), torch.randn(4, 5), r"shape \(4, 5\)")


@pytest.mark.parametrize("num_steps", [3, 2])
def test_shared_positions_that_cannot_be_followed(num_steps):
    def forward(self, ids):
        places = self.places(torch.arange(ids.shape[1])).unsqueeze(0)
        return self.tokens(ids) + places

    model = Net(forward, tokens=nn.Embedding(5, 4), places=nn.Embedding(3, 4))
    refused(model, IDS[:, :num_steps], "'places'", loss=lambda y: y.square().sum())


def test_labels_are_examples_though_they_have_one_dim():
    model = Net(lambda self, x: functional.silu(self.label(x[:, 0].long())) * x, label=nn.Embedding(3, 4))
    collector = PerExampleCollector(model)
    model(torch.ones(4, 4)).sum().backward()
    assert collector.take()[0].shape == (1, 4)


def test_dropout_in_a_layer_that_is_run_again():
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    refused(model, torch.randn(3, 5, 4), "torch.func cannot run it example by example")
    lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
    refused(lstm, torch.randn(3, 5, 3), "dropout=0.5", loss=lambda y: y[0].sum())


def test_time_first():
    refused(nn.LSTM(3, 4), torch.randn(5, 5, 3), "batch_first=True", loss=lambda y: y[0].sum())


def test_a_second_backward_through_one_forward():
    layer = nn.Linear(3, 2)
    collector = PerExampleCollector(layer)
    output = layer(torch.randn(4, 3))
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()
    with pytest.raises(ConfigError, match="Use one backward, of the sum of the losses"):
        collector.take()


def test_two_forwards_in_one_backward():
    layer = nn.Linear(3, 2)
    collector = PerExampleCollector(layer)
    (layer(torch.randn(4, 3)).sum() + layer(torch.randn(4, 3)).sum()).backward()
    with pytest.raises(ConfigError, match="went through 2 forwards of Linear"):
        collector.take()


def test_parts_called_with_different_examples():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    collector = PerExampleCollector(model)
    (model[0](torch.randn(4, 3)).sum() + model[1](torch.randn(5, 3)).sum()).backward()
    with pytest.raises(ConfigError, match="4 and 5 rows"):
        collector.take()


def test_an_input_written_into_is_an_error_of_autograd_as_without_us():
    layer = nn.Linear(3, 2)
    collector = PerExampleCollector(layer)
    x = torch.randn(4, 3)
    loss = layer(x).sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    layer.zero_grad()
    layer(torch.randn(4, 3)).sum().backward()
    assert collector.take()[-1].isfinite().all()


def test_an_input_that_only_a_bias_follows_may_be_written_into():
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    collector = PerExampleCollector(layer)
    x = torch.randn(4, 3)
    loss = layer(x).sum()
    x.zero_()
    loss.backward()
    assert collector.take()[0].tolist() == [[2.0] * 4]


def test_a_parameter_unfrozen_later():
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    collector = PerExampleCollector(layer)
    layer.bias.requires_grad_(True)
    layer(torch.randn(4, 3)).sum().backward()
    with pytest.raises(ConfigError, match="unfreezing"):
        collector.take()


def test_gradients_that_are_not_finite_are_not_refused():
    layer = nn.Linear(3, 2)
    collector = PerExampleCollector(layer)
    (layer(torch.randn(4, 3)) * torch.inf).sum().backward()
    assert not collector.take()[0].isfinite().any()
    layer.zero_grad()
    layer(torch.randn(4, 3)).sum().backward()
    assert collector.take()[0].isfinite().all()


def test_what_cannot_be_hooked():
    with pytest.raises(ConfigError, match="nothing to measure"):
        PerExampleCollector(nn.ReLU())
    with pytest.raises(ConfigError, match="nothing to measure"):
        PerExampleCollector(nn.Linear(2, 2), only="norm layers")
    with pytest.raises(ConfigError, match="'norms' is not known"):
        PerExampleCollector(nn.Linear(2, 2), only="norms")
    with pytest.raises(ConfigError, match="lazy"):
        PerExampleCollector(nn.LazyLinear(2))


def test_closing_removes_every_hook():
    model = nn.Sequential(nn.Linear(3, 2), nn.Conv1d(2, 2, 1))
    PerExampleCollector(model, fast=True).close()
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for parameter in model.parameters():
        assert not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
