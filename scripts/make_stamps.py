"""Pastes stamps on photographs: a COCO folder with masks exact to the pixel, and class folders to train a backbone on.

    python scripts/make_stamps.py STAMPS PHOTOGRAPHS OUT [--seed 0] [--train 1600] [--held-out 300]

OUT gets train2017, val2017 and annotations (128 x 128 pixels, 1 to 4 objects of 4 classes), and classes/train and
classes/val with a folder for each of 8 classes (64 x 64 pixels, one stamp each, 4 and 2 times as many pictures).

STAMPS holds Tux Paint's stamps (usr/share/tuxpaint/stamps of the Debian package tuxpaint-stamps-default), PHOTOGRAPHS
JPEG files (usr/share/backgrounds/mate/nature of mate-backgrounds). Every fifth stamp of a class and every fourth
photograph, in the order of their names, is for held-out pictures alone. A picture is a function of (seed, half, index):
the same files give the same pictures with the same Pillow and numpy, however many are made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as run_lengths

CLASSES = ("animals/mammals", "food/fruit", "town/houses", "town/roadsigns")
"""Folders of stamps with objects to detect; a class is called as its folder."""
MORE_CLASSES = (*CLASSES, "animals/birds", "animals/insects", "food/vegetables", "plants/flowers")
"""Those of the class folders."""
SIDE = 128
"""Pixels of a picture's side; half of it in the class folders, and then the stamps are half as large too."""
NUM_OBJECTS = (1, 4)
LONG_SIDE = (36, 84)
"""Pixels of a stamp's longer side, uniform in between."""
PATCH = (0.25, 0.9)
"""Side of the photograph's patch, as a share of its shorter side."""
MIN_VISIBLE = 0.6
"""Share of every stamp that stays uncovered: a place that would cover more is drawn again."""
TRIES = 20
OPAQUE = 128
"""From which alpha (of 255) a pixel belongs to the mask."""
PHOTOGRAPH_SIDE = 640
HALVES = {"train": ("train2017", False), "held_out": ("val2017", True)}


def is_held_out(position: int, every: int) -> bool:
    return position % every == every - 1


def read_stamps(root: Path, held_out: bool, names: Sequence[str] = CLASSES) -> list[list[Image.Image]]:
    """The stamps of each class that belong to this half, cut to what is opaque."""
    classes: list[list[Image.Image]] = []
    for name in names:
        paths = sorted((root / name).rglob("*.png"))
        kept = [path for position, path in enumerate(paths) if is_held_out(position, 5) == held_out]
        if not kept:
            sys.exit(f"make_stamps.py: {root / name} holds {len(paths)} stamps, too few for two halves (5 are needed).")
        classes.append([stamp for path in kept if (stamp := _cut(Image.open(path).convert("RGBA"))) is not None])
    return classes


def _cut(stamp: Image.Image) -> Image.Image | None:
    solid = np.asarray(stamp)[..., 3] >= OPAQUE
    if not solid.any():
        return None
    rows, columns = np.flatnonzero(solid.any(1)), np.flatnonzero(solid.any(0))
    return stamp.crop((int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1))


def read_photographs(root: Path, held_out: bool) -> list[Image.Image]:
    paths = sorted(path for ending in ("*.jpg", "*.jpeg") for path in root.glob(ending))
    kept = [path for position, path in enumerate(paths) if is_held_out(position, 4) == held_out]
    if not kept:
        sys.exit(f"make_stamps.py: {root} holds {len(paths)} JPEG files, too few for two halves (4 are needed).")
    photographs = [Image.open(path).convert("RGB") for path in kept]
    for photograph in photographs:
        shrink = PHOTOGRAPH_SIDE / min(photograph.size)
        photograph.thumbnail([round(side * shrink) for side in photograph.size], Image.Resampling.BOX)
    return photographs


def compose(
    stamps: list[list[Image.Image]],
    photographs: list[Image.Image],
    random: np.random.Generator,
    num_objects: tuple[int, int] = NUM_OBJECTS,
) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """One picture, uint8 (128, 128, 3), and its objects: class from 0 and mask, bool (128, 128), of what is seen."""
    canvas = _patch(photographs, random)
    objects: list[tuple[int, np.ndarray, int]] = []
    for _ in range(int(random.integers(num_objects[0], num_objects[1] + 1))):
        kind = int(random.integers(len(stamps)))
        stamp = _scaled(stamps[kind][int(random.integers(len(stamps[kind])))], random)
        height, width = stamp.shape[:2]
        for _ in range(TRIES):
            top, left = (int(random.integers(SIDE - side + 1)) for side in (height, width))
            covering = np.zeros((SIDE, SIDE), dtype=bool)
            covering[top : top + height, left : left + width] = stamp[..., 3] >= OPAQUE
            left_over = [mask & ~covering for _, mask, _ in objects]
            if all(seen.sum() >= MIN_VISIBLE * whole for seen, (_, _, whole) in zip(left_over, objects, strict=True)):
                break
        else:
            continue
        objects = [(what, seen, whole) for seen, (what, _, whole) in zip(left_over, objects, strict=True)]
        objects.append((kind, covering, int(covering.sum())))
        part = canvas[top : top + height, left : left + width]
        alpha = stamp[..., 3:].astype(np.float64) / 255
        part[:] = np.rint(alpha * stamp[..., :3] + (1 - alpha) * part)
    return canvas, [(kind, mask) for kind, mask, _ in objects]


