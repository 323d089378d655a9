"""Do the peers' own scripts, with the flags they come with, give the findings that are true of them and no other?

What is true of them, by the paper that the audit goes by: torchvision's references and Lightning's tutorial decay the
norms (LB101) and biases (LB102) and leave gamma at 1 (LB103) unless asked; timm does none of these; Hugging Face's
Trainer leaves out norms by the name "norm", so that those of its own ResNet, called "normalization", are decayed.
"""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import timm
import timm.optim
import timm.scheduler
import torch
import torch.distributed as dist
import torchvision
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from audit.setups import REFERENCE_LR
from largebatch.audit.inspect import inspect
from largebatch.recipe.batchnorm import batchnorm_over
from workers import on_workers

IMAGENET = range(1_281_167)  # 8 workers do not divide it: each epoch, a DistributedSampler repeats one example
GOYAL = {"reference_batch": 256, "reference_lr": REFERENCE_LR, "batchnorm_n": 32}


def codes(*args: Any, **given: Any) -> set[str]:
    return {finding.code for finding in inspect(*args, **given)}


def resnet(**given: Any) -> nn.Module:
    block = torchvision.models.resnet.BasicBlock
    return torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=10, **given)


def imagenet(batch_size: int, world_size: int = 8, drop_last: bool = False) -> DataLoader:
    sampler = DistributedSampler(IMAGENET, world_size, 0)
    return DataLoader(IMAGENET, batch_size=batch_size, sampler=sampler, drop_last=drop_last)


