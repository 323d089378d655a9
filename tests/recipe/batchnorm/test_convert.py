"""Does every layer of a model get the form that n needs, keep all it held, and is what cannot be done refused?"""

import logging
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

from largebatch.errors import ConfigError
from largebatch.recipe.batchnorm import (
    BatchNormLayer,
    GhostBatchNorm,
    GroupBatchNorm,
    batchnorm_layers,
    batchnorm_over,
)
from largebatch.recipe.decay import is_norm
from workers import on_workers


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, eps=1e-3, momentum=None),
        nn.Flatten(),
        nn.LazyLinear(6),
        nn.BatchNorm1d(6),
    )


def forms(model: nn.Module, local_batch: int) -> list[tuple[str, int | None]]:
    return [(layer.form, layer.n) for layer in batchnorm_layers(model, local_batch=local_batch)]


@pytest.mark.parametrize(("local_batch", "form"), [(8, "local"), (16, "ghost"), (64, "ghost")])
def test_one_device_keeps_its_layers_or_cuts_the_batch_into_runs(local_batch, form, caplog):
    model = small()
    kinds = [type(module) for module in model]
    with caplog.at_level(logging.INFO):
        assert batchnorm_over(model, 8, local_batch=local_batch) is model
    assert forms(model, local_batch) == [(form, 8)] * 2
    assert ([type(module) for module in model] == kinds) is (form == "local")
    assert caplog.messages == [f"batch norm over n=8: {form} 2"]


def test_everything_that_a_layer_held_is_still_there():
    model = small()
    layer, calls = model[1], []
    layer.register_forward_hook(lambda *_: calls.append(1))
    layer.note = "mine"
    layer.weight.requires_grad_(False)
    held = (layer.weight, layer.bias, layer.running_mean, layer.num_batches_tracked)
    keys, values = list(model.state_dict()), [v.clone() for v in model[1].state_dict().values()]
    made = batchnorm_over(model, 8, local_batch=16)[1]
    assert isinstance(made, GhostBatchNorm)
    assert all(
        a is b for a, b in zip(held, (made.weight, made.bias, made.running_mean, made.num_batches_tracked), strict=True)
    )
    assert (made.eps, made.momentum, made.training, made.note) == (1e-3, None, True, "mine")
    assert list(model.state_dict()) == keys
    assert all(torch.equal(a, b) for a, b in zip(values, made.state_dict().values(), strict=True))
    model(torch.randn(16, 1, 4, 4))
    assert calls == [1]


