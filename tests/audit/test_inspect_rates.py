"""Are a scheduler's rates what it would give, whoever wrote it, and unknown where they cannot be known?"""

import accelerate.scheduler
import pytest
import timm.scheduler
import torch
import transformers
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from largebatch.audit.inspect import inspect
from largebatch.audit.look_rates import constant_rates, evaluate
from largebatch.recipe.optimizer import build_optimizer
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.schedule import as_torch_scheduler

W = 40  # steps of warmup


def optimizer(lr: float = 3.2, kind=SGD) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.zeros(2))], lr=lr)


def _sequential(o):
    return lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 1 / 32, total_iters=W), lr_scheduler.CosineAnnealingLR(o, 100)], [W]
    )


def _timm(o, **given):
    return timm.scheduler.create_scheduler_v2(o, num_epochs=90, warmup_lr=0.1, **given)[0]


WARM = {
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 1 / 32, total_iters=W),
    "SequentialLR": _sequential,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 1 / 32, total_iters=W), lr_scheduler.MultiStepLR(o, [60, 80])]
    ),
    "constant warmup": lambda o: lr_scheduler.ConstantLR(o, 1 / 32, total_iters=1500),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 3.2, total_steps=200, cycle_momentum=False),
    "LambdaLR": lambda o: LambdaLR(o, lambda step: min(1.0, (1 + step) / W)),
    "Hugging Face linear": lambda o: transformers.get_linear_schedule_with_warmup(o, W, 200),
    "Hugging Face cosine": lambda o: transformers.get_cosine_schedule_with_warmup(o, W, 200),
    "Hugging Face constant": lambda o: transformers.get_constant_schedule_with_warmup(o, W),
    "Hugging Face wsd": lambda o: transformers.get_wsd_schedule(o, W, 50, num_training_steps=200),
    "timm cosine, epochs": lambda o: _timm(o, sched="cosine", warmup_epochs=5),
    "timm step, updates": lambda o: _timm(
        o, sched="step", warmup_epochs=5, step_on_epochs=False, updates_per_epoch=10, decay_epochs=30
    ),
    "timm wsd": lambda o: _timm(o, sched="wsd", warmup_epochs=5),
}
FLAT = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 30),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 90),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "Hugging Face linear": lambda o: transformers.get_linear_schedule_with_warmup(o, 0, 200),
    "timm cosine": lambda o: _timm(o, sched="cosine", warmup_epochs=0),
}


@pytest.mark.parametrize("name", WARM)
def test_a_warmup_is_seen_with_the_peak_behind_it(name: str):
    rates = evaluate(WARM[name](optimizer()))
    assert rates is not None and rates.warms_up and rates.settled and rates.changes
    assert rates.peak == pytest.approx(3.2, rel=0.02)  # a decay that begins within the warmup lowers timm's a little
    assert not rates.momentum_follows


@pytest.mark.parametrize("name", FLAT)
def test_a_start_at_the_peak_is_seen(name: str):
    rates = evaluate(FLAT[name](optimizer()))
    assert rates is not None and not rates.warms_up
    assert (rates.first, rates.peak, rates.peak_at) == (3.2, 3.2, 0)
    assert rates.changes


def test_the_rates_are_those_that_the_scheduler_gives_when_it_is_stepped():
    mine = optimizer()
    scheduler = _sequential(mine)
    walked = evaluate(scheduler)
    lrs = [mine.param_groups[0]["lr"]]
    for _ in range(300):
        mine.step()
        scheduler.step()
        lrs.append(mine.param_groups[0]["lr"])
    assert walked is not None
    assert (walked.first, walked.peak) == (lrs[0], lrs[walked.peak_at])
    assert walked.peak == pytest.approx(max(lrs), rel=1e-9)


def test_the_group_that_rises_highest_counts():
    two = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    mine = AdamW([{"params": two[:1], "lr": 0.01}, {"params": two[1:], "lr": 0.4}])
    rates = evaluate(LambdaLR(mine, [lambda step: 1.0, lambda step: min(1.0, (1 + step) / W)]))
    assert rates is not None and rates.peak == 0.4 and rates.first == pytest.approx(0.01)


def test_timms_layer_decay_is_seen_by_its_highest_rate():
    two = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    mine = SGD([{"params": two[:1], "lr_scale": 0.1}, {"params": two[1:], "lr_scale": 1.0}], lr=0.4)
    rates = evaluate(_timm(mine, sched="cosine", warmup_epochs=0))
    assert rates is not None and (rates.first, rates.peak) == (0.4, 0.4)


