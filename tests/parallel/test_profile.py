"""Profiles: sizes beside torchvision's and transformers' own modules, order beside autograd's, and no trace left."""

import copy

import pytest
import torch
import torchvision
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from largebatch.errors import ConfigError
from largebatch.parallel.known_models import KNOWN_MODELS, known_profile
from largebatch.parallel.model_profile import LayerProfile, ModelProfile, profile


def sizes(model):
    """Owner of parameters -> gradient bytes, from the module itself."""
    found = {}
    for name, value in model.named_parameters():
        owner = name.rpartition(".")[0] or "(root)"
        found[owner] = found.get(owner, 0) + value.numel() * value.element_size()
    return found


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_built_in_sizes_are_those_of_the_library_that_has_the_model(name):
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config()) if name == "gpt2" else getattr(torchvision.models, name)()
    built_in = {layer.name: layer.num_bytes for layer in known_profile(name).layers if layer.num_bytes}
    assert built_in == sizes(model)


def forward_operations(model, sample):
    """Multiply-adds of each convolution and linear layer, from the shapes that pass through it."""
    found, hooks = {}, []

    def count(name):
        def hook(module, _inputs, output):
            positions = output.numel() / output.shape[1] if isinstance(module, nn.Conv2d) else 1
            found[name] = module.weight.numel() * positions

        return hook

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            hooks.append(module.register_forward_hook(count(name)))
    with torch.no_grad():
        model(sample)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_backward_shares_follow_the_multiply_adds_that_torchvision_does(name):
    with torch.device("meta"):
        model = getattr(torchvision.models, name)().eval()
        counted = forward_operations(model, torch.empty(1, 3, 224, 224))
    shares = {layer.name: layer.seconds for layer in known_profile(name).layers}
    backward = {name: operations * (1 if name == "conv1" else 2) for name, operations in counted.items()}
    unit = shares["fc"] / backward["fc"]
    for name, operations in backward.items():
        assert shares[name] == pytest.approx(operations * unit, rel=1e-9)


def test_the_built_in_order_is_autograds():
    torch.manual_seed(0)
    model = torchvision.models.resnet18()
    measured = profile(model, torch.randn(2, 3, 32, 32), repeats=1)
    assert [layer.name for layer in measured.layers] == [layer.name for layer in known_profile("resnet18").layers]
    assert measured.num_bytes == known_profile("resnet18").num_bytes


def odd_model():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))


@pytest.mark.parametrize("train", [True, False])
def test_measuring_leaves_the_model_its_gradients_its_mode_and_the_random_numbers_alone(train):
    model = odd_model().train(train)
    model(torch.randn(4, 6)).sum().backward()
    model[0].weight.grad = None
    before = copy.deepcopy(model.state_dict())
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    versions = {name: p._version for name, p in model.named_parameters()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with torch.no_grad():
        profile(model, torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training is train
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for name, parameter in model.named_parameters():
        assert parameter._version == versions[name]
        assert (parameter.grad is None) == (gradients[name] is None)
        assert parameter.grad is None or torch.equal(parameter.grad, gradients[name])
        assert not parameter._post_accumulate_grad_hooks


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, *, scale):
        return {"logits": self.head(self.middle(self.embedding(tokens))) * scale, "tokens": tokens}


def test_tied_weights_count_once_and_come_when_they_are_whole():
    layers = profile(Tied(), {"tokens": torch.tensor([1, 2]), "scale": 2.0}).layers
    assert [layer.name for layer in layers] == ["middle", "embedding", "unused"]
    assert [layer.num_bytes for layer in layers] == [80, 112, 24]


class Sleeps(torch.autograd.Function):
    """Stands for a layer whose backward is slow, by work that no machine can skip."""

    @staticmethod
    def forward(_ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(_ctx, gradient):
        for _ in range(200):
            torch.ones(200, 200) @ torch.ones(200, 200)
        return gradient


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs):
        return self.third(Sleeps.apply(self.second(self.first(inputs))))


def test_time_is_booked_to_the_layer_that_waits_for_it():
    measured = profile(Slow(), torch.randn(2, 4), repeats=5)
    seconds = {layer.name: layer.seconds for layer in measured.layers}
    assert [layer.name for layer in measured.layers] == ["third", "second", "first"]
    assert seconds["second"] > 0.5 * measured.backward_seconds
    assert measured.forward_seconds > 0 and measured.measured


def test_scaling_keeps_sizes_and_shares():
    scaled = known_profile("resnet50").scaled(0.12)
    assert scaled.backward_seconds == pytest.approx(0.12)
    assert scaled.num_bytes == 4 * 25_557_032


def test_what_cannot_be_profiled_is_one_sentence():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model requires"):
        profile(frozen, torch.zeros(1, 2))
    with pytest.raises(ConfigError, match="repeats is 1 or more"):
        profile(nn.Linear(2, 2), torch.zeros(1, 2), repeats=0)
    with pytest.raises(ConfigError, match="no profile of 'resnet51' is built in; there are resnet18"):
        known_profile("resnet51")
    with pytest.raises(ConfigError, match="needs a layer"):
        ModelProfile(name="none", layers=(), measured=True)
    with pytest.raises(ConfigError, match="bytes and seconds"):
        LayerProfile(name="a", num_bytes=-1, seconds=1)
    with pytest.raises(ConfigError, match="more than 0"):
        known_profile("resnet18").scaled(0)
