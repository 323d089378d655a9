"""How is Goyal 2017 tried at a reduced scale? Settings in, trainings of five seeds out, each kept in one line of JSON.

Real data, a stand-in under its own name: 12,000 training pictures of Fashion-MNIST and all 10,000 test pictures, the
residual net of _goyal_net.py, 8 epochs at every batch, and what else a `Setting` says. The rate was tuned at the
reference batch of 16 alone (goyal_sweep.py); every number of another batch comes from `Recipe.resolve`. A run's error
is the median of its last 3 epochs, the last 2 of them after the last decay (the paper: 5 of 90).

runs/goyal_*.py each answer one question. A finished training is one line of runs/NAME/trainings.jsonl: a run that was
killed goes on where it stopped, and a training that two questions share is done once.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

import _goyal_emoji
import numpy as np
import torch
from _goyal_net import MOMENTUM, ResidualNet, move_statistics_by, recompute_statistics
from _record import ROOT
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from largebatch.recipe.loss import normalise
from largebatch.recipe.momentum import VelocitySGD
from largebatch.recipe.optimizer import build_sgd
from largebatch.recipe.recipe import Recipe, ResolvedRecipe
from largebatch.recipe.sampler import ShuffledStream
from largebatch.tasks import fashion_mnist

SEEDS = (0, 1, 2, 3, 4)
"""Seeds of one training; more seeds are more trainings, each with the next five."""
REFERENCE_BATCH = BN_N = 16
"""One worker of n = 16: k is the batch over 16."""
NUM_TRAIN, EPOCHS, WARMUP_EPOCHS, DECAY_EPOCHS, WEIGHT_DECAY = 12_000, 8, 2.0, (4.0, 6.0), 5e-4
LAST_EPOCHS = 3
AT_ONCE = 256
"""Pictures in one forward, where BN's n is no larger."""
LOCAL_SIZES = {"local_n": (4, 28), "local_1": (1, 31)}
"""Examples of every two workers, where each averages its loss over its own."""
NUM_STATISTICS = 2048
"""Training pictures from which BN's statistics are recomputed."""
PROTOCOL = {
    "data": "fashion-mnist", "num_train": NUM_TRAIN, "num_test": 10_000, "epochs": EPOCHS,
    "warmup_epochs": WARMUP_EPOCHS, "decay_epochs": DECAY_EPOCHS, "weight_decay": WEIGHT_DECAY, "momentum": 0.9,
    "nesterov": True, "reference_batch": REFERENCE_BATCH, "seeds": SEEDS, "last_epochs": LAST_EPOCHS,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What tells one training from another."""

    batch: int = REFERENCE_BATCH
    reference_lr: float
    rule: str = "linear"
    """Scaling rule of the learning rate."""
    warmup: str = "gradual"
    """gradual, constant (at the reference rate, then a jump) or none."""
    gamma: float = 0.0
    """What the last norm of every block starts at."""
    bn_n: int = BN_N
    """Examples whose statistics BN shares."""
    flaw: str = ""
    """Which remark of the paper is broken: decay_norms, cancelled_k, uncorrected, overlap, same_shuffle, or one of
    `LOCAL_SIZES`."""

    data: str = "fashion-mnist"
    """fashion-mnist, or emoji: all 3,048 training and 764 test pictures of _goyal_emoji.py."""
    epochs: int = EPOCHS
    """Passes over the data; decays stay at a half and three quarters of them."""
    warmup_epochs: float = WARMUP_EPOCHS
    weight_decay: float = WEIGHT_DECAY
    depth: int = 1
    """Residual blocks a stage, of which there are two."""
    first_seed: int = 0
    """The first of five seeds that are trained at once."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing but batch and rate differs from the recipe: a training whose curve is read."""
        return self == Setting(batch=self.batch, reference_lr=self.reference_lr, data=self.data, epochs=self.epochs)

    @property
    def seeds(self) -> range:
        """The seeds of this training."""
        return range(self.first_seed, self.first_seed + len(SEEDS))


@cache
def pictures(data: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test pictures as 14x14, every 2x2 pixels in the channels, and their labels."""
    if data == "emoji":
        train, labels, test, test_labels = _goyal_emoji.load(ROOT / "data" / "emoji")
    else:
        task = fashion_mnist.load(ROOT / "data" / "fashion-mnist")
        (train, labels), (test, test_labels) = task.train.tensors, task.held_out.tensors
    folded = [functional.pixel_unshuffle(images, 2).contiguous() for images in (train[:NUM_TRAIN], test)]
    return folded[0], labels[:NUM_TRAIN], folded[1], test_labels


def resolved(setting: Setting) -> ResolvedRecipe:
    """Every number of a training, by the recipe alone."""
    recipe = Recipe(
        reference_batch=REFERENCE_BATCH, reference_lr=setting.reference_lr, epochs=setting.epochs,
        decay_epochs=tuple(epoch * setting.epochs / EPOCHS for epoch in DECAY_EPOCHS),
        warmup=setting.warmup, warmup_epochs=setting.warmup_epochs, weight_decay=setting.weight_decay,
        scaling=setting.rule, batchnorm_n=BN_N,
    )  # fmt: skip
    return recipe.resolve(setting.batch, len(pictures(setting.data)[1]))


def optimizer_of(net: nn.Module, setting: Setting, recipe: ResolvedRecipe) -> Optimizer:
    """The recipe's optimizer, or the one that breaks remark 1 or 2."""
    form = {"momentum": recipe.momentum, "nesterov": recipe.nesterov}
    if setting.flaw == "decay_norms":
        return SGD(net.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True, **form)
    optimizer = build_sgd(net, lr=recipe.lr, weight_decay=recipe.weight_decay, **form)
    if setting.flaw == "uncorrected":
        groups = [{key: group[key] for key in ("params", "weight_decay")} for group in optimizer.param_groups]
        return VelocitySGD(groups, lr=recipe.lr, momentum_correction=False, **form)
    return optimizer


def examples_of(setting: Setting, seed: int, streams: list[ShuffledStream], start: int) -> np.ndarray:
    """The examples of the step at `start`, of one shuffle dealt out (remark 4) or of overlapping ones."""
    workers, num_train = max(1, setting.batch // BN_N), streams[0].num_examples
    if setting.flaw not in ("overlap", "same_shuffle") or workers == 1:
        return streams[0].indices(start, setting.batch)
    if not streams[1:]:
        streams += [ShuffledStream(num_train, 1_000 * (seed + 1) + worker) for worker in range(1, workers)]
    epoch, offset = divmod(start, num_train)
    if setting.flaw == "same_shuffle":  # every worker takes the same part of the same shuffle
        return np.tile(streams[0].indices(epoch * num_train + offset // workers, BN_N), workers)
    return np.concatenate([stream.indices(epoch * num_train + offset // workers, BN_N) for stream in streams])


def example_weights(setting: Setting) -> Tensor:
    """What each example's loss counts in the step, before it is divided by the batch: 1, but for broken remark 3.

    Then every second worker holds few examples and the others many, and each averages over its own.
    """
    if setting.flaw == "cancelled_k":
        return torch.full((setting.batch,), setting.batch / REFERENCE_BATCH)
    if setting.flaw not in LOCAL_SIZES:
        return torch.ones(setting.batch)
    workers = setting.batch // BN_N
    sizes = torch.tensor(LOCAL_SIZES[setting.flaw]).repeat(workers // 2)
    return (setting.batch / (workers * sizes)).repeat_interleave(sizes)


def train(setting: Setting) -> dict[str, Any]:
    """Train all seeds at once; returns the setting and, for every epoch and seed, losses and errors."""
    started = time.process_time()
    images, labels, _, _ = pictures(setting.data)
    recipe = resolved(setting)
    net = ResidualNet(
        setting.seeds, group=setting.bn_n, gamma=setting.gamma, in_channels=images.shape[1], depth=setting.depth
    )
    optimizer = optimizer_of(net, setting, recipe)
    streams = {seed: [ShuffledStream(len(labels), seed)] for seed in setting.seeds}
    at_once = min(setting.batch, max(AT_ONCE, setting.bn_n))
    weights = example_weights(setting).unsqueeze(1)
    epochs: list[dict[str, list[float]]] = []
    sums = torch.zeros(2, len(SEEDS))
    steps_in_epoch = 0
    for step in range(recipe.num_steps):
        lr = recipe.schedule.lr_at(step)
        if setting.flaw == "cancelled_k":
            lr /= setting.batch / REFERENCE_BATCH
        for group in optimizer.param_groups:
            group["lr"] = lr
        dealt = [examples_of(setting, seed, streams[seed], step * setting.batch) for seed in setting.seeds]
        chosen = torch.from_numpy(np.stack(dealt, axis=1))
        optimizer.zero_grad(set_to_none=True)
        parts = chosen.split(at_once)
        for number, (part, weight) in enumerate(zip(parts, weights.split(at_once), strict=True), start=1):
            # Each part moves the running statistics so that the step moves them once, to the mean over its parts.
            move_statistics_by(net, MOMENTUM / (len(parts) - (len(parts) - number) * MOMENTUM))
            logits = net(images.index_select(0, part.flatten()).view(len(part), -1, 14, 14))
            target = labels[part]
            losses = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(part)
            normalise((losses * weight).sum(), setting.batch).backward()  # a sum over seeds: each has its own weights
            sums += torch.stack((losses.detach().sum(0), (logits.argmax(2) != target).sum(0)))
        optimizer.step()
        steps_in_epoch += 1
        if step + 1 == recipe.steps_at(len(epochs) + 1):
            seen = steps_in_epoch * setting.batch
            row = {
                "train_loss": sums[0] / seen,
                "train_error": 100 * sums[1] / seen,
                **evaluate(net, setting, len(epochs) + 1),
            }
            epochs.append({key: [round(number, 4) for number in value.tolist()] for key, value in row.items()})
            sums, steps_in_epoch = torch.zeros(2, len(SEEDS)), 0
    seconds = round(time.process_time() - started, 1)
    diverged = [bool(value) for value in ~torch.isfinite(_norms(net))]
    return {"setting": asdict(setting), "lr": recipe.lr, "steps": recipe.num_steps, "epochs": epochs,
            "seconds": seconds, "commit": commit(), "diverged": diverged}  # fmt: skip


@torch.no_grad()
def evaluate(net: ResidualNet, setting: Setting, epoch: int) -> dict[str, Tensor]:
    """Test errors in percent, by the running statistics and by recomputed ones, which are then taken back.

    At every epoch where the curve is read (recomputed ones not in a longer training), else at the last ones.
    """
    is_last = epoch > setting.epochs - LAST_EPOCHS
    if not (is_last or setting.is_plain):
        return {}
    images = pictures(setting.data)[0][:NUM_STATISTICS].repeat(1, len(SEEDS), 1, 1)
    kept = {name: value.clone() for name, value in net.named_buffers()}
    errors = {"error": _test_error(net, setting.data)}
    if not is_last and setting.epochs > EPOCHS:
        return errors
    recompute_statistics(net, images, at_once=max(AT_ONCE, setting.bn_n))
    errors["recomputed_error"] = _test_error(net, setting.data)
    for name, value in net.named_buffers():
        value.copy_(kept[name])
    return errors


def _test_error(net: ResidualNet, data: str) -> Tensor:
    _, _, images, labels = pictures(data)
    net.eval()
    wrong = torch.zeros(len(SEEDS))
    for part, target in zip(images.split(500), labels.split(500), strict=True):
        wrong += (net(part.repeat(1, len(SEEDS), 1, 1)).argmax(2) != target.unsqueeze(1)).sum(0)
    net.train()
    return 100 * wrong / len(labels)


def _norms(net: nn.Module) -> Tensor:
    """|w|^2 of the last layer, a seed each: not finite where a seed diverged."""
    return net.head.weight.detach().square().sum((1, 2))


@cache
def commit() -> str:
    """The commit this runs at."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()


Key = str
Trainings = dict[Key, dict[str, Any]]


def key(setting: Setting) -> Key:
    return json.dumps(asdict(setting), sort_keys=True)


def finished() -> Trainings:
    """Every training that any run of this family has finished."""
    rows = [
        json.loads(line)
        for path in sorted((ROOT / "runs").glob("goyal_*/trainings.jsonl"))
        for line in path.read_text().splitlines()
    ]
    settings = [Setting(**row["setting"]) for row in rows]
    return {key(setting): {**row, "setting": asdict(setting)} for setting, row in zip(settings, rows, strict=True)}


def train_all(name: str, settings: Iterable[Setting]) -> list[dict[str, Any]]:
    """The trainings of `settings`, in their order; what is not there yet is trained and added to runs/NAME.

    Several processes may do this at once, on one machine: each takes what no other is at.
    """
    wanted = list(settings)
    path = ROOT / "runs" / name / "trainings.jsonl"
    path.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    while missing := [setting for setting in wanted if key(setting) not in finished()]:
        mine = next((setting for setting in missing if claim(setting)), None)
        if mine is None:
            time.sleep(1.0)
            continue
        print(f"{name}, {len(missing)} to go: {mine}", flush=True)
        row = train(mine)
        print(f"  {row['seconds']} s, errors {row['epochs'][-1]['error']}", flush=True)
        with path.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    done = finished()
    return [done[key(setting)] for setting in wanted]


def train_more(name: str, settings: Iterable[Setting], num_sets: int) -> list[dict[str, Any]]:
    """The trainings of `settings` with `num_sets` times as many seeds, as if each were one."""
    wanted = list(settings)
    sets = [[replace(one, first_seed=number * len(SEEDS)) for one in wanted] for number in range(num_sets)]
    return [together(parts) for parts in zip(*(train_all(name, part) for part in sets), strict=True)]


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Trainings that differ in their seeds only, as one."""
    epochs = [
        {key: [value for epoch in same for value in epoch[key]] for key in same[0] if all(key in e for e in same)}
        for same in zip(*(part["epochs"] for part in parts), strict=True)
    ]
    diverged = [value for part in parts for value in part["diverged"]]
    return {**parts[0], "epochs": epochs, "diverged": diverged, "seconds": sum(part["seconds"] for part in parts)}


def claim(setting: Setting) -> bool:
    """Whether this process is the one to train `setting`: no other that is alive has said so."""
    path = ROOT / "largebatch-out" / "goyal-claims" / sha1(key(setting).encode()).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        owner = path.read_text()
        if owner and not Path(f"/proc/{owner}").exists():
            path.unlink(missing_ok=True)  # it was killed; the next look takes it
        return False
    return True
