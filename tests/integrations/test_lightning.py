"""Does a Lightning Trainer measure what a plain loop does: clipped, uneven, unscaled, in two processes?"""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from integrations.plain_loop import assert_same, plain_loop
from largebatch.errors import ConfigError
from largebatch.integrations.lightning import NoiseScaleCallback
from largebatch.noise.moments import StepMoments

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's own, about workers, cores and torch's deprecations
]

LR, CLIP = 0.3, 0.1


class Module(pl.LightningModule):
    """Regression on rows of 4 numbers; keeps the batches of each optimizer step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.seen, self.norms = [[]], []

    def forward(self, rows):
        return self.net(rows)

    def training_step(self, batch, batch_idx):
        self.seen[-1].append(batch[0].clone())
        return loss_of(self, batch[0])

    def validation_step(self, batch, batch_idx):
        loss_of(self, batch[0])

    def on_before_optimizer_step(self, optimizer):
        self.seen.append([])
        self.norms.append(float(torch.cat([p.grad.flatten() for p in self.parameters()]).norm()))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Keeping(NoiseScaleCallback):
    """Keeps the moments, and writes what a process of its own cannot return."""

    def __init__(self, folder=None, **options):
        self.measured, self.folder = [], folder
        super().__init__(every=1, on_measured=[lambda step: self.measured.append(step.moments)], **options)

    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        if self.folder is None:
            return
        found = {
            "seen": [[part.tolist() for part in step] for step in pl_module.seen if step],
            "measured": [[m.trace_cov, m.grad_sq_norm, m.batch] for m in self.measured],
            "counts": [
                self.monitor.num_steps,
                trainer.global_step,
                trainer.lr_scheduler_configs[0].scheduler.last_epoch,
            ],
        }
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def loss_of(model, rows):
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


def loader(num=22, batch=4):
    rows = torch.randn(num, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows), batch_size=batch)


def fit(callback, module=None, ckpt=None, data=None, validate=True, **changes):
    settings = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": CLIP,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    } | changes  # fmt: skip
    module = module or Module()
    trainer = pl.Trainer(callbacks=[callback], **settings)
    trainer.fit(module, data or loader(), loader() if validate else None, ckpt_path=ckpt)
    return trainer, module


def expected(steps, accumulation=2, world_size=1):
    return plain_loop(
        Module().net, [step for step in steps if step], loss_of=loss_of, size_of=len,
        weight_of=lambda part, step: 1 / (accumulation * world_size), lr=LR, clip=CLIP,
    )  # fmt: skip


def test_moments_are_the_plain_loop_s_for_uneven_batches_and_a_short_last_step():
    # 22 rows in batches of 4, accumulated by 4: (4 4 4 4) (4 2), and Lightning divides by 4 in both steps.
    callback = Keeping()
    trainer, module = fit(callback, accumulate_grad_batches=4)
    assert [list(map(len, step)) for step in module.seen if step] == [[4, 4, 4, 4], [4, 2]] * 2
    assert_same(callback.measured, expected(module.seen, accumulation=4))
    assert min(module.norms) > CLIP
    assert callback.monitor.num_steps == trainer.global_step == 4


@pytest.mark.parametrize("scaled", [False, True], ids=["float32", "with a GradScaler"])
def test_clipping_and_unscaling_come_after_the_measurement(scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    # float32 under a scaler: what it does to gradients, without half precision's rounding
    plugins = [Scaled("16-mixed", "cpu", scaler)] if scaled else []
    callback = Keeping()
    trainer, module = fit(callback, plugins=plugins, data=loader(24))
    assert_same(callback.measured, expected(module.seen))
    assert min(module.norms) > CLIP
    assert callback.monitor.num_steps == trainer.global_step == 6


class Scaled(MixedPrecision):
    def autocast_context_manager(self):
        return torch.autocast("cpu", enabled=False)


def test_two_processes_measure_one_step_together_and_count_it_once(tmp_path):
    fit(Keeping(tmp_path), devices=2, strategy="ddp_fork", max_epochs=1, validate=False, data=loader(32))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    steps = [[torch.tensor(part) for part in one + two] for one, two in zip(first["seen"], second["seen"], strict=True)]
    assert [list(map(len, step)) for step in steps] == [[4, 4, 4, 4]] * 2
    fields = dict.fromkeys(("num_microbatches", "sq_norm_small", "sq_norm_step", "units_small", "units_step"), 0)
    measured = [StepMoments(trace_cov=t, grad_sq_norm=g, batch=b, **fields) for t, g, b in first["measured"]]
    assert_same(measured, expected(steps, world_size=2))
    assert first["counts"] == second["counts"] == [2, 2, 2]
    assert second["measured"] == []  # one process logs


def test_a_run_from_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    whole = Keeping()
    fit(whole, max_epochs=4)
    trainer, _ = fit(Keeping(), max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = Keeping()
    trainer, _ = fit(resumed, max_epochs=4, ckpt=tmp_path / "two.ckpt")
    assert len(resumed.measured) == len(whole.measured) / 2
    assert resumed.monitor.num_steps == trainer.global_step == 12
    assert resumed.monitor.state_dict() == whole.monitor.state_dict()


def test_each_measured_step_is_logged(tmp_path):
    callback = Keeping(unit="frames")
    trainer, _ = fit(callback, logger=CSVLogger(tmp_path), max_epochs=8)
    logged = list(csv.DictReader((Path(trainer.logger.log_dir) / "metrics.csv").open()))
    assert [float(entry["noise/trace_cov"]) for entry in logged] == [m.trace_cov for m in callback.measured]
    assert [int(entry["step"]) for entry in logged] == list(range(trainer.global_step))
    estimate = callback.monitor.noise_scale
    assert estimate.unit == "frames"
    assert estimate.resolved
    last = [float(logged[-1][f"noise/b_simple_frames{end}"]) for end in ("", "_low", "_high")]
    assert last == [estimate.b_simple, *estimate.interval]


def test_a_second_fit_of_another_trainer_begins_anew():
    callback = Keeping()
    fit(callback)
    trainer, _ = fit(callback, max_epochs=1)
    assert callback.monitor.num_steps == trainer.global_step == 3


def test_manual_optimization_is_refused():
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="manual optimization"):
        fit(NoiseScaleCallback(), module, gradient_clip_val=None, accumulate_grad_batches=1)


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_fit_that_fails_in_a_backward_leaves_no_hook_and_the_next_one_measures(error):
    class Failing(Module):
        def backward(self, loss):
            if len(self.norms) == 2:
                raise error
            super().backward(loss)

    callback, module, handler = Keeping(), Failing(), signal.getsignal(signal.SIGINT)
    with pytest.raises((ArithmeticError, SystemExit)):  # Lightning exits on Ctrl-C
        fit(callback, module)
    signal.signal(signal.SIGINT, handler)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters())
    assert callback.monitor.num_steps == len(callback.measured) == 2
    callback.measured.clear()
    _, module = fit(callback)
    assert_same(callback.measured, expected(module.seen))


def test_examples_of_their_own_need_no_accumulation_and_no_count_of_units():
    callback = Keeping(per_example=True, units_of=None)
    _, module = fit(callback, accumulate_grad_batches=1, max_epochs=1)
    steps = [[row for part in step for row in part.split(1)] for step in module.seen if step]
    assert [len(step) for step in steps] == [4, 4, 4, 4, 4, 2]
    alike = plain_loop(
        Module().net, steps, loss_of=loss_of, size_of=len, weight_of=lambda row, step: 1 / len(step), lr=LR, clip=CLIP
    )
    assert_same(callback.measured, alike)


def test_a_lightning_that_does_not_tell_a_step_s_last_backward_is_refused(monkeypatch):
    monkeypatch.delattr("lightning.pytorch.loops.fit_loop._FitLoop._should_accumulate")
    with pytest.raises(ConfigError, match=r"this release of lightning has no _FitLoop\._should_accumulate"):
        fit(NoiseScaleCallback())
