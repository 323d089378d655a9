"""How are Goyal's detection tables (Table 3) tried at a reduced scale? On stamps pasted on photographs, by their name.

`scripts/fetch_data.sh stamps` makes both halves of the data: class folders, on which a ResNet-18 learns to classify,
and a COCO folder for a small Mask R-CNN, which starts from that ResNet with its batch norm frozen, or from nothing with
group norm. Everything is trained by `largebatch.train`: a run that was killed goes on from its checkpoint, and one that
ended is never done again. Weights lie in largebatch-out/stamps; a finished fine-tune is one line of
runs/NAME/finetunes.jsonl.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _record import ROOT
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torchvision.models import resnet18

from largebatch.recipe.recipe import Recipe
from largebatch.records.files import read_json
from largebatch.records.schema import RunRecord, RunSpec
from largebatch.tasks import stamps
from largebatch.tasks.detection_ap import average_precision
from largebatch.tasks.task import Task, TensorSplit, count_wrong, cross_entropy_sum
from largebatch.train.checkpoint import load_weights
from largebatch.train.loop import train

DATA, WEIGHTS = ROOT / "data" / "stamps", ROOT / "largebatch-out" / "stamps"
BN_N = 32
"""Pictures over which batch norm of the classifier takes its statistics."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""What torchvision's detectors subtract and divide by, so that the backbone sees what it was trained on."""
NUM_TRAIN = 1200
"""Pictures to fine-tune on, the first of the 1,600."""
EPOCHS = 3
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What tells one fine-tune from another."""

    backbone_batch: int | None = None
    """Batch at which the backbone was trained; None starts from random weights, with group norm."""
    batch: int
    """Batch of the fine-tune."""
    epochs: int = EPOCHS
    num_train: int = NUM_TRAIN
    seed: int = SEED


def mirrored(batch: tuple[Tensor, Tensor], draws: Tensor) -> tuple[Tensor, Tensor]:
    """Every second picture, on average, mirrored."""
    pictures, labels = batch
    return torch.where((draws[:, 0] < 0.5)[:, None, None, None], pictures.flip(-1), pictures), labels


@cache
def classes() -> Task:
    """8 classes of stamps, one in each picture of 32 x 32; the stamps of the held-out pictures are others."""
    return Task(
        name="stamp-classes", train=_folders("train"), held_out=_folders("val"),
        model=lambda: resnet18(num_classes=8, zero_init_residual=True), loss=cross_entropy_sum, errors=count_wrong,
        recipe=Recipe(
            reference_batch=32, reference_lr=0.05, epochs=10, warmup_epochs=1, decay_epochs=(6, 8.5),
            weight_decay=5e-4, batchnorm_n=BN_N,
        ),
        augment=mirrored, max_microbatch=BN_N,
    )  # fmt: skip


def _folders(half: str) -> TensorSplit:
    root = DATA / "classes" / half
    names = sorted(path.name for path in root.iterdir())
    paths = [path for name in names for path in sorted((root / name).iterdir())]
    pixels = torch.from_numpy(np.stack([np.asarray(Image.open(path)) for path in paths])).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (MEAN, STD))
    labels = torch.tensor([names.index(path.parent.name) for path in paths])
    # Every second pixel, averaged: about the size at which the detector sees a stamp, at a quarter of the work.
    small = avg_pool2d(pixels.to(torch.float32) / 255, 2)
    return TensorSplit(((small - mean) / std, labels))


def backbone(batch: int) -> tuple[Path, RunRecord]:
    """The classifier trained at `batch` by the linear rule with gradual warmup: its weights, and its record."""
    task, folder = classes(), WEIGHTS / f"classes-b{batch}"
    spec = spec_of(task, batch, BN_N, SEED, evaluate=True)
    options = {"keep_model": True, "checkpoint_seconds": 120.0, "on_step": reporter(task.name, batch, spec)}
    return folder / "model.pt", train(task, spec, folder, **options)


def spec_of(task: Task, batch: int, microbatch: int, seed: int, *, evaluate: bool) -> RunSpec:
    """A run of the task's recipe at `batch`, its noise scale measured wherever the batch has two microbatches."""
    resolved = task.recipe.resolve(batch, len(task.train))
    return RunSpec(
        task=task.name, role="train", batch=batch, microbatch=microbatch, lr=resolved.lr, schedule="goyal", seed=seed,
        max_steps=resolved.num_steps, monitor=batch > microbatch, evaluate_epochs=evaluate,
    )  # fmt: skip


