"""Are Lightning's and Hugging Face's own loops sane, and is a fault in them found, the context just around them?"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from largebatch.audit.watch import watch
from largebatch.integrations.lightning import NoiseScaleCallback

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's own, about workers, cores and torch's deprecations
]


def rows(num=32):
    return torch.randn(num, 4, generator=torch.Generator().manual_seed(1))


class Module(pl.LightningModule):
    """A sane module; `fault` breaks it."""

    def __init__(self, fault=""):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.fault = fault

    def training_step(self, batch, batch_idx):
        (inputs,) = batch
        if self.fault == "LB403" and batch_idx % 2:
            inputs = inputs[:2]
        loss = F.mse_loss(self.net(inputs), inputs.sum(1, keepdim=True))
        return 2 * loss if self.fault == "LB405" else loss

    def validation_step(self, batch, batch_idx):
        if self.fault == "LB203":
            self.net.train()
        self.net(batch[0])

    def on_train_batch_end(self, *_):
        if self.fault == "LB401":
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        interval = "epoch" if self.fault == "LB401" else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}


def fit(module, loader=None):
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[NoiseScaleCallback(every=1)],
    )  # fmt: skip
    validation = DataLoader(TensorDataset(rows(8)), batch_size=4)
    trainer.fit(module, loader or DataLoader(TensorDataset(rows()), batch_size=4, shuffle=True), validation)
    return [parameter.tolist() for parameter in module.parameters()]


@pytest.mark.parametrize("fault", ["", "LB203", "LB401", "LB403", "LB405"])
def test_a_lightning_fit_shows_what_is_wrong_and_ends_at_the_same_weights(fault):
    plain = fit(Module(fault))
    module = Module(fault)
    loader = DataLoader(TensorDataset(rows()), batch_size=4, shuffle=True)
    with watch(module, dataloader=loader, accumulation=2) as watched:
        weights = fit(module, loader)
    assert [finding.code for finding in watched.findings] == ([fault] if fault else [])
    assert (watched.num_steps, watched.num_backwards, watched.unread) == (8, 16, ())
    assert weights == plain


PAD = 16
TEXT = [[(3 * i + j) % 15 for j in range(4 + i % 7)] for i in range(32)]


def collate(batch):
    width = max(map(len, batch))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in batch])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": ids.masked_fill(ids == PAD, -100)}


class MeanOfMeans(Trainer):
    """The old way: the mean over each microbatch's tokens, divided by the accumulation."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


def train(folder, kind, watching, **changes):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=17, bos_token_id=0, eos_token_id=0, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    )
    settings = TrainingArguments(
        str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1000, **changes,
    )  # fmt: skip
    trainer = kind(model=model, args=settings, train_dataset=TEXT, eval_dataset=TEXT[:8], data_collator=collate)
    watched = None
    if watching:
        with watch(model, accumulation=2) as watched:
            trainer.train()
    else:
        trainer.train()
    return watched, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize(("kind", "expected"), [(Trainer, []), (MeanOfMeans, ["LB403"])])
def test_a_hugging_face_trainer_over_uneven_text(tmp_path, kind, expected):
    watched, weights = train(tmp_path, kind, True, eval_strategy="epoch", warmup_steps=2)
    assert [finding.code for finding in watched.findings] == expected
    assert (watched.num_steps, watched.num_backwards, watched.unread) == (8, 16, ())
    assert weights == train(tmp_path, kind, False, eval_strategy="epoch", warmup_steps=2)[1]
