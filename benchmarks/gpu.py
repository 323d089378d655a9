"""What does training ResNet-50 on one GPU cost, and does the monitor stay within 1 % of it there?

ResNet-50 at 224 px in bf16 and channels-last by the loop of `largebatch train`: images a second on a batch that lies on
the GPU and on real JPEGs, each as it is and by torch.compile; what measuring the noise scale adds (two microbatches a
step, against the same loop without it), what every example's own gradient norm adds (the same net with GroupNorm,
against the plain step); the peak memory of each. Every part is a process of its own with a time limit, says what
it found when it ends, and leaves the others be when it fails. Under 8 minutes in all.

`--device cpu --quick` goes through all of it on the CPU, at sizes that mean nothing; without a GPU and without that the
exit code is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import sklearn.datasets
import torch
from torch import Tensor, nn

from _harness import claim
from largebatch.noise.cadence import WARMUP
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.noise.per_example.collector import PerExampleCollector
from largebatch.recipe.recipes import goyal2017_resnet50
from largebatch.records.schema import RunSpec
from largebatch.tasks.image_folder import ImageFolder
from largebatch.tasks.imagenet import MODELS, make_model
from largebatch.tasks.task import Split, Task, count_wrong, cross_entropy_sum
from largebatch.train.loop import StoppedError, train
from largebatch.train.progress import Progress
from largebatch.train.spread import Execution
from largebatch.train.workers import Workers
from loader import cut_pictures

GOAL = 1.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is done."""

    device: torch.device
    model: str = "resnet50"
    size: int = 224
    batch: int = 256
    classes: int = 1000
    warmup: int = 8
    """Steps before time is taken."""
    seconds: float = 12.0
    """Of timed steps."""
    pairs: int = 40
    pictures: int = 4096