def by_decay(model: nn.Module, decay: float, norm_decay: float) -> list[dict[str, Any]]:
    """torchvision's utils.set_weight_decay with --norm-weight-decay alone."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
    norm = [p for m in model.modules() if isinstance(m, norms) for p in m.parameters(recurse=False)]
    other = [p for m in model.modules() if not isinstance(m, norms) for p in m.parameters(recurse=False)]
    return [{"params": other, "weight_decay": decay}, {"params": norm, "weight_decay": norm_decay}]


class TestTorchvision:
    # references/classification/train.py of torchvision 0.29.
    def test_defaults_on_8_workers(self):
        # torchrun --nproc_per_node=8 train.py --model resnet50: -b 32 --opt sgd --lr 0.1 --momentum 0.9 --wd 1e-4
        # --lr-scheduler steplr --lr-step-size 30 --lr-gamma 0.1 --lr-warmup-epochs 0 --epochs 90
        model = resnet()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        found = codes(model, optimizer, imagenet(32), StepLR(optimizer, 30, 0.1), epochs=90, **GOYAL)
        assert found == {"LB101", "LB102", "LB103", "LB303"}

    def test_the_recipe_of_its_second_weights(self):
        # -b 128 --lr 0.5 --lr-scheduler cosineannealinglr --lr-warmup-epochs 5 --lr-warmup-method linear
        # --lr-warmup-decay 0.01 --epochs 600 --wd 2e-5 --norm-weight-decay 0.0: a rate of 1.25 times the linear rule
        model = resnet()
        optimizer = SGD(by_decay(model, 2e-5, 0.0), lr=0.5, momentum=0.9)
        warmup = LinearLR(optimizer, start_factor=0.01, total_iters=5)
        scheduler = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, T_max=595)], milestones=[5])
        given = GOYAL | {"batchnorm_n": 128}
        assert codes(model, optimizer, imagenet(128), scheduler, **given) == {"LB102", "LB103", "LB303"}

    def test_goyals_flags(self):
        # -b 32 on 32 workers --lr 0.4 --zero-init-residual --norm-weight-decay 0 and a warmup: biases have decay, as
        # the paper's do
        model = resnet(zero_init_residual=True)
        optimizer = SGD(by_decay(model, 1e-4, 0.0), lr=0.4, momentum=0.9, nesterov=True)
        warmup = LinearLR(optimizer, start_factor=0.25, total_iters=5)
        scheduler = SequentialLR(optimizer, [warmup, StepLR(optimizer, 30)], milestones=[5])
        assert codes(model, optimizer, imagenet(32, 32, True), scheduler, **GOYAL) == {"LB102", "LB303"}

    def test_pytorchs_own_example_on_one_device(self):
        # examples/imagenet/main.py: -b 256 --lr 0.1 --momentum 0.9 --wd 1e-4, StepLR(30, 0.1)
        model = resnet()
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        loader = DataLoader(IMAGENET, batch_size=256, shuffle=True)
        found = codes(model, optimizer, loader, StepLR(optimizer, 30), reference_batch=256, reference_lr=0.1)
        assert found == {"LB101", "LB102", "LB103"}


class TestTimm:
    # train.py of timm 1.0.31; --lr-base 0.1 --lr-base-size 256, scaled linearly for sgd and by sqrt for Adam.
    def test_defaults_of_a_resnet(self):
        # --model resnet50 -b 128 --opt sgd --momentum 0.9 --weight-decay 2e-5 --sched cosine --warmup-epochs 5
        # --warmup-lr 1e-5 --epochs 300 on 8 workers
        model = timm.create_model("test_resnet")
        optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.4, momentum=0.9, weight_decay=2e-5)
        scheduler, _ = timm.scheduler.create_scheduler_v2(
            optimizer, sched="cosine", num_epochs=300, warmup_epochs=5, warmup_lr=1e-5
        )
        given = GOYAL | {"batchnorm_n": 128}
        assert codes(model, optimizer, imagenet(128, drop_last=True), scheduler, **given) == {"LB303"}

    @pytest.mark.parametrize("layer_decay", [None, 0.75])
    def test_a_vision_transformer_stepped_on_updates(self, layer_decay: float | None):
        # --model vit_small -b 512 --opt adamw --lr-base 1e-3 --lr-base-size 512 --weight-decay 0.05 --sched cosine
        # --sched-on-updates --warmup-epochs 20 [--layer-decay 0.75], 8 workers: sqrt(8) times the rate
        model = timm.create_model("test_vit")
        lr = 1e-3 * 8**0.5
        optimizer = timm.optim.create_optimizer_v2(
            model, opt="adamw", lr=lr, weight_decay=0.05, layer_decay=layer_decay
        )
        scheduler, _ = timm.scheduler.create_scheduler_v2(
            optimizer, sched="cosine", num_epochs=300, warmup_epochs=20, warmup_lr=1e-6,
            step_on_epochs=False, updates_per_epoch=20,
        )  # fmt: skip
        found = codes(model, optimizer, imagenet(512), scheduler, reference_batch=512, reference_lr=1e-3)
        assert found == {"LB303"}

    def test_a_net_without_zero_init_is_one_that_the_paper_would_change(self):
        model = timm.create_model("mobilenetv2_050")
        optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.1, weight_decay=1e-5)
        assert codes(model, optimizer) == {"LB103"}


class Pairs(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(8) + index % 8
        return {"input_ids": ids, "labels": torch.tensor(index % 2)}


class Audited(lightning.LightningModule):
    """Lightning's CIFAR-10 tutorial, audited within its own trainer."""

    def __init__(self, tutorial: bool) -> None:
        super().__init__()
        self.tutorial = tutorial
        self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.found: set[str] | None = None

    def training_step(self, batch, index):
        return self.net(batch["input_ids"].float()).square().mean()

    def configure_optimizers(self):
        # SGD(lr=0.05, momentum=0.9, weight_decay=5e-4); OneCycleLR(0.1, epochs, steps_per_epoch), every step
        groups = self.parameters() if self.tutorial else by_decay(self.net, 5e-4, 0.0)
        optimizer = SGD(groups, lr=0.05, momentum=0.9, weight_decay=5e-4)
        scheduler = OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self):
        self.found = codes(
            self, self.optimizers(), self.trainer.train_dataloader, self.lr_schedulers(),
            reference_batch=4, reference_lr=0.025, batchnorm_n=16,
        )  # fmt: skip


