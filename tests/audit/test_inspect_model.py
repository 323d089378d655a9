"""Is it seen what batch norm is taken over, and whether residual blocks start as the identity?"""

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader

from largebatch.audit.inspect import inspect
from largebatch.recipe.batchnorm import GhostBatchNorm
from largebatch.recipe.initial import zero_last_gammas
from largebatch.recipe.recipe import Recipe


def seen(model: nn.Module, batch_size: int | None = None, **given) -> dict[str, str]:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loader = None if batch_size is None else DataLoader(list(range(512)), batch_size=batch_size, shuffle=True)
    found = inspect(model, optimizer, loader, **given)
    return {f.code: f.seen for f in found if not f.code.startswith("LB3")}


def small(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten())


def resnet(**given) -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4, **given)


class TestZeroGamma:
    # Goyal 2017, sec. 5.1: gamma = 0 in the last norm of every residual block.
    def test_torchvisions_default_has_none(self):
        assert seen(resnet()) == {
            "LB103": "gamma is 1 in the norm that ends the branch of all 4 residual blocks: layer1.0.bn2, "
            "layer2.0.bn2, layer3.0.bn2 and 1 more."
        }

    def test_groups_of_group_norm_are_no_exception(self):
        assert "LB103" in seen(resnet(norm_layer=lambda width: nn.GroupNorm(4, width)))

    def test_hugging_faces_resnet_has_none(self):
        config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
        assert "LB103" in seen(transformers.ResNetModel(config))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: resnet(zero_init_residual=True),
            lambda: timm.create_model("test_resnet"),  # timm's default
            lambda: small(nn.BatchNorm2d(4)),  # no residual block
            lambda: timm.create_model("test_vit"),  # layer norms are not what the paper speaks of
        ],
    )
    def test_where_it_is_zero_or_no_question(self, make):
        assert seen(make()) == {}

    def test_layer_norms_that_end_a_branch_are_not_what_the_paper_speaks_of(self):
        class Block(nn.Module):
            def __init__(self, norm: nn.Module):
                super().__init__()
                self.fc, self.norm = nn.Linear(4, 4), norm

            def forward(self, x):
                return x + self.norm(self.fc(x))

        assert seen(Block(nn.LayerNorm(4))) == {}
        assert set(seen(Block(nn.BatchNorm1d(4)))) == {"LB103"}

    def test_a_net_that_was_trained_or_set_is_left_alone(self):
        model = resnet()
        with torch.no_grad():
            model.bn1.weight[0] = 0.9
        assert seen(model) == {}
        model = resnet()
        zero_last_gammas(model)
        assert seen(model) == {}


class TestBatchNorm:
    # Goyal 2017, sec. 2.3: n is part of the loss and stays.
    def test_the_microbatch_is_n(self):
        model = small(nn.BatchNorm2d(4))
        assert seen(model, 64, batchnorm_n=32) == {
            "LB201": "1 batch norm layers take their statistics from 64 examples, and the baseline's from 32: 1."
        }
        assert seen(model, 32, batchnorm_n=32) == {}
        assert seen(model, 32, batchnorm_n=32, accumulation=8, world_size=4) == {}
        assert seen(model, 64) == {}  # the baseline's is not known
        assert seen(model, batchnorm_n=32) == {}  # this one's is not known

    def test_without_a_loader_the_batch_is_divided_where_the_workers_are_known(self):
        model = small(nn.BatchNorm2d(4))
        assert set(seen(model, batch=1024, world_size=4, accumulation=4, batchnorm_n=32)) == {"LB201"}
        assert seen(model, batch=1024, world_size=8, accumulation=4, batchnorm_n=32) == {}
        assert seen(model, batch=1024, batchnorm_n=32) == {}

    def test_the_recipe_may_say_it(self):
        recipe = Recipe(reference_batch=64, reference_lr=0.1, batchnorm_n=32)
        model = small(nn.BatchNorm2d(4))
        assert set(seen(model, 64, recipe=recipe)) == {"LB201"}
        assert seen(model, 32, accumulation=2, recipe=recipe) == {}

    def test_ghost_batch_norm_keeps_n(self):
        model = small(GhostBatchNorm(4, 32))
        assert seen(model, 128, batchnorm_n=32) == {}
        assert set(seen(model, 128, batchnorm_n=64)) == {"LB201"}
        assert set(seen(model, 16, batchnorm_n=32)) == {"LB201"}  # there are not 32 to take it over

    def test_layers_that_are_frozen_are_no_question(self):
        model = small(nn.BatchNorm2d(4))
        model[1].eval()
        assert seen(model, 64, batchnorm_n=32) == {}
        model.eval()  # all of it: not yet in training mode
        assert set(seen(model, 64, batchnorm_n=32)) == {"LB201"}

    def test_data_parallel_splits_by_itself(self):
        assert seen(DataParallel(small(nn.BatchNorm2d(4))), 64, batchnorm_n=32) == {}


class TestSyncBatchNorm:
    def test_over_all_workers(self):
        model = small(nn.SyncBatchNorm(4))
        assert seen(model, 4, world_size=8) == {
            "LB202": "1 batch norm layers take their statistics from the 32 examples of all 8 workers: 1."
        }

    def test_one_worker_or_the_baselines_n_is_none(self):
        model = small(nn.SyncBatchNorm(4))
        assert seen(model, 4) == {}
        assert seen(model, 4, world_size=8, batchnorm_n=32) == {}

    def test_timms_is_one_too(self):
        model = timm.layers.convert_sync_batchnorm(timm.create_model("test_resnet"))
        assert set(seen(model, 4, world_size=8)) == {"LB202"}

    def test_a_group_that_is_not_known_is_not_judged(self):
        layer = nn.SyncBatchNorm(4)
        layer.process_group = object()
        assert seen(small(layer), 4, world_size=8, batchnorm_n=8) == {}
