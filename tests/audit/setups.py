"""Sane set-ups of torchvision, timm, Lightning and Hugging Face, at 4 times the baseline's batch or more, and the
faults that can be put into each. The flags are those of the peers' own scripts (versions in constraints.txt)."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import lightning
import timm
import timm.optim
import timm.scheduler
import torch
import torchvision
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.audit.findings import Finding
from largebatch.audit.inspect import inspect
from largebatch.recipe.decay import is_norm
from largebatch.recipe.momentum import VelocitySGD

LOCAL, WORLD, K = 32, 32, 4
REFERENCE_BATCH, REFERENCE_LR = LOCAL * WORLD // K, 0.1
EPOCHS = 90


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a set-up does; as they are, nothing is wrong with it."""

    decay_norms: bool = False
    decay_biases: bool = False
    zero_gamma: bool = True
    lr_power: float = 1.0  # the rate is scaled by K to this power
    warmup: str = "gradual"  # "none" starts at the peak, "no scheduler" has none at all
    momentum: str = "plain"  # "velocity" has the rate inside, uncorrected; "corrected" is torch's with a correction
    b_crit: float = 1e9
    missing: str = "nothing"  # "last" of a group, or what "replaced" a layer after the optimizer was made
    local: int = LOCAL
    sync: bool = False
    shuffle: bool = True
    dealt: str = "right"  # "not" at all, to "half" of the workers, to the wrong "rank"
    padding: bool = False