class TestLightning:
    @pytest.mark.parametrize(("tutorial", "expected"), [(True, {"LB101", "LB102"}), (False, {"LB102"})])
    def test_the_tutorial_in_its_own_trainer(self, tutorial: bool, expected: set[str], tmp_path):
        module = Audited(tutorial)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Pairs(), batch_size=16, shuffle=True))
        assert module.found == expected


class Auditor(transformers.TrainerCallback):
    """Audits what the Trainer hands its callbacks: accelerate's wrappers of all three."""

    def __init__(self, **given: Any) -> None:
        self.given, self.found = given, None

    def on_train_begin(self, args, state, control, **kwargs):
        kinds = {type(kwargs[name]).__name__ for name in ("optimizer", "lr_scheduler", "train_dataloader")}
        assert kinds >= {"AcceleratedOptimizer", "DataLoaderShard"}
        self.found = codes(
            kwargs["model"], kwargs["optimizer"], kwargs["train_dataloader"], kwargs["lr_scheduler"],
            accumulation=args.gradient_accumulation_steps, **self.given,
        )  # fmt: skip


class TestHuggingFace:
    def bert(self) -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        return transformers.BertForSequenceClassification(config)

    @pytest.mark.parametrize(
        "flags",
        [
            {},  # the Trainer's own: lr 5e-5, weight decay 0, batch 8, linear without warmup
            {"weight_decay": 0.01, "learning_rate": 2e-5 * 8**0.5, "gradient_accumulation_steps": 8, "warmup_steps": 1},
        ],
    )
    def test_a_trainer_under_way(self, flags: dict[str, Any], tmp_path):
        auditor = Auditor(reference_batch=8, reference_lr=2e-5 if flags else 5e-5)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=2,
            **flags,
        )  # fmt: skip
        transformers.Trainer(model=self.bert(), args=arguments, train_dataset=Pairs(), callbacks=[auditor]).train()
        assert auditor.found == set()

    def test_its_resnet_is_decayed_in_the_norms(self, tmp_path):
        config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
        model = transformers.ResNetForImageClassification(config)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], weight_decay=0.01
        )
        optimizer = transformers.Trainer(model=model, args=arguments).create_optimizer()
        assert codes(model, optimizer) == {"LB101", "LB103"}


def _on_a_worker(rank: int, n: int, local_batch: int, sync: bool) -> set[str]:
    model = resnet(zero_init_residual=True)
    if sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, dist.group.WORLD)
    else:
        batchnorm_over(model, n, local_batch=local_batch, world_size=4, rank=rank)
    data = range(256)
    loader = DataLoader(data, batch_size=local_batch, sampler=DistributedSampler(data))
    ddp = model if sync else DistributedDataParallel(model)  # SyncBatchNorm in DDP is refused on the CPU
    optimizer = SGD(by_decay(model, 1e-4, 0.0), lr=0.1)
    return codes(ddp, optimizer, loader, rank=rank, batchnorm_n=n)


class TestWorkers:
    # Real gloo workers: world size, rank and groups are read, and nothing is sent.
    @pytest.mark.parametrize(("n", "local_batch"), [(32, 64), (32, 32), (32, 16)])
    def test_batch_norm_over_n_is_right_in_every_layout(self, n: int, local_batch: int):
        assert on_workers(4, _on_a_worker, n, local_batch, False) == [{"LB102"}] * 4

    def test_a_group_of_all_is_over_all(self):
        assert on_workers(4, _on_a_worker, 32, 32, True) == [{"LB102", "LB202"}] * 4

    def test_an_audit_on_one_worker_alone_does_not_wait_for_the_others(self):
        assert on_workers(2, _on_one_alone) == [set(), None]


def _on_one_alone(rank: int) -> set[str] | None:
    model = nn.Linear(2, 2)
    data = range(8)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    return codes(model, AdamW(model.parameters(), weight_decay=0.0), loader) if rank == 0 else None