def test_a_run_that_ends_within_the_warmup_has_no_peak():
    rates = evaluate(WARM["LinearLR"](optimizer()), num_steps=W // 2)
    assert rates is not None and rates.warms_up and not rates.settled


def test_under_way_a_lambda_is_asked_from_its_beginning_and_others_are_not_known():
    for name in ("LambdaLR", "Hugging Face linear"):
        mine = optimizer()
        scheduler = WARM[name](mine)
        for _ in range(W + 10):
            mine.step()
            scheduler.step()
        rates = evaluate(scheduler)
        assert rates is not None and rates.warms_up and rates.peak == pytest.approx(3.2)
    mine = optimizer()
    scheduler = WARM["LinearLR"](mine)
    mine.step()
    scheduler.step()
    assert evaluate(scheduler) is None


class Broken(LRScheduler):
    def get_lr(self):
        if self.last_epoch > 0:
            raise RuntimeError("asks the cluster")
        return self.base_lrs


class Uncopiable(LRScheduler):
    def get_lr(self):
        return self.base_lrs

    def __deepcopy__(self, memo):
        raise TypeError("has a lock")


def test_what_cannot_be_evaluated_is_not_known():
    assert evaluate(Uncopiable(optimizer())) is None
    assert evaluate(object()) is None


def test_a_scheduler_that_stops_is_known_up_to_there():
    rates = evaluate(Broken(optimizer()))
    assert rates is not None and rates.peak == 3.2


def test_tensor_rates_are_read_and_left_alone():
    mine = SGD([nn.Parameter(torch.zeros(2))], lr=torch.tensor(3.2), foreach=False)
    scheduler = lr_scheduler.LinearLR(mine, 1 / 32, total_iters=W)
    before = mine.param_groups[0]["lr"].item()
    rates = evaluate(scheduler)
    assert rates is not None and rates.warms_up and rates.peak == pytest.approx(3.2, rel=1e-5)
    assert mine.param_groups[0]["lr"].item() == before


def test_a_large_object_behind_a_lambda_is_shared_and_not_copied():
    class Model(nn.Module):
        def __deepcopy__(self, memo):
            raise AssertionError("the model was copied")

        def factor(self, step: int) -> float:
            return 1.0

    model = Model()
    model.weight = nn.Parameter(torch.zeros(2))
    mine = SGD(model.parameters(), lr=0.4)
    scheduler = LambdaLR(mine, model.factor)
    given = {"batch": 1024, "reference_batch": 256, "reference_lr": 0.1}
    assert [f.code for f in inspect(model, mine, None, scheduler, **given)] == ["LB106"]


def test_wrappers_of_accelerate_and_lightning_are_seen_through():
    model = nn.Linear(2, 2)
    mine = SGD(model.parameters(), lr=0.4)
    scheduler = WARM["Hugging Face linear"](mine)
    wrapped = accelerate.scheduler.AcceleratedScheduler(scheduler, mine)
    given = {"batch": 1024, "reference_batch": 256, "reference_lr": 0.1}
    assert inspect(model, mine, None, wrapped, **given) == []
    assert inspect(model, mine, None, {"scheduler": scheduler, "interval": "step"}, **given) == []
    assert inspect(model, {"optimizer": mine, "lr_scheduler": scheduler}, **given) == []
    assert inspect(model, ([mine], [{"scheduler": scheduler}]), **given) == []
    # and not because nothing is known: against another reference the same rates are too low
    given = {"batch": 1024, "reference_batch": 256, "reference_lr": 0.4}
    for args in (
        (mine, None, wrapped),
        (mine, None, {"scheduler": scheduler}),
        ({"optimizer": mine, "lr_scheduler": scheduler},),
        (([mine], [{"scheduler": scheduler}]),),
    ):
        assert [f.code for f in inspect(model, *args, **given)] == ["LB104"]
    prepared = accelerate.Accelerator(cpu=True).prepare_optimizer(mine)
    assert type(prepared).__name__ == "AcceleratedOptimizer"
    assert [f.code for f in inspect(model, prepared, None, wrapped, **given)] == ["LB104"]


def test_no_scheduler_is_a_constant_rate():
    rates = constant_rates(optimizer(0.3))
    assert (rates.first, rates.peak, rates.changes, rates.warms_up) == (0.3, 0.3, False, False)


@pytest.mark.parametrize("rule", ["none", "linear"])
def test_a_rate_that_does_not_rise_needs_no_warmup(rule):
    """`resolve` itself leaves the warmup out there."""
    recipe = Recipe(reference_batch=32, reference_lr=0.1, scaling=rule, warmup_epochs=0)
    resolved = recipe.resolve(256, 4096)
    model = torch.nn.Linear(2, 1)
    optimizer = build_optimizer(model, resolved)
    scheduler = as_torch_scheduler(optimizer, resolved.schedule)
    findings = inspect(model, optimizer, scheduler=scheduler, recipe=recipe, batch=256)
    assert ("LB106" in [finding.code for finding in findings]) == (rule == "linear")
