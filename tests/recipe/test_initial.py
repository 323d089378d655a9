"""Does each residual block start as its shortcut, and the classifier as the paper has it?"""

import copy

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional

from largebatch.errors import ConfigError
from largebatch.recipe.decay import is_norm
from largebatch.recipe.initial import gammas_are_zero, init_classifier, last_norms, zero_last_gammas


def zeros(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if is_norm(module) and isinstance(module.weight, nn.Parameter) and not module.weight.detach().any()
    ]


SHALLOW = {"layers": (2, 1, 1, 1)}
TIMM = {
    "resnet18": SHALLOW, "resnet50d": SHALLOW, "seresnet50": SHALLOW, "ecaresnet26t": SHALLOW, "resnetaa50": SHALLOW,
    "resnet50_gn": SHALLOW, "res2net50_26w_4s": SHALLOW, "resnest14d": {}, "regnety_002": {}, "gernet_s": {},
    "cspresnet50": {}, "botnet26t_256": {},
}  # fmt: skip


@pytest.mark.parametrize("name", TIMM)
def test_timms_own_zero_init_zeroes_the_same_norms(name: str):
    # timm says in each block's zero_init_last which norm it is: an independent answer.
    expected = zeros(timm.create_model(name, zero_init_last=True, **TIMM[name]))
    model = timm.create_model(name, zero_init_last=False, **TIMM[name])
    assert expected
    assert not zeros(model)
    assert list(zero_last_gammas(model)) == expected == zeros(model)


def test_both_norms_of_a_swin_v2_block_end_a_branch_as_timm_has_it():
    small = {"depths": (1, 1), "embed_dim": 24, "num_heads": (1, 1)}
    model = timm.create_model("swinv2_tiny_window8_256", **small)
    expected = zeros(model)
    assert len(expected) == 4
    for last in last_norms(model):
        nn.init.ones_(last.norm.weight)
    assert not zeros(model)
    assert list(zero_last_gammas(model)) == expected


@pytest.mark.parametrize("kind", [torchvision.models.resnet.BasicBlock, torchvision.models.resnet.Bottleneck])
def test_torchvisions_zero_init_residual_zeroes_the_same_norms(kind: type[nn.Module]):
    def make(**options) -> nn.Module:
        return torchvision.models.ResNet(kind, [2, 1, 2, 1], **options)

    model = make()
    before = copy.deepcopy(model.state_dict())
    done = zero_last_gammas(model)
    assert list(done) == zeros(make(zero_init_residual=True)) == zeros(model)
    assert len(done) == 6
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {f"{norm}.weight" for norm in done}


@pytest.mark.parametrize("kind", [torchvision.models.resnet.BasicBlock, torchvision.models.resnet.Bottleneck])
def test_a_block_is_its_shortcut_then_and_nothing_else(kind: type[nn.Module]):
    # The definition itself, not names: the block's output is relu(shortcut), downsample branch and all.
    model = torchvision.models.ResNet(kind, [2, 1, 1, 1])
    zero_last_gammas(model)
    num_checked = 0

    def check(block: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal num_checked
        (x,) = inputs
        shortcut = block.downsample(x) if block.downsample is not None else x
        torch.testing.assert_close(output, functional.relu(shortcut), rtol=0, atol=0)
        assert output.abs().max() > 0
        num_checked += 1

    for module in model.modules():
        if isinstance(module, kind):
            module.register_forward_hook(check)
    loss = model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))).square().mean()
    loss.backward()
    assert num_checked == len(last_norms(model))
    # ... and it can leave that state: every gamma has a gradient.
    assert all(last.norm.weight.grad.abs().max() > 0 for last in last_norms(model))


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 1)


class Plain(nn.Module):
    """A user's block, with names that say nothing and the norm at the end made first."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.BatchNorm2d(4)
        self.a = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv())
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.drop(self.c(self.a(x))))


class Projected(Plain):
    """The shortcut ends in a norm too, and is made last."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Sequential(conv(), nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.c(self.a(x))
        out += self.z(x)
        return out


class Gated(Plain):
    """Squeeze and excitation, and a helper that adds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torchvision.ops.SqueezeExcitation(4, 2)

    def total(self, x: torch.Tensor, branch: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        return torch.add(x, scale * branch)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = self.gate(self.c(self.a(x)))
        if mask is not None:
            out = torch.where(mask, out, torch.ones(()))
        return self.total(x, out)


class DoubleConv(Plain):
    """Convolutions and norms without a shortcut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x))


