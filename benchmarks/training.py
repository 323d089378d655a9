"""Does `largebatch train` see at least as many images a second as torchvision's reference training loop?

Work, on one thread: ResNet-50 at 64 px (16 images a step) and ResNet-18 at 224 px (8), Nesterov SGD, float32. Each once
in two microbatches, with the noise scale measured at the default cadence beside the reference loop with accumulation
and no measuring; once in one forward, as the reference loop is; and ResNet-18 once more on JPEGs, one loader process
each. Elsewhere the data are in memory: ours shuffles and gathers its batches, the reference is handed them.
The loops run in one process on weights of their own and take turns, step by step. One thread that waits for nothing is
timed by its CPU seconds, which other work on the machine disturbs least; the wall clock's figures stand beside them.
"""

from __future__ import annotations

import io
import itertools
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import sklearn.datasets
import torch
import torchvision
from torch import Tensor, nn

from _harness import arguments, claim
from _reference_loop import train_one_epoch
from largebatch.noise.cadence import WARMUP
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.recipe.recipes import goyal2017_resnet50
from largebatch.records.schema import RunSpec
from largebatch.tasks.image_folder import ImageFolder
from largebatch.tasks.imagenet import make_model
from largebatch.tasks.task import Split, Task, TensorSplit, count_wrong, cross_entropy_sum
from largebatch.train.loop import StoppedError, train
from largebatch.train.progress import Progress
from loader import cut_pictures
from loader import reference as reference_loader

GOAL = 1.0
CLASSES, LR, CPU = 1000, 1e-3, torch.device("cpu")
Pause = Callable[[], float]
"""Ends a turn; returns the seconds that passed until the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What both loops train."""

    model: str
    size: int
    batch: int
    microbatch: int
    folder: Path | None = None
    """JPEGs in class folders; None: random pictures in memory."""

    @property
    def measured(self) -> bool:
        return self.microbatch < self.batch

    def __str__(self) -> str:
        how = "JPEGs" if self.folder else "measured" if self.measured else "one forward"
        return f"{self.model} {self.size} px, {how}"


class Seconds(NamedTuple):
    """What a step took."""

    wall: float
    cpu: float
    """Of this process, in which one thread works at a time."""