def _patch(photographs: list[Image.Image], random: np.random.Generator) -> np.ndarray:
    photograph = photographs[int(random.integers(len(photographs)))]
    side = int(random.uniform(*PATCH) * min(photograph.size))
    left, top = (int(random.integers(length - side + 1)) for length in photograph.size)
    return np.array(photograph.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + side, top + side)))


def _scaled(stamp: Image.Image, random: np.random.Generator) -> np.ndarray:
    factor = random.uniform(*LONG_SIDE) / max(stamp.size)
    size = [max(8, min(SIDE, round(side * factor))) for side in stamp.size]
    pixels = np.asarray(stamp.resize(size, Image.Resampling.BILINEAR))
    return pixels[:, ::-1] if random.random() < 0.5 else pixels


def annotation(kind: int, mask: np.ndarray) -> dict[str, Any]:
    encoded: Any = run_lengths.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {
        "category_id": kind + 1,
        "bbox": [float(number) for number in run_lengths.toBbox(encoded)],
        "area": int(mask.sum()),
        "iscrowd": 0,
        "segmentation": {"size": [int(side) for side in encoded["size"]], "counts": encoded["counts"].decode()},
    }


def make(stamps_root: Path, photographs_root: Path, out: Path, half: str, count: int, seed: int) -> None:
    """Write one half: pictures as JPEG, and their annotations."""
    folder, held_out = HALVES[half]
    stamps, photographs = read_stamps(stamps_root, held_out), read_photographs(photographs_root, held_out)
    (out / folder).mkdir(parents=True)
    (out / "annotations").mkdir(exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(count):
        pixels, objects = compose(stamps, photographs, np.random.default_rng([seed, int(held_out), index]))
        name = f"{index:06}.jpg"
        Image.fromarray(pixels).save(out / folder / name, quality=95)
        images.append({"id": index + 1, "file_name": name, "height": SIDE, "width": SIDE})
        for kind, mask in objects:
            annotations.append({"id": len(annotations) + 1, "image_id": index + 1, **annotation(kind, mask)})
    content = {
        "info": {"description": f"stamps on photographs, seed {seed}, made by scripts/make_stamps.py"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": name.split("/")[1]} for number, name in enumerate(CLASSES, start=1)],
    }
    (out / "annotations" / f"instances_{folder}.json").write_text(json.dumps(content))
    print(f"{out / folder}: {count} pictures, {len(annotations)} objects, "
          f"{sum(map(len, stamps))} stamps, {len(photographs)} photographs")  # fmt: skip


def make_classes(stamps_root: Path, photographs_root: Path, out: Path, half: str, count: int, seed: int) -> None:
    """Write one half of the class folders: picture i shows a stamp of class i modulo 8."""
    held_out = HALVES[half][1]
    stamps, photographs = read_stamps(stamps_root, held_out, MORE_CLASSES), read_photographs(photographs_root, held_out)
    folder = out / "classes" / ("val" if held_out else "train")
    names = [name.split("/")[1] for name in MORE_CLASSES]
    for name in names:
        (folder / name).mkdir(parents=True)
    for index in range(count):
        kind, random = index % len(names), np.random.default_rng([seed, 2 + int(held_out), index])
        pixels, _ = compose([stamps[kind]], photographs, random, num_objects=(1, 1))
        small = Image.fromarray(pixels).resize((SIDE // 2, SIDE // 2), Image.Resampling.BOX)
        small.save(folder / names[kind] / f"{index:06}.jpg", quality=95)
    print(f"{folder}: {count} pictures of {len(names)} classes, {sum(map(len, stamps))} stamps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("stamps", "photographs", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=1600)
    parser.add_argument("--held-out", type=int, default=300)
    asked = parser.parse_args()
    if asked.out.exists() and any(asked.out.iterdir()):
        sys.exit(f"make_stamps.py: {asked.out} is there and not empty; move it away first.")
    for half, count in (("train", asked.train), ("held_out", asked.held_out)):
        make(asked.stamps, asked.photographs, asked.out, half, count, asked.seed)
        times = 2 if half == "held_out" else 4
        make_classes(asked.stamps, asked.photographs, asked.out, half, times * count, asked.seed)


if __name__ == "__main__":
    main()