def sizes(device: str, quick: bool) -> Sizes:
    """What one call measures; quick on a CPU means that every path is gone through, no more."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if device == "cpu":
        return Sizes(
            device=place, model="resnet18", size=32, batch=8, classes=8, warmup=1, seconds=0.2, pairs=2, pictures=24
        )
    return replace(Sizes(device=place), seconds=3.0, pairs=10, pictures=1024) if quick else Sizes(device=place)


class OnDevice:
    """Random pictures of which every batch is the same one, on the GPU already."""

    def __init__(self, at: Sizes, num: int) -> None:
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(at.batch, 3, at.size, at.size, generator=draw).to(at.device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(at.classes, (at.batch,), generator=draw).to(at.device)
        self.num = num

    def __len__(self) -> int:
        return self.num

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[: len(indices)], self.labels[: len(indices)]


def train_loop(
    at: Sizes, on_step: Callable[[Progress, float, NoiseScaleMonitor | None], None], *, microbatch: int | None = None,
    data: Split | None = None, monitor: bool = False, compiled: bool = False,
) -> None:  # fmt: skip
    """The loop of `largebatch train` until `on_step` stops it."""
    synthetic = OnDevice(at, 8 * at.batch)
    task = Task(
        name="gpu", train=data or synthetic, held_out=synthetic, loss=cross_entropy_sum, errors=count_wrong,
        recipe=replace(goyal2017_resnet50(), reference_batch=at.batch, batchnorm_n=None),
        model=lambda: make_model(at.model, at.classes),
    )  # fmt: skip
    spec = RunSpec(
        task="gpu", role="train", batch=at.batch, microbatch=microbatch or at.batch, lr=0.1, schedule="goyal", seed=0,
        max_steps=10**6, monitor=monitor,
    )  # fmt: skip
    execution = Execution(precision="bf16", channels_last=True, compile=compiled)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as out:
        train(
            task, spec, Path(out), workers=Workers(device=at.device), execution=execution, monitor_every="auto",
            checkpoint_seconds=1e9, loaders=0 if data is None else max(1, min(16, cores)), on_step=on_step,
        )  # fmt: skip


def rate(at: Sizes, *, compiled: bool, jpegs: bool) -> dict[str, Any]:
    """Images a second. `on_step` gets the loss as a number, so a step has ended when it is called."""
    began, times = time.perf_counter(), list[float]()

    def on_step(progress: Progress, loss: float, monitor: NoiseScaleMonitor | None) -> None:
        times.append(time.perf_counter())
        timed = len(times) - at.warmup
        if timed > 2 and times[-1] - times[at.warmup - 1] > at.seconds:
            raise StoppedError("all is measured")

    with tempfile.TemporaryDirectory() as name:
        data = None
        if jpegs:
            photographs = sorted(Path(sklearn.datasets.__file__).parent.glob("images/*.jpg"))
            cut_pictures(photographs, Path(name), each=-(-at.pictures // len(photographs)))
            data = ImageFolder(Path(name), size=at.size)
        with contextlib.suppress(StoppedError):
            train_loop(at, on_step, data=data, compiled=compiled)
    steps = len(times) - at.warmup
    return {
        "images per second": round(at.batch * steps / (times[-1] - times[at.warmup - 1]), 1),
        "timed steps": steps, "seconds until the first step": round(times[0] - began, 1),
    }  # fmt: skip


def monitor_overhead(at: Sizes) -> dict[str, Any]:
    """Time of a step with the monitor over that without, where a step has two microbatches."""
    from training import Pause, Turns

    seen: list[NoiseScaleMonitor] = []

    def loop(pause: Pause, *, monitor: bool) -> None:
        def on_step(progress: Progress, loss: float, found: NoiseScaleMonitor | None) -> None:
            seen[:] = seen if found is None else [found]
            waited = pause()
            if found is not None and found._last_end is not None:
                found._last_end += waited  # the other loop's turn is no part of the step that it times

        train_loop(at, on_step, microbatch=at.batch // 2, monitor=monitor)

    measured_loop, plain = Turns(partial(loop, monitor=True)), Turns(partial(loop, monitor=False))
    for _ in range(at.warmup):
        plain()
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(at.pairs + WARMUP + 1):
        measuring = seen[0].measuring
        turns = (measured_loop, plain) if pair % 2 == 0 else (plain, measured_loop)
        seconds = {turn: turn().wall for turn in turns}
        if pair >= min(at.warmup, WARMUP - 2):
            ratios[measuring].append(seconds[measured_loop] / seconds[plain])
    every, scale = seen[0].every, str(seen[0].noise_scale)
    measured_loop.close()
    plain.close()
    measured = statistics.median(ratios[True])
    unmeasured = statistics.median(ratios[False] or ratios[True])
    return {
        "ratio": round(unmeasured + max(0.0, measured - unmeasured) / every, 4), "measured step": round(measured, 4),
        "unmeasured step": round(unmeasured, 4), "cadence": every, "noise scale": scale,
    }  # fmt: skip


def per_example_overhead(at: Sizes) -> dict[str, Any]:
    """Time of a step that knows every example's gradient norm over a plain one, exact and fast."""
    data = OnDevice(replace(at, batch=max(2, at.batch // 4)), 1)
    steps = {kind: per_example_step(at, data, kind) for kind in ("plain", "exact", "fast")}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for repeat in range(at.warmup + at.pairs):
        for kind in list(steps)[:: 1 if repeat % 2 else -1]:
            start = time.perf_counter()
            steps[kind]()
            if repeat >= at.warmup:
                seconds[kind].append(time.perf_counter() - start)
    ratios = {
        kind: statistics.median(mine / plain for mine, plain in zip(seconds[kind], seconds["plain"], strict=True))
        for kind in ("exact", "fast")
    }
    return {kind: round(ratio, 3) for kind, ratio in ratios.items()} | {
        "images per second, plain": round(len(data.images) / statistics.median(seconds["plain"]), 1)
    }


def per_example_step(at: Sizes, data: OnDevice, kind: str) -> Callable[[], None]:
    """One step of a net of its own, until the GPU is done."""

    def group_norm(width: int) -> nn.Module:
        return nn.GroupNorm(32, width)

    torch.manual_seed(0)
    model = MODELS[at.model](num_classes=at.classes, norm_layer=group_norm).to(at.device)
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    collector = None if kind == "plain" else PerExampleCollector(model, fast=kind == "fast")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(at.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(data.images), data.labels)
        loss.backward()
        if collector is not None:
            collector.take()
        optimizer.step()
        loss.item()  # waits for the GPU

    return step


PARTS: dict[str, tuple[float, Callable[[Sizes], dict[str, Any]]]] = {
    "monitor": (75, monitor_overhead),
    "synthetic": (50, partial(rate, compiled=False, jpegs=False)),
    "JPEGs": (70, partial(rate, compiled=False, jpegs=True)),
    "per example": (70, per_example_overhead),
    "synthetic, compiled": (110, partial(rate, compiled=True, jpegs=False)),
    "JPEGs, compiled": (95, partial(rate, compiled=True, jpegs=True)),
}
"""What is measured, each with its time limit in seconds: 470 in all."""


def run_part(name: str, at: Sizes) -> None:
    """In a process of its own: measure, print one JSON line, and end at once, whatever threads are left."""
    torch.set_num_threads(1)
    if at.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        found = PARTS[name][1](at)
        if at.device.type == "cuda":
            found["peak GPU memory, GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        else:
            found["peak memory, GiB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps(found), flush=True)
    os._exit(0)


def called(name: str, command: list[str], limit: float) -> dict[str, Any]:
    """What that process printed last, or why it printed nothing."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, "--part", name], stdout=subprocess.PIPE, stderr=log, text=True)
        timer = threading.Timer(limit, process.kill)
        timer.start()
        output, _ = process.communicate()
        late = not timer.is_alive()
        timer.cancel()
        log.seek(0)
        said = log.read().strip()[-2000:]
    try:
        found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        why = f"not done within {limit:.0f} s" if late else f"ended with exit code {process.returncode}"
        found = {"error": why}
    if "error" in found:
        print(said, file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure each part, print it, and end with the claim's line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="a file to which each part's line is appended as it comes")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: run this where torch.cuda.is_available(), or try it by --device cpu --quick.")
        sys.exit(2)
    if options.device == "cpu" and not options.quick:
        print("on a CPU this only shows that it runs, which --device cpu --quick does.")
        sys.exit(2)
    at = sizes(options.device, options.quick)
    if options.part:
        run_part(options.part, at)
    command = [sys.executable, __file__, "--device", options.device, *itertools.repeat("--quick", options.quick)]
    value: dict[str, Any] = {}
    for name, (limit, _) in PARTS.items():
        value[name] = called(name, command, limit)
        line = json.dumps({name: value[name]})
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")
    ratio = value["monitor"].get("ratio")
    claim(
        "on one GPU the monitor at its default cadence costs at most 1 % of ResNet-50's step",
        value={"monitor": ratio},
        goal=f"<= {GOAL}, on a GPU, and no part failed",
        holds=at.device.type == "cuda" and ratio is not None and ratio <= GOAL
        and not any("error" in found for found in value.values()),
        peers={},
        how={
            "method": "images a second: timed steps after a warm-up; ratios: medians of interleaved pairs",
            "parts": value, "model": at.model, "pixels": at.size, "batch": at.batch, "form": "bf16, channels-last",
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