def reporter(name: str, batch: int, spec: RunSpec):
    """Prints a line now and then; keeps the noise scale at the end of a run in `SCALES`."""
    last = [time.monotonic()]

    def on_step(progress: Any, loss: float, monitor: Any) -> None:
        if time.monotonic() - last[0] > 30 or progress.step == spec.max_steps:
            last[0] = time.monotonic()
            print(f"{name} at {batch}: step {progress.step} of {spec.max_steps}, loss {loss:.3f}", flush=True)
        if monitor is not None and progress.step == spec.max_steps:
            SCALES[batch] = str(monitor.noise_scale)

    return on_step


SCALES: dict[int, str] = {}


def finetune_task(setting: Setting, weights: Path | None) -> Task:
    """The stamps task, started from `weights` or from none, on the first pictures of its training half."""
    task = stamps.load(DATA, weights)
    task.train.image_ids = task.train.image_ids[: setting.num_train]
    epochs = setting.epochs
    return replace(task, recipe=replace(task.recipe, epochs=epochs, decay_epochs=(0.75 * epochs,), warmup_epochs=0.5))


def finetune(name: str, setting: Setting) -> dict[str, Any]:
    """Box and mask AP on the held-out pictures after the fine-tune, and of the same weights before it."""
    path = ROOT / "runs" / name / "finetunes.jsonl"
    path.parent.mkdir(exist_ok=True)
    for line in path.read_text().splitlines() if path.exists() else ():
        if (row := json.loads(line))["setting"] == asdict(setting):
            return row
    weights, classified = (None, None) if setting.backbone_batch is None else backbone(setting.backbone_batch)
    task = finetune_task(setting, weights)
    spec = spec_of(task, setting.batch, task.max_microbatch, setting.seed, evaluate=False)
    folder = WEIGHTS / f"{name}-b{setting.batch}-from-b{setting.backbone_batch}-{spec.key.rsplit('-', 1)[1]}"
    options = {"keep_model": True, "checkpoint_seconds": 120.0, "on_step": reporter(task.name, setting.batch, spec)}
    record = train(task, spec, folder, **options)
    model = trained(task, folder)
    row = {
        "setting": asdict(setting), "lr": spec.lr, "steps": record.steps, "microbatch": spec.microbatch,
        "status": record.status, "noise_scale": SCALES.get(setting.batch),
        "backbone_error": 100 * classified.epochs[-1]["error"] if classified is not None else None,
        "trained": average_precision(model, task.held_out),
        "untrained": average_precision(fresh(task, spec), task.held_out),
        "error": held_out_error(task, model), "seconds": read_json(folder / "timing.json")["seconds"],
    }  # fmt: skip
    with path.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    return row


def fresh(task: Task, spec: RunSpec) -> nn.Module:
    """The weights that the run starts from."""
    torch.manual_seed(spec.seed)
    return task.model()


def trained(task: Task, folder: Path) -> nn.Module:
    """The weights that the run ended with."""
    model = task.model()
    model.load_state_dict(load_weights(folder / "model.pt"))
    return model


@torch.no_grad()
def held_out_error(task: Task, model: nn.Module) -> float:
    """The task's own error, in percent."""
    model.eval()
    chunks = torch.arange(len(task.held_out)).split(task.max_microbatch)
    return 100 * sum(float(task.errors(model, task.held_out.fetch(chunk))) for chunk in chunks) / len(task.held_out)
