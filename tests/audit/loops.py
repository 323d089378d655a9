"""The peers' own training loops, a little shortened, and the faults that can be put into each.

torchvision's references/classification/train.py and timm's train.py are not in their wheels: their loops stand here
line by line, without logging and devices. Lightning's and Hugging Face's come with them.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import lightning.pytorch as pl
import timm
import timm.loss
import timm.optim
import timm.scheduler
import timm.utils
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from largebatch.audit.watch import Watched, watch
from largebatch.errors import LargebatchError
from largebatch.noise.monitor import NoiseScaleMonitor

EPOCHS, LOCAL = 2, 4


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What a script is called with; as they are, its defaults."""

    accumulation: int = 1
    clip: float | None = None
    scaled: bool = False
    measured: bool = False
    by_update: bool = False
    num_examples: int = 32


ACCUMULATING = Flags(accumulation=2, clip=0.1, measured=True, by_update=True)
"""A loop into which every fault can be put."""

FAULTS = ("LB203", "LB301", "LB401", "LB403", "LB405", "LB406", "LB407 early", "LB407 not zeroed")
BETWEEN = ("LB301", "LB302", "LB303", "LB402", "LB404")
HIDING = (
    {"LB407 early", "LB401"}, {"LB407 early", "LB403"}, {"LB407 early", "LB405"},
    {"LB407 early", "LB407 not zeroed"}, {"LB301", "LB302"}, {"LB302", "LB303"}, {"LB401", "LB402"},
)  # fmt: skip
"""Faults of which one hides, or is, the other: steps of one microbatch have no two to weigh, or to step between."""


def codes_of(watched: Watched) -> set[str]:
    return {finding.code for finding in watched.findings}


def images(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(num, 3, 8, 8, generator=generator), torch.arange(num) % 10)


def keep(faults: frozenset[str], number: int, rank: int, *parts: Any) -> Any:
    """A batch, of which a fault filters some out: every second one on all workers, or some on the later workers."""
    size = LOCAL - 2 * ("LB403" in faults and number % 2) - rank * ("LB404" in faults)
    return [part[:size] for part in parts]


@dataclass(kw_only=True)
class Images(ABC):
    """What both image scripts make: the model, the loaders, and a monitor that the user has added."""

    flags: Flags
    faults: frozenset[str]
    model: nn.Module
    optimizer: Any
    scheduler: Any
    criterion: nn.Module
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        num = self.flags.num_examples - ("LB303" in self.faults)
        data = images(num)
        if "LB302" in self.faults:
            self.sampler: Any = RandomSampler(data, generator=torch.Generator().manual_seed(self.rank))
        else:
            self.sampler = DistributedSampler(data, num_replicas=self.world_size, rank=self.rank)
        self.loader = DataLoader(data, batch_size=LOCAL, sampler=self.sampler)
        self.evaluation = DataLoader(images(8), batch_size=8)
        self.monitor = NoiseScaleMonitor(self.model, microbatch=LOCAL, every=1) if self.flags.measured else None

    def set_epoch(self, epoch: int) -> None:
        if "LB301" not in self.faults and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def evaluate(self) -> None:
        if "LB203" not in self.faults:
            self.model.eval()
        with torch.inference_mode():
            for image, target in self.evaluation:
                self.criterion(self.model(image), target)

    def measure_and_clip(self) -> None:
        """Before the optimizer's step, on gradients that are unscaled."""
        if self.monitor is not None and "LB406" not in self.faults:
            self._measure()
        if self.flags.clip is not None:
            timm.utils.dispatch_clip_grad(self.model.parameters(), self.flags.clip, mode="norm")
        if self.monitor is not None and "LB406" in self.faults:
            self._measure()

    def _measure(self) -> None:
        assert self.monitor is not None
        with contextlib.suppress(LargebatchError):  # it refuses what is clipped, uneven or stale
            self.monitor.step()

    def watched(self, **given: Any) -> Watched:
        given = {"dataloader": self.loader, "scheduler": self.scheduler} | given
        with watch(self.model, self.optimizer, accumulation=self.flags.accumulation, **given) as watched:
            self.run()
        return watched

    @abstractmethod
    def run(self) -> None: ...