class PreActivated(Plain):
    """The branch ends in a convolution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.a(self.c(x))


class PostNorm(Plain):
    """The norm comes after the sum: at gamma 0 nothing would be left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(x + self.a(x))


class Twins(nn.Module):
    """Two branches of equal length."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(conv(), nn.BatchNorm2d(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


class Untraceable(Plain):
    """What it does depends on what it sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x + x


class Leaking(Plain):
    """The branch is used past the sum, as in Res2Net: without it more than the shortcut is lost."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.c(self.a(x))
        return torch.cat([out, x + out], dim=1)


@pytest.mark.parametrize("kind", [Plain, Projected, Gated])
@pytest.mark.parametrize("told", [False, True])
def test_a_users_block_is_found_by_its_structure_or_by_its_type(kind: type[nn.Module], told: bool):
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), kind(), DoubleConv(), kind())
    assert zero_last_gammas(model, blocks=[kind] if told else None) == ("2.c", "4.c")
    assert zeros(model) == ["2.c", "4.c"]
    x = torch.randn(3, 4, 2, 2)
    model[2].a.requires_grad_(False)
    expected = {Plain: functional.relu(x), Gated: x}.get(kind)
    torch.testing.assert_close(model[2](x), model[2].z(x) if expected is None else expected)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (PreActivated, "its residual branch ends in a.3, a Conv2d, not in a norm"),
        (PostNorm, "its residual branch ends in a.3, a Conv2d, not in a norm"),
        (Twins, "it adds two branches of 1 layers each"),
        (Untraceable, "its forward cannot be traced (symbolically traced variables cannot be used as inputs to"),
    ],
)
def test_a_block_whose_last_norm_cannot_be_told_is_named_with_the_reason_and_nothing_changes(kind: type, why: str):
    model = nn.Sequential(Plain(), kind())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError) as error:
        zero_last_gammas(model)
    assert f"the norm that ends the residual branch of 1 cannot be told: {why}" in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [last.name for last in last_norms(model)] == ["0.c"]  # an audit is told of those that are clear


def test_where_a_block_cannot_be_read_its_last_norm_can_be_named():
    model = nn.Sequential(Untraceable(), Plain(), Projected())
    assert zero_last_gammas(model, blocks={Untraceable: "c"}) == ("0.c",)
    assert zeros(model) == ["0.c"]


def test_a_sum_whose_branch_is_used_past_it_is_no_residual_sum():
    assert last_norms(nn.Sequential(Leaking())) == ()


class Fused(nn.Module):
    """A model that adds the outcomes of its blocks on the next level."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Plain(), Plain())
        self.side = nn.Sequential(conv(), conv(), conv(), conv(), conv(), nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x) + self.side(x)


def test_what_adds_the_outcomes_of_blocks_is_no_block():
    assert zero_last_gammas(Fused()) == ("blocks.0.c", "blocks.1.c")


@pytest.mark.parametrize("make", [torchvision.models.vgg11_bn, torchvision.models.densenet121, DoubleConv])
def test_a_model_without_residual_blocks_is_refused(make):
    with torch.device("meta"):
        model = make()
    assert last_norms(model) == ()
    with pytest.raises(ConfigError, match=f"{type(model).__name__} has no residual block that ends in a norm"):
        zero_last_gammas(model)


def test_a_last_norm_without_a_trained_gamma_is_refused():
    for norm, kind in (
        (nn.BatchNorm2d(4, affine=False), "no gamma (BatchNorm2d)"),
        (torchvision.ops.FrozenBatchNorm2d(4), "a frozen gamma (FrozenBatchNorm2d)"),
        (nn.BatchNorm2d(4).requires_grad_(False), "a frozen gamma (BatchNorm2d)"),
    ):
        block = Plain()
        block.c = norm
        with pytest.raises(ConfigError) as error:
            zero_last_gammas(nn.Sequential(Plain(), block))
        assert f"1.c, the norm that ends the residual branch of 1, has {kind}" in str(error.value)


def test_types_that_are_not_there_and_norms_that_are_none_are_refused_with_what_is():
    model = nn.Sequential(Plain())
    with pytest.raises(ConfigError, match=r"no block of type Twins. Its types are: Plain, Sequential"):
        zero_last_gammas(model, blocks=[Twins])
    with pytest.raises(ConfigError, match=r"0.a is not a norm layer. The norms of that block are: c, a.1"):
        last_norms(model, blocks={Plain: "a"})


