"""A tiny COCO folder that a test writes: rectangles on noise, whose masks and boxes are known to the pixel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Rectangle = tuple[int, int, int, int, int]
"""x, y, width, height, category id."""

CATEGORIES = (3, 7, 90)
"""With gaps, as COCO's are."""


def polygon(x: int, y: int, width: int, height: int) -> list[list[int]]:
    return [[x, y, x + width, y, x + width, y + height, x, y + height]]


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """COCO's uncompressed run lengths, by hand: columns first, beginning with how many are 0."""
    counts, current, length = [], 0, 0
    for value in mask.astype(int).flatten(order="F").tolist():
        if value != current:
            counts.append(length)
            current, length = value, 0
        length += 1
    return {"size": list(mask.shape), "counts": [*counts, length]}


def content(pictures: list[list[Rectangle]], width: int = 64, height: int = 48) -> dict[str, Any]:
    """The annotation file of pictures that hold these rectangles; every second object has run lengths."""
    images, annotations = [], []
    for number, rectangles in enumerate(pictures, start=1):
        images.append({"id": 10 * number, "file_name": f"{number:03}.png", "width": width, "height": height})
        for x, y, w, h, category in rectangles:
            mask = np.zeros((height, width), bool)
            mask[y : y + h, x : x + w] = True
            annotations.append({
                "id": len(annotations) + 1, "image_id": 10 * number, "category_id": category, "bbox": [x, y, w, h],
                "area": w * h, "iscrowd": 0,
                "segmentation": run_lengths(mask) if len(annotations) % 2 else polygon(x, y, w, h),
            })  # fmt: skip
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": f"kind{number}"} for number in CATEGORIES],
    }


COLOURS = {3: (250, 40, 40), 7: (40, 250, 40), 90: (40, 40, 250)}


def write_half(root: Path, half: str, pictures: list[list[Rectangle]], width: int = 64, height: int = 48) -> None:
    """Write pictures and annotations of one half below `root`."""
    (root / half).mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    for number, rectangles in enumerate(pictures, start=1):
        pixels = np.random.default_rng(number).integers(0, 60, (height, width, 3), dtype=np.uint8)
        for x, y, w, h, category in rectangles:
            pixels[y : y + h, x : x + w] = COLOURS[category]
        Image.fromarray(pixels).save(root / half / f"{number:03}.png")
    write_annotations(root, half, content(pictures, width, height))


def write_annotations(root: Path, half: str, annotations: dict[str, Any]) -> None:
    (root / "annotations" / f"instances_{half}.json").write_text(json.dumps(annotations))


def random_pictures(num: int, seed: int = 0, width: int = 64, height: int = 48) -> list[list[Rectangle]]:
    """Pictures with one or two rectangles that do not touch: one in each half."""
    random = np.random.default_rng(seed)
    pictures: list[list[Rectangle]] = []
    for _ in range(num):
        rectangles: list[Rectangle] = []
        for left in range(0, width, width // 2)[: random.integers(1, 3)]:
            w, h = (int(random.integers(12, limit)) for limit in (width // 2 - 4, height - 12))
            x, y = left + int(random.integers(1, width // 2 - w)), int(random.integers(1, height - h))
            rectangles.append((x, y, w, h, int(random.choice(CATEGORIES))))
        pictures.append(rectangles)
    return pictures


def write_folder(root: Path, num_train: int = 36, num_held_out: int = 6) -> Path:
    """Both halves of random pictures."""
    write_half(root, "train2017", random_pictures(num_train, seed=1))
    write_half(root, "val2017", random_pictures(num_held_out, seed=2))
    return root