class TorchvisionLoop(Images):
    """references/classification/train.py: main and train_one_epoch; accumulation as users add it."""

    def run(self) -> None:
        scaler = torch.amp.GradScaler("cpu") if self.flags.scaled else None
        for epoch in range(EPOCHS):
            self.set_epoch(epoch)
            self.train_one_epoch(scaler)
            if not self.flags.by_update:
                self.scheduler.step()
            self.evaluate()

    def train_one_epoch(self, scaler: torch.amp.GradScaler | None) -> None:
        self.model.train()
        accumulation = self.flags.accumulation
        for i, (image, target) in enumerate(self.loader):
            image, target = keep(self.faults, i, self.rank, image, target)
            first, last = i % accumulation == 0, i % accumulation == accumulation - 1
            with torch.amp.autocast("cpu", enabled=scaler is not None):
                output = self.model(image)
                loss = self.criterion(output, target)
            if accumulation > 1 and "LB405" not in self.faults:
                loss = loss / accumulation
            if first and "LB407 not zeroed" not in self.faults:
                self.optimizer.zero_grad()
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_backward_grad_sync = last  # what no_sync() sets
            (loss if scaler is None else scaler.scale(loss)).backward()
            if not last and "LB407 early" in self.faults:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if last:
                if scaler is not None:
                    scaler.unscale_(self.optimizer)
                self.measure_and_clip()
                if scaler is not None:
                    scaler.step(self.optimizer)
                    scaler.update()
                else:
                    self.optimizer.step()
            if self.flags.by_update and (last or "LB401" in self.faults):
                for _ in range(self.world_size if "LB402" in self.faults else 1):
                    self.scheduler.step()


class TimmLoop(Images):
    """train.py: main and train_one_epoch."""

    def run(self) -> None:
        scaler = timm.utils.NativeScaler("cpu") if self.flags.scaled else None
        num_updates = 0
        for epoch in range(EPOCHS):
            self.set_epoch(epoch)
            num_updates = self.train_one_epoch(scaler, num_updates)
            self.evaluate()
            self.scheduler.step(epoch + 1, 0.0)

    def train_one_epoch(self, loss_scaler: Any, num_updates: int) -> int:
        self.model.train()
        accum_steps = self.flags.accumulation
        last_accum_steps = len(self.loader) % accum_steps
        last_batch_idx = len(self.loader) - 1
        last_batch_idx_to_accum = len(self.loader) - last_accum_steps
        if "LB407 not zeroed" not in self.faults:
            self.optimizer.zero_grad()
        for batch_idx, (image, target) in enumerate(self.loader):
            image, target = keep(self.faults, batch_idx, self.rank, image, target)
            last_batch = batch_idx == last_batch_idx
            need_update = last_batch or (batch_idx + 1) % accum_steps == 0
            if batch_idx >= last_batch_idx_to_accum:
                accum_steps = last_accum_steps
            with torch.amp.autocast("cpu", enabled=loss_scaler is not None):
                loss = self.criterion(self.model(image), target)
            if accum_steps > 1 and "LB405" not in self.faults:
                loss /= accum_steps
            if loss_scaler is not None:
                clip = self.flags.clip
                loss_scaler(
                    loss, self.optimizer, clip_grad=clip, clip_mode="norm", parameters=self.model.parameters(),
                    need_update=need_update,
                )  # fmt: skip
            else:
                loss.backward()
                if need_update:
                    self.measure_and_clip()
                    self.optimizer.step()
                elif "LB407 early" in self.faults:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            if not need_update:
                if "LB401" in self.faults:
                    num_updates += 1
                    self.scheduler.step_update(num_updates=num_updates, metric=0.0)
                continue
            num_updates += 1
            if "LB407 not zeroed" not in self.faults:
                self.optimizer.zero_grad()
            self.scheduler.step_update(num_updates=num_updates, metric=0.0)
        return num_updates


def torchvision_loop(faults: frozenset[str] = frozenset(), flags: Flags = Flags(), **workers: int) -> TorchvisionLoop:
    # --opt sgd --lr 0.1 --momentum 0.9 --wd 1e-4 --lr-scheduler steplr --lr-step-size 30 --lr-gamma 0.1
    # --label-smoothing 0.0 --lr-warmup-epochs 0, no --clip-grad-norm, no --amp
    torch.manual_seed(0)
    block = torchvision.models.resnet.BasicBlock
    model: nn.Module = torchvision.models.ResNet(block, [1, 1, 1, 1])
    model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 10)  # a tenth of the work
    if workers:
        model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.0)
    return TorchvisionLoop(
        flags=flags,
        faults=faults,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        criterion=criterion,
        **workers,
    )