FAULTS: dict[str, tuple[dict[str, Any], ...]] = {
    "LB101": ({"decay_norms": True},),
    "LB102": ({"decay_biases": True},),
    "LB103": ({"zero_gamma": False},),
    "LB104": ({"lr_power": 0.0}, {"lr_power": -1.0}),  # left as it was; scaled the wrong way
    "LB105": ({"lr_power": 2.0}, {"lr_power": 3.5}),  # by k twice; by the 32 = k^2.5 workers on top
    "LB106": ({"warmup": "none"}, {"warmup": "no scheduler"}),
    "LB107": ({"momentum": "velocity"}, {"momentum": "corrected"}),
    "LB108": ({"b_crit": 500.0},),
    "LB109": ({"missing": "last"}, {"missing": "replaced"}),
    "LB201": ({"local": 4 * LOCAL}, {"local": LOCAL // 4}),
    "LB202": ({"sync": True},),
    "LB302": ({"dealt": "not"}, {"dealt": "half"}, {"dealt": "rank"}),
    "LB303": ({"padding": True},),
    "LB304": ({"shuffle": False},),
}
"""What puts each fault in that can be seen at rest, each way of it."""
EXCLUSIVE = ({"LB104", "LB105"}, {"LB201", "LB202"}, {"LB302", "LB303"}, {"LB106", "LB107"})
"""Faults of which one hides, or is, the other: a sampler that does not deal does not pad, and the form of the momentum
does not matter at a constant rate."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    model: nn.Module
    optimizer: Any
    loader: Any
    scheduler: Any
    given: dict[str, Any] = field(default_factory=dict)

    def inspect(self, **given: Any) -> list[Finding]:
        return inspect(self.model, self.optimizer, self.loader, self.scheduler, **(self.given | given))

    def codes(self, **given: Any) -> set[str]:
        return {finding.code for finding in self.inspect(**given)}


class CorrectedSGD(SGD):
    """torch's SGD with the momentum correction of the velocity form, which it must not have."""

    def step(self, closure=None):
        for group in self.param_groups:
            old = group.setdefault("old_lr", group["lr"])
            for parameter in group["params"]:
                buffer = self.state[parameter].get("momentum_buffer")
                if buffer is not None and old:
                    buffer.mul_(group["lr"] / old)
            group["old_lr"] = group["lr"]
        return super().step(closure)


def _sgd(options: Options, groups: Any, lr: float, **settings: Any) -> Optimizer:
    if options.momentum == "velocity":
        return VelocitySGD(groups, lr, momentum=0.9, momentum_correction=False)
    kind = SGD if options.momentum == "plain" else CorrectedSGD
    return kind(groups, lr=lr, momentum=0.9, **settings)


def _lr(options: Options) -> float:
    return REFERENCE_LR * K**options.lr_power


def _groups(options: Options, model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """torchvision's references/classification/utils.set_weight_decay: norms by type, biases by name, the rest."""
    params: dict[str, list[Tensor]] = {"other": [], "norm": [], "bias": []}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            params["norm" if is_norm(module) else "bias" if name == "bias" else "other"].append(parameter)
    decays = {"other": decay, "norm": decay * options.decay_norms, "bias": decay * options.decay_biases}
    return [{"params": params[kind], "weight_decay": decays[kind]} for kind in params if params[kind]]


def _loader(options: Options, world: int) -> DataLoader:
    dataset = list(range(4 * LOCAL * WORLD + 3 * options.padding))
    if options.dealt == "not":
        return DataLoader(dataset, batch_size=options.local, shuffle=options.shuffle)
    replicas = world // 2 if options.dealt == "half" else world
    sampler = DistributedSampler(dataset, replicas, 2 if options.dealt == "rank" else 1, shuffle=options.shuffle)
    return DataLoader(dataset, batch_size=options.local, sampler=sampler)


def _finish(options: Options, model: nn.Module, optimizer: Any, scheduler: Any, **given: Any) -> Setup:
    world = LOCAL * WORLD // options.local
    given = {
        "reference_batch": REFERENCE_BATCH, "reference_lr": REFERENCE_LR, "world_size": world, "rank": 1,
        "batchnorm_n": LOCAL, "b_crit": options.b_crit, "epochs": EPOCHS,
    } | given  # fmt: skip
    if options.warmup == "no scheduler":
        scheduler = None
    return Setup(model=model, optimizer=optimizer, loader=_loader(options, world), scheduler=scheduler, given=given)


def _miss(options: Options, optimizer: Optimizer) -> None:
    params = optimizer.param_groups[0]["params"]
    if options.missing == "last":
        params.pop()
    elif options.missing == "replaced":  # the optimizer still has a parameter that the model has no more
        params[0] = nn.Parameter(params[0].detach().clone())


@functools.cache
def _torchvision_model(zero_gamma: bool, sync: bool) -> nn.Module:
    model = torchvision.models.ResNet(
        torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, zero_init_residual=zero_gamma
    )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if sync else model


def torchvision_setup(options: Options) -> Setup:
    # references/classification/train.py --model resnet50 --zero-init-residual --batch-size 32 --lr 0.4 --momentum 0.9
    # --wd 1e-4 --norm-weight-decay 0 --bias-weight-decay 0 --lr-scheduler steplr --lr-step-size 30 --lr-gamma 0.1
    # --lr-warmup-epochs 5 --lr-warmup-method linear --lr-warmup-decay 0.25, on 32 workers
    model = _torchvision_model(options.zero_gamma, options.sync)
    optimizer = _sgd(options, _groups(options, model, 1e-4), _lr(options))
    _miss(options, optimizer)
    if options.warmup == "no scheduler":
        return _finish(options, model, optimizer, None)
    scheduler: Any = StepLR(optimizer, step_size=30, gamma=0.1)
    if options.warmup == "gradual":
        warmup = LinearLR(optimizer, start_factor=0.25, total_iters=5)
        scheduler = SequentialLR(optimizer, [warmup, scheduler], milestones=[5])
    return _finish(options, model, optimizer, scheduler)


@functools.cache
def _timm_model(zero_gamma: bool, sync: bool) -> nn.Module:
    model = timm.create_model("test_resnet", num_classes=10, zero_init_last=zero_gamma)
    return timm.layers.convert_sync_batchnorm(model) if sync else model


def timm_setup(options: Options) -> Setup:
    # train.py --model resnet50 -b 32 --opt sgd --momentum 0.9 --weight-decay 1e-4 --lr-base 0.1 --lr-base-size 256
    # --sched cosine --epochs 90 --warmup-epochs 5 --warmup-lr 1e-5, on 32 workers
    model = _timm_model(options.zero_gamma, options.sync)
    optimizer: Any
    if options.decay_norms or options.decay_biases or options.momentum != "plain":
        optimizer = _sgd(options, _groups(options, model, 1e-4), _lr(options))
    else:
        optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=_lr(options), weight_decay=1e-4, momentum=0.9)
    _miss(options, optimizer)
    scheduler, _ = timm.scheduler.create_scheduler_v2(
        optimizer,
        sched="none" if options.warmup == "no scheduler" else "cosine",
        num_epochs=EPOCHS,
        warmup_epochs=5 if options.warmup == "gradual" else 0,
        warmup_lr=1e-5,
    )
    return _finish(options, model, optimizer, scheduler)


class LitResNet(lightning.LightningModule):
    """Lightning's CIFAR-10 tutorial: SGD(lr, momentum=0.9, weight_decay=5e-4) and OneCycleLR stepped every step."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.model = _torchvision_model(options.zero_gamma, options.sync)

    def configure_optimizers(self):
        lr = _lr(self.options)
        optimizer = _sgd(self.options, _groups(self.options, self.model, 5e-4), lr)
        _miss(self.options, optimizer)
        if self.options.warmup == "no scheduler":
            return optimizer
        if self.options.warmup == "gradual":
            scheduler: Any = OneCycleLR(optimizer, lr, total_steps=4 * EPOCHS, cycle_momentum=False)
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * EPOCHS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def lightning_setup(options: Options) -> Setup:
    module = LitResNet(options)
    return _finish(options, module, module.configure_optimizers(), None)


class BertTrainer(transformers.Trainer):
    options = Options()

    def get_decay_parameter_names(self, model):
        usual = super().get_decay_parameter_names(model)
        norms = [f"{n}.{p}" for n, m in model.named_modules() if is_norm(m) for p, _ in m.named_parameters()]
        biases = [n for n, _ in model.named_parameters() if n.endswith("bias") and n not in norms]
        return usual + norms * self.options.decay_norms + biases * self.options.decay_biases


@functools.cache
def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


@functools.cache
def _trainer(lr: float, warmup_steps: int, kind: str) -> BertTrainer:
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(), learning_rate=lr, weight_decay=0.01, warmup_steps=warmup_steps,
        lr_scheduler_type=kind, per_device_train_batch_size=LOCAL, use_cpu=True, report_to=[],
    )  # fmt: skip
    return BertTrainer(model=_bert(), args=arguments)


def hugging_face_setup(options: Options) -> Setup:
    # run_glue.py --learning_rate 1e-4 --weight_decay 0.01 --warmup_steps 36 --lr_scheduler_type linear
    # --per_device_train_batch_size 32 on 32 workers: AdamW's rate is scaled by sqrt(k), against 5e-5 at a quarter
    lr = 5e-5 * K ** (0.5 if options.lr_power == 1 else options.lr_power)
    kind = "constant" if options.warmup == "no scheduler" else "linear"
    trainer = _trainer(lr, 36 if options.warmup == "gradual" else 0, kind)
    trainer.options, trainer.optimizer, trainer.lr_scheduler = options, None, None
    trainer.create_optimizer_and_scheduler(num_training_steps=4 * EPOCHS)
    _miss(options, trainer.optimizer)
    setup = _finish(options, trainer.model, trainer.optimizer, trainer.lr_scheduler, reference_lr=5e-5)
    dataset = setup.loader.dataset
    loader = DataLoader(dataset, batch_size=LOCAL, shuffle=options.shuffle)
    if options.dealt != "not":  # what Trainer.get_train_dataloader does on 32 processes
        processes = WORLD // 2 if options.dealt == "half" else WORLD
        index = 2 if options.dealt == "rank" else 1
        loader = prepare_data_loader(loader, num_processes=processes, process_index=index, put_on_device=False)
    return replace(setup, loader=loader, scheduler=trainer.lr_scheduler)


SETUPS: dict[str, tuple[Callable[[Options], Setup], frozenset[str]]] = {
    "torchvision": (torchvision_setup, frozenset(FAULTS)),
    "timm": (timm_setup, frozenset(FAULTS)),
    "lightning": (lightning_setup, frozenset(FAULTS) - {"LB302"}),  # Lightning replaces the sampler itself
    "hugging_face": (hugging_face_setup, frozenset(FAULTS) - {"LB103", "LB107", "LB201", "LB202"}),  # no SGD, no BN
}
"""Each peer's set-up, and the faults that it can have."""
