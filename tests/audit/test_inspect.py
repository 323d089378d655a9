"""Does an audit at rest see what is there, guess nothing, and leave everything as it was?"""

import copy
import random
import re

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from audit.setups import REFERENCE_BATCH, REFERENCE_LR, Options, timm_setup, torchvision_setup
from largebatch.audit.inspect import inspect
from largebatch.errors import ConfigError
from largebatch.recipe.decay import decay_groups
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.schedule import as_torch_scheduler


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))


def codes(*args, **given) -> set[str]:
    return {finding.code for finding in inspect(*args, **given)}


def sgd(model: nn.Module, lr: float = 0.1, **settings) -> SGD:
    return SGD(model.parameters(), lr=lr, momentum=0.9, **settings)


class TestDecay:
    def test_norms_and_biases_with_decay_are_named_with_the_amount(self):
        model = net()
        found = inspect(model, sgd(model, weight_decay=1e-4))
        assert [f.code for f in found] == ["LB101", "LB102"]
        assert found[0].seen == "2 parameters of BatchNorm2d have weight decay 0.0001: 1.weight, 1.bias."
        assert found[1].seen == "1 biases of layers that are no norm have weight decay 0.0001: 4.bias."

    def test_no_decay_is_no_finding(self):
        model = net()
        assert inspect(model, sgd(model)) == []

    def test_frozen_norms_have_none(self):
        model = net()
        model[1].requires_grad_(False)
        assert codes(model, sgd(model, weight_decay=1e-4)) == {"LB102"}

    def test_a_norm_that_is_not_torchs_is_one(self):
        class RMSNorm(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

        model = nn.Sequential(nn.Linear(2, 4, bias=False), RMSNorm())
        assert codes(model, AdamW(model.parameters())) == {"LB101"}

    def test_a_recipe_that_decays_biases_is_followed(self):
        # Goyal 2017, sec. 5.1 leaves out gamma and beta alone, so that is Recipe's default.
        model = net()
        decayed, rest = decay_groups(model)
        groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": rest, "weight_decay": 0.0}]
        optimizer = SGD(groups, lr=0.1)
        assert codes(model, optimizer) == {"LB102"}
        assert codes(model, optimizer, recipe=Recipe(reference_batch=32, reference_lr=0.1)) == set()
        assert codes(model, optimizer, recipe=Recipe(reference_batch=32, reference_lr=0.1, exclude_biases=True)) == {
            "LB102"
        }


class TestMissing:
    def test_a_layer_that_was_replaced_after_the_optimizer_was_made(self):
        model = net()
        optimizer = sgd(model)
        model[4] = nn.Linear(4, 7)
        (found,) = inspect(model, optimizer)
        assert found.code == "LB109"
        assert found.seen == "2 trainable parameters (35 weights) are in no group of the optimizer: 4.weight, 4.bias."

    def test_frozen_parameters_need_no_optimizer(self):
        model = net()
        model[4].requires_grad_(False)
        assert inspect(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)) == []


def rate_codes(lr: float, batch: int, **given) -> set[str]:
    model = net()
    kind = given.pop("kind", SGD)
    warmup = {"reference_batch": REFERENCE_BATCH, "reference_lr": REFERENCE_LR, "batch": batch}
    return codes(model, kind(model.parameters(), lr=lr, weight_decay=0.0), **(warmup | given)) - {"LB106"}


