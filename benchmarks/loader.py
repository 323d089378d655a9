"""Does the input side feed a step 1.3 times as fast as torchvision's reference loader, on real JPEGs?

Work: pictures of 500 x 375 pixels, quality 90, cut from scikit-learn's two photographs and, where they were fetched
(`scripts/fetch_data.sh photographs`), 27 more, to batches of 32 crops of 224 pixels, random in place, size and shape,
mirrored in half of the cases, normalised. The reference is torchvision's ImageFolder with the transforms of its
references/classification preset (Pillow backend, its default) in a DataLoader; the preset's tensor backend is a second
peer. All have two loader processes, of one thread each; the pictures are in the page cache.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import sklearn.datasets
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder as ReferenceFolder

from _harness import ROOT, Ratio, arguments, claim
from largebatch.tasks.digits import load as digits
from largebatch.tasks.image_folder import ImageFolder
from largebatch.tasks.pictures import MEAN, STD
from largebatch.train.feed import Feed

GOAL = 1.3
BATCH, SIZE, LOADERS = 32, 224, 2
Batches = Callable[[], contextlib.AbstractContextManager[Iterator[Any]]]
"""Starts loaders; gives batches of normalised images and labels without end."""


def cut_pictures(photographs: list[Path], folder: Path, *, each: int) -> float:
    """Write `each` parts of every photograph as folder/CLASS/N.jpg; returns their mean size in bytes."""
    chance, sizes = random.Random(0), []
    for path in photographs:
        photograph = Image.open(path).convert("RGB")
        (folder / path.stem).mkdir(parents=True)
        whole = min(photograph.width / 4, photograph.height / 3)
        for number in range(each):
            side = whole * chance.uniform(0.4, 1.0)
            left, top = chance.uniform(0, photograph.width - 4 * side), chance.uniform(0, photograph.height - 3 * side)
            box = (left, top, left + 4 * side, top + 3 * side)
            file = folder / path.stem / f"{number}.jpg"
            photograph.resize((500, 375), Image.Resampling.LANCZOS, box=box, reducing_gap=2.0).save(file, quality=90)
            sizes.append(file.stat().st_size)
    return statistics.mean(sizes)


def reference(folder: Path, backend: str, *, batch: int = BATCH, loaders: int = LOADERS) -> Batches:
    """torchvision's, as references/classification/presets.py of its repository makes it."""
    steps: list[Any] = [transforms.PILToTensor()] if backend == "tensor" else []
    steps += [transforms.RandomResizedCrop(SIZE, antialias=True), transforms.RandomHorizontalFlip(0.5)]
    steps += [transforms.PILToTensor()] if backend == "pil" else []
    steps += [transforms.ConvertImageDtype(torch.float), transforms.Normalize(MEAN, STD)]
    data = ReferenceFolder(str(folder), transforms.Compose(steps))

    @contextlib.contextmanager
    def batches() -> Iterator[Iterator[Any]]:
        # One shuffle after the other without an end, so that no new processes are started while time is taken.
        sampler = RandomSampler(data, num_samples=10**6)
        yield iter(DataLoader(data, batch_size=batch, sampler=sampler, num_workers=loaders))

    return batches


def subject(folder: Path) -> Batches:
    """Ours, through the feed of the training loop."""
    task = replace(digits(), train=ImageFolder(folder, size=SIZE))

    @contextlib.contextmanager
    def batches() -> Iterator[Iterator[Any]]:
        feed = Feed(task, seed=0, batch=BATCH, microbatch=BATCH, start=0, device=torch.device("cpu"), loaders=LOADERS)
        try:
            yield (feed.step()[0] for _ in itertools.count())
        finally:
            feed.close()

    return batches


def seconds_per_batch(batches: Batches, num_batches: int) -> float:
    """From the first batch's arrival, when all loaders are at work, to that of the last."""
    with batches() as arriving:
        images, labels = next(arriving)
        assert images.shape == (BATCH, 3, SIZE, SIZE) and images.dtype == torch.float32 and len(labels) == BATCH
        start = time.perf_counter()
        for _ in range(num_batches):
            next(arriving)
        return (time.perf_counter() - start) / num_batches


def speedups(
    peers: dict[str, Batches], ours: Batches, *, rounds: int, num_batches: int
) -> tuple[dict[str, Ratio], float]:
    """Each peer's time over ours, in interleaved rounds of changing order, and our images a second (median)."""
    subjects = {"ours": ours, **peers}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds):
        names = list(subjects)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            times[name].append(seconds_per_batch(subjects[name], num_batches))
    skip = max(0, math.floor(rounds / 2 - 1.96 * math.sqrt(rounds) / 2) - 1)  # the harness's interval of a median
    found: dict[str, Ratio] = {}
    for name in peers:
        ratios = sorted(theirs / mine for theirs, mine in zip(times[name], times["ours"], strict=True))
        found[name] = Ratio(statistics.median(ratios), ratios[skip], ratios[-1 - skip])
    return found, BATCH / statistics.median(times["ours"])


def main() -> None:
    """Measure all in one run."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    fetched = Path(os.environ.get("DATA_DIR") or os.environ.get("LARGEBATCH_DATA") or ROOT / "data") / "photographs"
    photographs = [*Path(sklearn.datasets.__file__).parent.glob("images/*.jpg"), *fetched.glob("*.jpg")]
    rounds, num_batches, num_pictures = (5, 6, 128) if options.quick else (15, 8, 512)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mean_size = cut_pictures(sorted(photographs), folder, each=math.ceil(num_pictures / len(photographs)))
        print(f"{len(list(folder.glob('*/*')))} pictures of {mean_size / 1e3:.0f} kB on average", flush=True)
        peers = {backend: reference(folder, backend) for backend in ("pil", "tensor")}
        found, rate = speedups(peers, subject(folder), rounds=rounds, num_batches=num_batches)
    claim(
        "the feed gives at least 1.3 times the images per second of torchvision's reference ImageFolder loader",
        value=[round(part, 3) for part in found["pil"]],
        goal=f">= {GOAL}",
        holds=found["pil"].median >= GOAL,
        peers={
            f"torchvision {torchvision.__version__} references/classification": {
                "images per second": {"largebatch": round(rate), "reference": round(rate / found["pil"].median)},
                "speedup over the preset's tensor backend": [round(part, 3) for part in found["tensor"]],
            }
        },
        how={
            "method": "median of paired, interleaved ratios of the time for a batch with its 95 % interval",
            "rounds": rounds,
            "work": f"{num_batches} batches of {BATCH} a round, pictures of {mean_size / 1e3:.0f} kB on average",
            "photographs": len(photographs),
        },
    )


if __name__ == "__main__":
    main()