def test_an_optimizer_and_a_state_from_before_still_hold():
    model, other = small(), small()
    for each in (model, other):
        each(torch.randn(8, 1, 4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batchnorm_over(model, 4, local_batch=8)
    other.load_state_dict(model.state_dict())
    model.load_state_dict(state)
    model(torch.randn(8, 1, 4, 4)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[4].bias, state["4.bias"])


def test_a_shared_layer_stays_shared_and_a_bare_one_comes_back_as_another():
    model = nn.Module()
    model.one = model.two = nn.BatchNorm1d(3)
    model.deep = nn.ModuleDict({"three": nn.Sequential(model.one)})
    batchnorm_over(model, 2, local_batch=4)
    assert model.one is model.two is model.deep["three"][0]
    assert isinstance(model.one, GhostBatchNorm)
    assert forms(model, 4) == [("ghost", 2)]
    assert isinstance(batchnorm_over(nn.BatchNorm1d(3), 2, local_batch=4), GhostBatchNorm)


def test_a_frozen_layer_is_left_alone():
    model = small()
    model[1].eval()
    assert forms(batchnorm_over(model, 8, local_batch=16), 16) == [("frozen", None), ("ghost", 8)]
    # Weights without gradients do not freeze the statistics while the layer trains: n is still part of the loss.
    model = small()
    model[1].requires_grad_(False)
    assert forms(batchnorm_over(model, 8, local_batch=16), 16) == [("ghost", 8)] * 2
    # In evaluation as a whole no mode tells, so the weights do.
    model = small().eval()
    model[1].requires_grad_(False)
    assert forms(batchnorm_over(model, 8, local_batch=16), 16) == [("frozen", None), ("ghost", 8)]
    assert forms(batchnorm_over(small().eval(), 8, local_batch=16), 16) == [("ghost", 8)] * 2


def test_synchronised_layers_are_over_kn_and_replaced():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(small())
    assert forms(model, 8) == [("sync", 8)] * 2
    assert forms(batchnorm_over(model, 8, local_batch=8), 8) == [("ghost", 8)] * 2
    model(torch.randn(8, 1, 4, 4))  # where SyncBatchNorm refuses a CPU


def test_another_n_later_is_fine_and_a_model_without_layers_too():
    model = batchnorm_over(small(), 8, local_batch=16)
    assert forms(batchnorm_over(model, 4, local_batch=16), 16) == [("ghost", 4)] * 2
    assert batchnorm_layers(batchnorm_over(nn.Linear(2, 2), 8, local_batch=16), local_batch=16) == []


def test_torchvisions_and_timms_networks_are_converted_whole():
    torchvision = pytest.importorskip("torchvision")
    timm = pytest.importorskip("timm")
    for made in (torchvision.models.resnet18(num_classes=2), timm.create_model("efficientnet_b0", num_classes=2)):
        keys, before = list(made.state_dict()), sum(isinstance(m, nn.BatchNorm2d) for m in made.modules())
        found = batchnorm_layers(batchnorm_over(made, 2, local_batch=4), local_batch=4)
        assert (len(found), {layer.form for layer in found}) == (before, {"ghost"})
        assert list(made.state_dict()) == keys


def test_timms_layers_still_drop_out_and_activate():
    timm_layers = pytest.importorskip("timm.layers")
    made, plain = (timm_layers.BatchNormAct2d(3, act_layer=nn.SiLU) for _ in range(2))
    x = torch.randn(8, 3, 2, 2)
    y = torch.cat([plain(part) for part in x.split(4)])
    made = batchnorm_over(made, 4, local_batch=8)
    torch.testing.assert_close(made(x), y)
    torch.testing.assert_close(made.eval()(x), plain.eval()(x))
    assert batchnorm_layers(batchnorm_over(made, 2, local_batch=8), local_batch=8)[0] == BatchNormLayer(
        name="", form="ghost", n=2
    )


class Own(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


def test_layers_that_would_lose_something_are_refused():
    with pytest.raises(ConfigError, match=r"layer '0' is a Own with a forward of its own"):
        batchnorm_over(nn.Sequential(Own(3)), 2, local_batch=4)
    with pytest.raises(ConfigError, match=r"layer '0' \(LazyBatchNorm1d\) does not know its channels"):
        batchnorm_over(nn.Sequential(nn.LazyBatchNorm1d()), 2, local_batch=4)
    parametrized = nn.Sequential(nn.BatchNorm1d(3))
    nn.utils.parametrize.register_parametrization(parametrized[0], "weight", nn.Softplus())
    with pytest.raises(ConfigError, match=r"layer '0' .* is parametrized"):
        batchnorm_over(parametrized, 2, local_batch=4)
    frozen = nn.Sequential(Own(3).eval(), parametrizations.weight_norm(nn.Linear(3, 3)))
    assert forms(batchnorm_over(frozen, 2, local_batch=4), 4) == [("frozen", None)]


@pytest.mark.parametrize(
    ("n", "layout", "message"),
    [
        (512, {"local_batch": 64, "world_size": 4}, r"n=512 .* there are 256 \(world_size=4, .*Use n <= 256"),
        (64, {"local_batch": 32}, r"n=64 .* Use n <= 32"),
        (32, {"local_batch": 100}, r"batch of 100 on 1 .*, 100 each, .* n=32 .*: 96 \(96 a worker\) or 128 \(128"),
        (32, {"local_batch": 24, "world_size": 8}, r"nearest .*: 128 \(16 a worker\) or 256 \(32 a worker\)\."),
        (32, {"local_batch": 8, "world_size": 6}, r"nearest .*: 96 \(16 a worker\)"),
        (6, {"local_batch": 2, "world_size": 4}, r"nearest .*: 12 \(3 a worker\)|: 4 \(1 a worker\) or 12"),
        (0, {"local_batch": 8}, r"at least 1; got 0"),
        (8, {"local_batch": 0}, r"got local_batch=0, world_size=1, rank=0"),
        (8, {"local_batch": 8, "world_size": 2, "rank": 2}, r"rank is 0 to world_size - 1; .* rank=2"),
        (16, {"local_batch": 8, "world_size": 2}, r"groups of 2 workers, but torch.distributed is not started"),
    ],
)  # fmt: skip
def test_a_layout_that_n_does_not_fit_is_refused_and_the_nearest_named(n, layout, message):
    model = small()
    with pytest.raises(ConfigError, match=message):
        batchnorm_over(model, n, **layout)
    assert forms(model, 8) == [("local", 8)] * 2


@pytest.mark.parametrize("world_size", [1, 2, 4, 6])
@pytest.mark.parametrize("n", [1, 6, 8, 12])
def test_the_nearest_batches_that_are_named_do_fit(n, world_size):
    # By trial of every local batch: what is named fits, and nothing nearer does.
    def fits(local):
        whole = world_size * local
        runs = [{i // local for i in range(start, start + n)} for start in range(0, whole - whole % n, n)]
        shared = any(len(a & b) and max(len(a), len(b)) > 1 for a, b in pairwise(runs))
        return whole % n == 0 and not shared and (local % n == 0 or n % local == 0)

    for local in range(1, 25):
        if n > local * world_size:
            continue
        try:
            batchnorm_over(nn.Linear(1, 1), n, local_batch=local, world_size=world_size)
            assert fits(local), (n, local, world_size)
        except ConfigError as error:
            named = [int(word.split()[0]) // world_size for word in str(error).split("can: ")[1].split(" or ")]
            below = [other for other in range(local - 1, 0, -1) if fits(other)][:1]
            assert named == [*below, next(o for o in range(local + 1, 99) if fits(o))]


def grouped(rank: int) -> tuple:
    model = small()
    batchnorm_over(model, 16, local_batch=8, world_size=4, rank=rank)
    ranks = dist.get_process_group_ranks(model[1].group)
    with pytest.raises(ConfigError, match=r"torch.distributed runs world_size=4, rank=\d, where world_size=2, rank=0"):
        batchnorm_over(small(), 16, local_batch=8, world_size=2, rank=0)
    shared = model[1].group is model[4].group
    ghost = forms(batchnorm_over(model, 4, local_batch=8, world_size=4, rank=rank), 8)
    timm_layers = pytest.importorskip("timm.layers")
    act = batchnorm_over(timm_layers.BatchNormAct2d(3), 32, local_batch=8, world_size=4, rank=rank)
    return ranks, shared, ghost, isinstance(act, GroupBatchNorm), act(torch.randn(8, 3, 2, 2)).min().item()


def test_neighbouring_workers_form_the_groups():
    for rank, found in enumerate(on_workers(4, grouped)):
        assert found == ([0, 1] if rank < 2 else [2, 3], True, [("ghost", 4)] * 2, True, 0.0)


def test_gamma_and_beta_are_still_known_as_a_norms():
    # Weight decay is left out by module type (Goyal 2017, sec. 5.1), so the new types must count as norms.
    model = batchnorm_over(small(), 8, local_batch=16)
    assert all(is_norm(layer) for layer in (model[1], model[4], GroupBatchNorm(3, None)))