def test_the_audit_can_ask_whether_the_gammas_are_zero():
    for make, zero in ((torchvision.models.resnet18, False), (timm.models.resnet18, True)):
        lasts = last_norms(make())
        assert len(lasts) == 8
        assert {gammas_are_zero(last) for last in lasts} == {zero}
    assert (lasts[0].name, lasts[0].block) == ("layer1.0.bn2", "layer1.0")


@pytest.mark.parametrize(
    "make",
    [lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1), torchvision.models.vit_b_32,
     lambda: transformers.BertModel(transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                                            intermediate_size=8, vocab_size=9)),
     lambda: transformers.LlamaModel(transformers.LlamaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9,
                                                              num_attention_heads=2, intermediate_size=8))],
    ids=["encoder", "vit", "bert", "llama"],
)  # fmt: skip
def test_no_norm_of_a_transformer_is_taken_for_the_end_of_a_branch(make):
    with torch.device("meta"):
        assert last_norms(make()) == ()


@pytest.mark.parametrize(
    ("make", "name"),
    [(torchvision.models.resnet18, "fc"), (torchvision.models.mobilenet_v3_small, "classifier.3"),
     (timm.models.resnet18, "fc"),
     (lambda: timm.create_model("regnety_002"), "head.fc"),
     (lambda: torchvision.models.googlenet(init_weights=False), "fc"),  # beside two auxiliary ones
     (lambda: timm.create_model("vit_tiny_patch16_224"), "head")],
)  # fmt: skip
def test_the_classifier_is_found_and_drawn_as_in_the_paper(make, name: str):
    # Goyal 2017, sec. 5.1: N(0, 0.01^2). The std of 200,000 draws or more is within 1 % (six standard errors).
    torch.manual_seed(0)
    model = make()
    before = copy.deepcopy(model.state_dict())
    assert init_classifier(model) == name
    fc = model.get_submodule(name)
    assert fc.weight.std().item() == pytest.approx(0.01, rel=0.01)
    assert abs(fc.weight.mean().item()) < 1e-4
    assert not fc.bias.any()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert f"{name}.weight" in changed
    assert changed <= {f"{name}.weight", f"{name}.bias"}


def test_a_std_of_ones_own_and_a_classifier_without_bias():
    model = nn.Sequential(nn.Linear(100, 500, bias=False))
    assert init_classifier(model, std=0.5) == "0"
    assert model[0].weight.std().item() == pytest.approx(0.5, rel=0.02)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.head_dist = nn.Linear(4, 4), nn.Linear(4, 10), nn.Linear(4, 10)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (torchvision.models.squeezenet1_0, "its last layer with parameters is classifier.1, a Conv2d"),
        (lambda: timm.create_model("resnet18", num_classes=0), "its last layer with parameters is layer4.1.bn2, a"),
        (TwoHeads, "head and head_dist both have 10 outputs"),
        (gpt2, "the weight of lm_head is also transformer.wte.weight"),
        (lambda: nn.TransformerEncoderLayer(8, 2), "is norm2, a LayerNorm"),
        (lambda: nn.ModuleList(TwoHeads() for _ in range(2)), "both have 10 outputs"),
        (lambda: nn.ModuleList(nn.Bilinear(2, 2, 2) for _ in range(2)), "is 1, a Bilinear"),
        (nn.ReLU, "the model has no parameters"),
    ],
)  # fmt: skip
def test_a_classifier_that_cannot_be_told_is_not_guessed(make, why: str):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError) as error:
        init_classifier(model)
    assert why in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_last_linear_of_one_of_many_equal_parts_is_no_classifier():
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    with pytest.raises(ConfigError, match=r"its last Linear, 1.b, is part of one of 2 Mlp modules"):
        init_classifier(nn.Sequential(Mlp(), Mlp()))


def test_a_classifier_can_be_named():
    model = TwoHeads()
    assert init_classifier(model, name="head") == "head"
    assert not model.head.bias.any()
    with pytest.raises(ConfigError, match=r"'heads' is not an nn.Linear of the model. Its Linears are: body, head,"):
        init_classifier(model, name="heads")
    with pytest.raises(ConfigError, match=r"std is a finite number above 0; got 0"):
        init_classifier(model, std=0)