class TestLearningRate:
    # Goyal 2017, sec. 2.1: k times the batch goes with k times the rate. The reference here is 256 at 0.1.
    @pytest.mark.parametrize(
        ("lr", "batch", "expected"),
        [
            (3.2, 8192, set()),
            (0.1, 8192, {"LB104"}),
            (0.1 * 32**0.5, 8192, set()),  # the sqrt rule is worse (Table 2a), and a choice
            (102.4, 8192, {"LB105"}),
            (0.1, 256, set()),
            (0.05, 128, set()),
            (0.1, 64, {"LB104"}),  # the rule holds for k < 1 too
            (0.1 / 16, 64, {"LB105"}),
            (0.1, 300, set()),  # too near to the reference to tell
            (0.15, 300, set()),
        ],
    )
    def test_sgd(self, lr: float, batch: int, expected: set[str]):
        assert rate_codes(lr, batch) == expected

    @pytest.mark.parametrize(
        ("times", "expected"),
        [(4.0, set()), (16.0, set()), (1.0, {"LB104"}), (64.0, {"LB105"})],  # sqrt, linear, not, both
    )
    def test_adam_takes_the_square_root_or_the_linear_rule(self, times: float, expected: set[str]):
        assert rate_codes(REFERENCE_LR * times, 16 * REFERENCE_BATCH, kind=AdamW) == expected

    def test_a_rate_near_to_the_rules_may_have_been_tuned(self):
        assert rate_codes(0.18, 400, kind=AdamW) == set()  # 1.15 times the linear rule
        assert rate_codes(0.20, 400, kind=AdamW) == {"LB105"}  # 1.28 times

    def test_multiplied_by_the_workers_at_the_reference_batch(self):
        assert rate_codes(0.8, 256, world_size=8) == {"LB105"}
        assert rate_codes(0.4, 256, accumulation=4) == {"LB105"}
        assert rate_codes(0.8, 256) == set()  # nothing here is 8: it may have been tuned

    def test_multiplied_by_the_workers_on_top_of_the_batch(self):
        assert rate_codes(3.2 * 2, 8192, world_size=2) == {"LB105"}

    def test_unknown_references_are_not_guessed(self):
        model = net()
        assert codes(model, sgd(model), batch=8192) == set()
        assert codes(model, sgd(model), batch=8192, reference_lr=0.1) == set()
        assert codes(model, sgd(model), reference_lr=0.1, reference_batch=256) == set()

    @pytest.mark.parametrize(
        ("scaling", "lr", "expected"),
        [
            ("linear", 3.2, set()), ("linear", 0.1, {"LB104"}), ("sqrt", 0.1 * 32**0.5, set()),
            ("sqrt", 3.2, {"LB105"}), ("sqrt", 0.1, {"LB104"}), ("none", 0.1, set()), ("none", 3.2, set()),
            ("noise", 0.1, set()),  # needs a measurement that an audit is not given
        ],
    )  # fmt: skip
    def test_a_recipe_says_by_which_rule(self, scaling: str, lr: float, expected: set[str]):
        recipe = Recipe(reference_batch=256, reference_lr=0.1, scaling=scaling)
        model = net()
        assert codes(model, sgd(model, lr), recipe=recipe, batch=8192) - {"LB106"} == expected

    def test_the_batch_is_the_loaders_times_accumulation_times_workers(self):
        model = net()
        loader = DataLoader(list(range(512)), batch_size=32, shuffle=True)
        given = {"reference_batch": 256, "reference_lr": 0.1}
        assert codes(model, sgd(model, 0.2), loader, accumulation=16, **given) == set()
        assert "LB104" in codes(model, sgd(model, 0.1), loader, accumulation=16, **given)
        found = inspect(model, sgd(model, 0.1), loader, accumulation=2, world_size=8, **given)
        assert next(f for f in found if f.code == "LB104").seen == (
            "the batch is 512, 2 times the reference batch of 256, and the peak learning rate 0.1, 1 times the "
            "reference rate of 0.1."
        )


class TestWarmup:
    def test_is_asked_for_from_4_times_the_reference_batch_on(self):
        model = net()
        given = {"reference_batch": 256, "reference_lr": 0.1}
        assert codes(model, sgd(model, 0.3), batch=768, **given) == set()
        assert codes(model, sgd(model, 0.4), batch=1024, **given) == {"LB106"}

    def test_the_recipes_own_schedule_warms_up(self):
        model = net()
        recipe = Recipe(reference_batch=256, reference_lr=0.1, epochs=90, decay_epochs=(30, 60, 80))
        resolved = recipe.resolve(8192, 1_281_167)
        optimizer = sgd(model, 1.0)
        scheduler = as_torch_scheduler(optimizer, resolved.schedule)
        assert codes(model, optimizer, None, scheduler, recipe=recipe, batch=8192) == set()
        optimizer = sgd(model, 1.0)
        scheduler = as_torch_scheduler(optimizer, recipe.resolve(256, 1_281_167).schedule)
        assert codes(model, optimizer, None, scheduler, recipe=recipe, batch=8192) == {"LB104"}

    def test_a_scheduler_that_was_not_given_is_not_taken_for_none(self):
        model = net()
        optimizer = sgd(model, 0.4)
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.25)
        assert codes(model, optimizer, batch=1024, reference_batch=256, reference_lr=0.1) == set()


class TestBCrit:
    def test_beyond_it_and_up_to_it(self):
        model = net()
        (found,) = inspect(model, sgd(model), batch=4000, b_crit=1000.0)
        # McCandlish 2018, eq. (2.11): E / E_min = 1 + B / B_crit.
        assert found.seen == (
            "the batch of 4000 is 4 times the critical batch size of 1000: a goal takes 5 times the fewest examples "
            "there, and 2 times at b_crit."
        )
        assert inspect(model, sgd(model), batch=1000, b_crit=1000.0) == []
        assert inspect(model, sgd(model), b_crit=1.0) == []  # no batch is known


class TestModelsOfOtherKinds:
    def test_a_compiled_model_is_named_as_it_is(self):
        model = net()
        found = inspect(torch.compile(model), sgd(model, weight_decay=1e-4))
        assert found[0].seen == "2 parameters of BatchNorm2d have weight decay 0.0001: 1.weight, 1.bias."

    def test_on_meta_and_lazy_models_what_has_no_values_is_not_judged(self):
        with torch.device("meta"):
            model = torchvision.models.resnet18()
        assert codes(model, sgd(model, weight_decay=1e-4)) == {"LB101", "LB102"}
        lazy = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())
        assert codes(lazy, SGD([nn.Parameter(torch.ones(1))], lr=0.1)) == {"LB109"}


