"""Does weight decay touch what it should and nothing else, whoever wrote the norm layers?"""

import re

import pytest
import timm
import torch
import torchvision
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import LayerScale, RmsNorm2d
from timm.layers.grn import GlobalResponseNorm
from torch import nn
from torch.nn import functional

from largebatch.errors import ConfigError
from largebatch.recipe.decay import decay_groups, is_norm


class Downsample(nn.Module):
    """Every norm layer of torch under names that give nothing away."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        self.b = nn.ModuleList([
            nn.BatchNorm1d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, affine=True),
            nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm3d(4, affine=True), nn.GroupNorm(2, 4), nn.LayerNorm(4),
            nn.RMSNorm(4), type("Mine", (nn.LayerNorm,), {})(4), nn.LazyBatchNorm2d(),
        ])  # fmt: skip
        self.bn_like = nn.Linear(4, 4)  # a name that says norm and a module that is none
        self.rnn = nn.LSTM(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)


def names_of(model: nn.Module, group: list) -> set[str]:
    return {name for name, parameter in model.named_parameters() if any(parameter is member for member in group)}


def test_norm_layers_of_every_type_and_nothing_else_have_no_weight_decay():
    model = Downsample()
    decayed, not_decayed = decay_groups(model)
    assert len(not_decayed) == 2 * 12 - 1  # RMSNorm has no bias
    assert all(name.startswith(("a.1.", "b.")) for name in names_of(model, not_decayed))
    assert {"a.0.bias", "bn_like.weight", "bn_like.bias", "rnn.bias_ih_l0"} <= names_of(model, decayed)
    assert len(decayed) + len(not_decayed) == len(list(model.parameters()))


def test_biases_are_left_out_on_request():
    model = Downsample()
    decayed, not_decayed = decay_groups(model, exclude_biases=True)
    moved = names_of(model, decay_groups(model)[0]) - names_of(model, decayed)
    assert moved == {
        "a.0.bias", "bn_like.bias", "rnn.bias_ih_l0", "rnn.bias_hh_l0", "attention.in_proj_bias",
        "attention.out_proj.bias",
    } | {"attention.bias_k", "attention.bias_v"}  # fmt: skip
    assert {"a.0.weight", "rnn.weight_ih_l0", "attention.in_proj_weight"} <= names_of(model, decayed)
    assert moved <= names_of(model, not_decayed)


def test_frozen_parameters_are_skipped_and_shared_ones_come_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    model[1].weight = model[0].weight
    model[3].weight = model[2].weight
    model[0].bias.requires_grad_(False)
    decayed, not_decayed = decay_groups(model)
    assert [id(p) for p in decayed] == [id(model[0].weight), id(model[1].bias)]
    assert [id(p) for p in not_decayed] == [id(model[2].weight), id(model[2].bias), id(model[3].bias)]


def tiny(kind: str) -> nn.Module:
    """Published architectures, the language models at toy sizes."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 32}  # fmt: skip
    with torch.device("meta"):
        if kind == "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        if kind == "qwen3":
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=8))
        if kind == "t5":
            config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=32)
            return transformers.T5ForConditionalGeneration(config)
        if kind == "gpt2":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32))
        if kind == "bert":
            return transformers.BertModel(transformers.BertConfig(**{**sizes, "num_key_value_heads": 1}))
        if kind.startswith("torchvision/"):
            return getattr(torchvision.models, kind.removeprefix("torchvision/"))(weights=None)
        return timm.create_model(kind, pretrained=False)


# By hand, from each architecture's own names: the independent answer to what is_norm finds by structure.
NORMS_BY_NAME = {
    "torchvision/resnet18": r"\bbn\d\.|downsample\.1\.",
    "torchvision/resnet50": r"\bbn\d\.|downsample\.1\.",
    "torchvision/convnext_tiny": r"\.block\.2\.|features\.0\.1\.|features\.[246]\.0\.|classifier\.0\.",
    "torchvision/vit_b_32": r"\bln(_\d)?\.",
    "resnet26d": r"\bbn\d\.|conv1\.[14]\.|downsample\.2\.",
    "efficientnet_b0": r"\bbn\d\.",
    "regnetx_002": r"\bbn\.",
    "vit_tiny_patch16_224": r"\bnorm\d?\.",
    "swinv2_tiny_window8_256": r"\bnorm\d?\.",
    "llama": r"norm\.",
    "qwen3": r"norm\.",
    "t5": r"layer_norm\.",
    "gpt2": r"\bln_\w+\.",
    "bert": r"LayerNorm\.",
}


@pytest.mark.parametrize("kind", NORMS_BY_NAME)
def test_the_norms_of_published_architectures_and_nothing_else_go_without_decay(kind: str):
    model = tiny(kind)
    _, not_decayed = decay_groups(model)
    expected = {name for name, _ in model.named_parameters() if re.search(NORMS_BY_NAME[kind], name)}
    assert expected
    assert names_of(model, not_decayed) == expected


class ApexLikeRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.normalized_shape, self.eps = torch.Size([size]), 1e-5
        self.weight = nn.Parameter(torch.ones(size))


class Handwritten(nn.Module):  # what many small GPTs carry: no eps kept
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class LayerNorm(Handwritten): ...


class NormalPrior(Handwritten): ...


class GeM(nn.Module):  # a pooling with an eps and one exponent to learn
    def __init__(self) -> None:
        super().__init__()
        self.p, self.eps = nn.Parameter(torch.ones(1) * 3), 1e-6


class NormedBlock(nn.Module):  # is called a norm, and owns a gamma, but holds layers
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)