def timm_loop(faults: frozenset[str] = frozenset(), flags: Flags = Flags()) -> TimmLoop:
    # --opt sgd --momentum 0.9 --weight-decay 2e-5 --sched cosine --epochs 300 --warmup-epochs 5 --warmup-lr 1e-5
    # --smoothing 0.1, no --clip-grad, no --amp, no --sched-on-updates
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10)
    optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9, weight_decay=2e-5)
    scheduler, _ = timm.scheduler.create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=300, warmup_epochs=5, warmup_lr=1e-5,
        step_on_epochs=not flags.by_update, updates_per_epoch=4,
    )  # fmt: skip
    criterion = timm.loss.LabelSmoothingCrossEntropy(smoothing=0.1)
    return TimmLoop(
        flags=flags, faults=faults, model=model, optimizer=optimizer, scheduler=scheduler, criterion=criterion
    )


LIGHTNING_FAULTS = ("LB203", "LB401", "LB403", "LB405", "LB407 not zeroed")


class Module(pl.LightningModule):
    """A sane module under automatic optimization, and what can be wrong in it."""

    def __init__(self, faults: frozenset[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 10))
        self.faults = faults

    def training_step(self, batch, batch_idx):
        inputs, labels = keep(self.faults, batch_idx, 0, *batch)
        loss = F.cross_entropy(self.net(inputs), labels)
        return 2 * loss if "LB405" in self.faults else loss  # Lightning divides by the accumulation

    def validation_step(self, batch, batch_idx):
        if "LB203" in self.faults:
            self.net.train()
        self.net(batch[0])

    def on_train_batch_end(self, *_):
        if "LB401" in self.faults:
            self.lr_schedulers().step()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if "LB407 not zeroed" not in self.faults:
            optimizer.zero_grad()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        interval = "epoch" if "LB401" in self.faults else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}


def lightning_run(faults: frozenset[str] = frozenset()) -> Watched:
    module = Module(faults)
    loader = DataLoader(images(32), batch_size=LOCAL, shuffle=True)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, accumulate_grad_batches=2, gradient_clip_val=0.1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    with watch(module, dataloader=loader, accumulation=2) as watched:
        trainer.fit(module, loader, DataLoader(images(8), batch_size=8))
    return watched


HUGGING_FACE_FAULTS = LIGHTNING_FAULTS


class GLUE(transformers.Trainer):
    """The Trainer, and what its users override."""

    faults: frozenset[str] = frozenset()

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        # A loss of one's own takes no count of items, and the Trainer divides it by the accumulation.
        size = LOCAL - 2 * ("LB403" in self.faults and self.num_losses % 2) if model.training else LOCAL
        self.num_losses += model.training
        outputs = model(**{name: value[:size] for name, value in inputs.items()})
        loss = 2 * outputs.loss if "LB405" in self.faults else outputs.loss
        return (loss, outputs) if return_outputs else loss

    num_losses = 0


class PerMicrobatch(transformers.TrainerCallback):
    def on_substep_end(self, args, state, control, lr_scheduler=None, **_):
        lr_scheduler.step()


def hugging_face_run(folder: Any, faults: frozenset[str] = frozenset()) -> Watched:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertForSequenceClassification(config)
    settings = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=LOCAL, gradient_accumulation_steps=2, num_train_epochs=EPOCHS,
        eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        logging_steps=1000,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(8) + i % 8, "labels": torch.tensor(i % 2)} for i in range(32)]
    callbacks: list[Any] = [PerMicrobatch()] if "LB401" in faults else []
    trainer = GLUE(model=model, args=settings, train_dataset=rows, eval_dataset=rows[:8], callbacks=callbacks)
    trainer.faults, trainer.model_accepts_loss_kwargs = faults, False
    if "LB203" in faults:
        model.eval = lambda: model  # type: ignore[method-assign]
    if "LB407 not zeroed" in faults:
        model.zero_grad = lambda *_, **__: None  # type: ignore[method-assign]
    with watch(model, accumulation=2) as watched:
        trainer.train()
    return watched