class TestNothingIsTouched:
    @pytest.mark.parametrize("build", [torchvision_setup, timm_setup])
    def test_model_optimizer_scheduler_loader_and_random_state(self, build):
        setup = build(Options())
        states = lambda: (  # noqa: E731
            copy.deepcopy(setup.optimizer.state_dict()),
            {key: value for key, value in setup.scheduler.state_dict().items() if not key.startswith("_schedulers")},
            {key: value.clone() for key, value in setup.model.state_dict().items()},
            setup.model.training,
            random.getstate(),
            repr(np.random.get_state()),  # noqa: NPY002
            torch.get_rng_state().tolist(),
            len(setup.optimizer._optimizer_step_pre_hooks),
        )
        before = states()
        step = setup.optimizer.step
        setup.inspect()
        after = states()
        assert str(before) == str(after)
        assert setup.optimizer.step == step

    def test_a_training_under_way_goes_on_as_if_nothing_had_been(self):
        def run(audited: bool) -> list[float]:
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
            optimizer = sgd(model, 0.1)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
            losses = []
            for _ in range(6):
                if audited:
                    inspect(model, optimizer, None, scheduler, batch=8, reference_batch=1, reference_lr=0.1)
                loss = model(torch.randn(4, 3)).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
            return losses

        assert run(True) == run(False)

    def test_hooks_of_the_users_and_of_all_optimizers_are_not_called(self):
        model, calls = net(), []
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
        handle = register_optimizer_step_post_hook(lambda *_: calls.append("global"))
        try:
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
            inspect(model, optimizer, None, scheduler, batch=8, reference_batch=1, reference_lr=0.1)
        finally:
            handle.remove()
        assert calls == []


MODEL = net()
OPTIMIZER = sgd(MODEL)
LOADER = DataLoader([1, 2], batch_size=1)


@pytest.mark.parametrize(
    ("args", "given", "sentence"),
    [
        (("resnet", OPTIMIZER), {}, "model is a torch.nn.Module; got a str"),
        ((MODEL, "sgd"), {}, "optimizer is a torch.optim.Optimizer; got a str"),
        ((MODEL, None), {}, "optimizer is a torch.optim.Optimizer; got None"),
        ((MODEL, [OPTIMIZER, OPTIMIZER]), {}, "an audit takes one optimizer; got 2"),
        ((MODEL, OPTIMIZER, [1, 2]), {}, "dataloader is a torch.utils.data.DataLoader; got a list"),
        ((MODEL, OPTIMIZER, LOADER, "cosine"), {}, "scheduler is a learning-rate scheduler .* got a str"),
        ((MODEL, OPTIMIZER, LOADER, OPTIMIZER), {}, "scheduler is a learning-rate scheduler .* got a SGD"),
        ((MODEL, OPTIMIZER), {"batch": 0}, "batch is a whole number of at least 1; got 0"),
        ((MODEL, OPTIMIZER), {"batch": True}, "batch is a whole number of at least 1; got True"),
        ((MODEL, OPTIMIZER), {"accumulation": None}, "accumulation is a whole number of at least 1; got None"),
        ((MODEL, OPTIMIZER), {"accumulation": 1.5}, "accumulation is a whole number of at least 1; got 1.5"),
        ((MODEL, OPTIMIZER), {"world_size": -2}, "world_size is a whole number of at least 1; got -2"),
        ((MODEL, OPTIMIZER), {"rank": 2, "world_size": 2}, "rank is 0 to world_size - 1 = 1; got 2"),
        ((MODEL, OPTIMIZER), {"reference_lr": float("nan")}, "reference_lr is a finite number above 0; got nan"),
        ((MODEL, OPTIMIZER), {"b_crit": "big"}, "b_crit is a finite number above 0; got 'big'"),
        ((MODEL, OPTIMIZER), {"batchnorm_n": 0}, "batchnorm_n is a whole number of at least 1; got 0"),
        ((MODEL, OPTIMIZER), {"recipe": {"lr": 1}}, "recipe is a largebatch.Recipe, .* got a dict"),
        (
            (MODEL, OPTIMIZER),
            {"recipe": Recipe(reference_batch=64, reference_lr=0.1), "reference_batch": 32},
            "reference_batch is 32, and 64 in the recipe",
        ),
    ],
)
def test_bad_input_is_one_sentence(args, given, sentence):
    with pytest.raises(ConfigError, match=re.compile(sentence)):
        inspect(*args, **given)


def test_a_scheduler_of_another_optimizer_is_refused():
    other = sgd(net())
    with pytest.raises(ConfigError, match="drives another optimizer"):
        inspect(MODEL, OPTIMIZER, None, torch.optim.lr_scheduler.StepLR(other, 3))