class Turns:
    """A loop in a thread of its own that takes a step when it is called, and waits in between."""

    def __init__(self, body: Callable[[Pause], None]) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._over, self._failure = False, list[BaseException]()
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()
        self._wait()

    def __call__(self) -> Seconds:
        """Let it take its next step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._go.release()
        self._wait()
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    def _wait(self) -> None:
        self._done.acquire()
        if self._failure:
            raise self._failure[0]

    def close(self) -> None:
        self._over = True
        self._go.release()
        self._thread.join()

    def _run(self, body: Callable[[Pause], None]) -> None:
        torch.set_num_threads(1)
        try:
            body(self._pause)
        except StoppedError:
            pass
        except BaseException as failure:
            self._failure.append(failure)
        self._done.release()

    def _pause(self) -> float:
        start = time.perf_counter()
        self._done.release()
        self._go.acquire()
        if self._over:
            raise StoppedError("all is measured")
        return time.perf_counter() - start


def pictures(work: Work, num: int) -> TensorSplit:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(num, 3, work.size, work.size, generator=draw)
    return TensorSplit((images, torch.randint(CLASSES, (num,), generator=draw)))


class Ours:
    """The loop of `largebatch train`."""

    def __init__(self, work: Work, out: Path) -> None:
        self.work, self.out, self.monitor = work, out, None
        self.step = Turns(self._train)

    def _train(self, pause: Pause) -> None:
        def on_step(progress: Progress, loss: float, monitor: NoiseScaleMonitor | None) -> None:
            self.monitor = monitor
            waited = pause()
            if monitor is not None and monitor._last_end is not None:
                monitor._last_end += waited  # the other loop's turn is no part of the step that it times

        work = self.work
        train_data: Split = ImageFolder(work.folder, size=work.size) if work.folder else pictures(work, 8 * work.batch)
        task = Task(
            name="benchmark", train=train_data, held_out=pictures(work, 8), loss=cross_entropy_sum, errors=count_wrong,
            recipe=replace(goyal2017_resnet50(), reference_batch=work.batch, reference_lr=LR, batchnorm_n=None),
            model=lambda: make_model(work.model, CLASSES),
        )  # fmt: skip
        spec = RunSpec(
            task="benchmark", role="train", batch=work.batch, microbatch=work.microbatch, lr=LR, schedule="goyal",
            seed=0, max_steps=10**6, monitor=work.measured,
        )  # fmt: skip
        train(
            task, spec, self.out, monitor_every="auto", checkpoint_seconds=1e9, loaders=1 if work.folder else 0,
            on_step=on_step,
        )  # fmt: skip


def reference(work: Work) -> Turns:
    """torchvision's loop, a turn a step."""
    accumulation = work.batch // work.microbatch

    def body(pause: Pause) -> None:
        torch.manual_seed(0)
        model: nn.Module = make_model(work.model, CLASSES)
        # As its `--opt sgd_nesterov` makes it.
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4, nesterov=True)

        def taking_turns(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
            for step in itertools.count():
                pause()
                for batch in itertools.islice(batches, accumulation):
                    assert len(batch[0]) == work.microbatch, step
                    yield batch

        def run(batches: Iterator[Any]) -> None:
            train_one_epoch(
                model, nn.CrossEntropyLoss(label_smoothing=0.0), optimizer, taking_turns(batches), CPU, 0,
                accumulation=accumulation, num_batches=10**6, file=io.StringIO(),
            )  # fmt: skip

        if work.folder is None:
            images, labels = pictures(work, 8 * work.batch).tensors
            parts = zip(images.split(work.microbatch), labels.split(work.microbatch), strict=True)
            run(itertools.cycle(list(parts)))
        else:
            batches = reference_loader(work.folder, "pil", batch=work.batch, loaders=1)
            with batches() as arriving:
                run(arriving)

    return Turns(body)


def compare(work: Work, *, pairs: int) -> dict[str, Any]:
    """Images a second of ours over the reference's, by either clock: [median, low, high]; and the parts it is made of.

    Where the noise scale is measured, one step in N costs what a measured step costs and the others what an unmeasured
    one does, N being the cadence that the monitor came to.
    """
    with tempfile.TemporaryDirectory() as out:
        ours, theirs = Ours(work, Path(out)), reference(work)
        ours.step(), theirs()
        taken, found = 1, list[tuple[bool, Seconds, Seconds]]()
        for pair in range(2 * pairs if work.measured else pairs):
            if work.measured and pair == pairs:  # the rest of the steps that "auto" measures before it decides
                for _ in range(WARMUP + 1 - taken):
                    ours.step()
            measured = ours.monitor is not None and ours.monitor.measuring
            if pair % 2 == 0:
                mine, other = ours.step(), theirs()
            else:
                other, mine = theirs(), ours.step()
            taken += 1
            found.append((measured, mine, other))
        every = ours.monitor.every if ours.monitor is not None else None
        ours.step.close()
        theirs.close()
    said: dict[str, Any] = {"cadence": every}
    for clock in ("cpu", "wall"):
        ratios = {
            kind: [getattr(mine, clock) / getattr(other, clock) for measured, mine, other in found if measured == kind]
            for kind in (False, True)
        }
        middle, low, high = summary(ratios[False] or ratios[True])
        if work.measured:
            measured_ratio = summary(ratios[True])[0]
            said[f"{clock}, unmeasured and measured steps"] = [round(1 / middle, 4), round(1 / measured_ratio, 4)]
            extra = max(0.0, measured_ratio - middle) / every
            middle, low, high = middle + extra, low + extra, high + extra
        said[clock] = [round(1 / number, 4) for number in (middle, high, low)]
        seconds = statistics.median(getattr(other, clock) for _, _, other in found)
        said[f"reference images per {clock} second"] = round(work.batch / seconds, 2)
    return said


def summary(ratios: list[float]) -> tuple[float, float, float]:
    """Median with the harness's interval of it."""
    ratios = sorted(ratios)
    skip = max(0, math.floor(len(ratios) / 2 - 1.96 * math.sqrt(len(ratios)) / 2) - 1)
    return statistics.median(ratios), ratios[skip], ratios[-1 - skip]


def main() -> None:
    """Measure each work in one run."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    works = [
        Work(model="resnet50", size=64, batch=16, microbatch=8),
        Work(model="resnet18", size=224, batch=8, microbatch=4),
    ]
    with tempfile.TemporaryDirectory() as name:
        if not options.quick:  # the quick run keeps the two that carry the monitor
            works += [replace(work, microbatch=work.batch) for work in works]
            folder = Path(name) / "pictures"
            folder.mkdir()
            cut_pictures(sorted(Path(sklearn.datasets.__file__).parent.glob("images/*.jpg")), folder, each=100)
            works.append(replace(works[-1], folder=folder))
        value: dict[str, Any] = {}
        for work in works:
            value[str(work)] = compare(work, pairs=3 if options.quick else 15)
            print(f"{work}: {value[str(work)]}", flush=True)
    # Loaders work in other processes: there the wall clock is the only one.
    clocks = {str(work): "wall" if work.folder else "cpu" for work in works}
    reached = {work: value[work][clock] for work, clock in clocks.items()}
    claim(
        "`largebatch train` sees at least as many images a second as torchvision's reference training loop",
        value=reached,
        goal=f">= {GOAL}",
        holds=all(ratio[0] >= GOAL for ratio in reached.values()),
        peers={f"torchvision {torchvision.__version__} references/classification/train.py": value},
        how={
            "clock": clocks,
            "method": "median of paired, interleaved ratios of step time, inverted, with its 95 % interval; with the "
            "noise scale: unmeasured + (measured - unmeasured) / cadence",
            "pairs": 3 if options.quick else 15,
            "batch and microbatch": {str(work): [work.batch, work.microbatch] for work in works},
        },
    )


if __name__ == "__main__":
    main()