class BroadcastNorm(nn.Module):  # one gamma a channel, in the shape that it multiplies
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.eps = nn.Parameter(torch.ones(1, 4, 1, 1)), 1e-6


class WeightedPool(nn.Module):  # a weight, an eps, and an exponent to learn
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.p, self.eps = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1)), 1e-6


class CosineHead(nn.Module):  # a matrix and an eps
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4, 4)), 1e-6


@pytest.mark.parametrize(
    "layer",
    [ApexLikeRMSNorm(4), LayerNorm(4), BroadcastNorm(), RmsNorm2d(4), GlobalResponseNorm(4),
     nn.RMSNorm(4), nn.LazyBatchNorm2d(),
     torchvision.ops.FrozenBatchNorm2d(4), timm.layers.BatchNormAct2d(4), timm.layers.FrozenBatchNormAct2d(4),
     timm.layers.EvoNorm2dS0(4, groups=2), timm.layers.FilterResponseNormTlu2d(4), timm.layers.RmsNormAct2d(4),
     torchvision.models.convnext.LayerNorm2d(4)],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_a_norm_is_known_by_how_it_is_built(layer: nn.Module):
    assert is_norm(layer)


@pytest.mark.parametrize(
    "layer",
    [nn.PReLU(4), LayerScale(4), GeM(), WeightedPool(), NormalPrior(4), NormedBlock(), CosineHead(),
     nn.Linear(1, 1), nn.Identity(),
     nn.Embedding(4, 1), nn.LazyLinear(4), timm.layers.ScaledStdConv2d(4, 4, 1), timm.layers.ConvNormAct(4, 4, 1),
     nn.Sequential(nn.BatchNorm1d(4)), nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_what_only_looks_like_a_norm_is_none(layer: nn.Module):
    assert not is_norm(layer)


class Direct(nn.Module):
    """Parameters that live on the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(1, 3, 4))
        self.q_bias = nn.Parameter(torch.zeros(4))
        self.body = nn.Sequential(nn.Linear(4, 4), LayerScale(4), nn.LayerNorm(4))


def test_parameters_that_live_on_a_module_are_decayed_unless_they_are_named():
    model = Direct()
    assert {"cls_token", "pos_embed", "q_bias", "body.1.gamma"} <= names_of(model, decay_groups(model)[0])
    assert "q_bias" in names_of(model, decay_groups(model, exclude_biases=True)[1])
    _, not_decayed = decay_groups(model, no_decay=["*_token", "pos_embed", "*.gamma"])
    expected = {"cls_token", "pos_embed", "body.1.gamma", "body.2.weight", "body.2.bias"}
    assert names_of(model, not_decayed) == expected


def test_timms_own_list_serves_once_cut_to_what_the_model_has():
    model = tiny("vit_tiny_patch16_224")
    listed = sorted(model.no_weight_decay())
    with pytest.raises(ConfigError, match="'dist_token' of no_decay matches none"):  # of the distilled net only
        decay_groups(model, no_decay=listed)
    there = [name for name in listed if name in model.state_dict()]
    before, after = decay_groups(model)[1], decay_groups(model, no_decay=there)[1]
    assert names_of(model, after) - names_of(model, before) == {"pos_embed", "cls_token"}


def test_a_shared_parameter_is_matched_by_any_of_its_names():
    model = nn.ModuleDict({"table": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})
    model["head"].weight = model["table"].weight
    assert names_of(model, decay_groups(model, no_decay=["head.weight"])[1]) == {"table.weight"}


@pytest.mark.parametrize(
    ("pattern", "nearest"), [("pos_embedding", "pos_embed"), ("*.gama", "body.1.gamma"), ("clstoken*", "cls_token")]
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(pattern: str, nearest: str):
    with pytest.raises(ConfigError) as error:
        decay_groups(Direct(), no_decay=["cls_token", pattern])
    words = str(error.value)
    assert f"{pattern!r} of no_decay matches none of the 8 parameters. The nearest names are: {nearest}" in words


def test_one_string_is_no_list_of_patterns():
    with pytest.raises(ConfigError, match=r"no_decay is a list of patterns; got the string 'bias'"):
        decay_groups(Direct(), no_decay="bias")


LAYERS = {
    "linear": lambda: nn.Linear(3, 3), "conv": lambda: nn.Conv1d(3, 3, 1), "bn": lambda: nn.BatchNorm1d(3),
    "rms": lambda: ApexLikeRMSNorm(3), "scale": lambda: LayerScale(3), "embed": lambda: nn.Embedding(3, 3),
}  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(kinds=st.lists(st.sampled_from(sorted(LAYERS)), max_size=8), data=st.data())
def test_the_groups_are_a_partition_of_what_is_trained_in_its_order(kinds: list[str], data: st.DataObject):
    model = nn.Sequential(*[LAYERS[kind]() for kind in kinds])
    frozen = data.draw(st.sets(st.sampled_from(range(len(kinds)))) if kinds else st.just(set()))
    for number in frozen:
        model[number].requires_grad_(False)
    decayed, not_decayed = decay_groups(model)
    trained = [p for number, layer in enumerate(model) if number not in frozen for p in layer.parameters()]
    norms = {
        id(p) for kind, layer in zip(kinds, model, strict=True) if kind in ("bn", "rms") for p in layer.parameters()
    }
    assert [id(p) for p in trained if id(p) not in norms] == [id(p) for p in decayed]
    assert [id(p) for p in trained if id(p) in norms] == [id(p) for p in not_decayed]
