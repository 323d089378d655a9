"""Which colour pictures are there? Emoji of two vendors, 3,812 of them, in 9 classes: their category.

    mkdir -p data/emoji/google data/emoji/twitter
    for vendor in google twitter; do
        npm pack emoji-datasource-$vendor@16.0.0
        tar -xzf emoji-datasource-$vendor-16.0.0.tgz -C data/emoji/$vendor
    done

Both vendors' drawings of one emoji are on the same side of the split, so that no test picture has its like in training.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from largebatch.tasks.splits import standardise

VENDORS = ("google", "twitter")
LEFT_OUT = "Component"
"""Hair and skin alone: 5 emoji."""
WIDTH = 28
TEST_EVERY = 5


def load(root: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training pictures, labels, test pictures, labels; pictures standardised, shape (num_examples, 3, 28, 28)."""
    entries = json.loads((root / "google" / "package" / "emoji.json").read_text())
    kept = [entry for entry in entries if entry["category"] != LEFT_OUT]
    classes = sorted({entry["category"] for entry in kept})
    test_codes = {entry["unified"] for entry in sorted(kept, key=lambda e: e["unified"])[::TEST_EVERY]}
    images: dict[bool, list[np.ndarray]] = {False: [], True: []}
    labels: dict[bool, list[int]] = {False: [], True: []}
    for vendor in VENDORS:
        for entry in kept:
            is_test = entry["unified"] in test_codes
            images[is_test].append(_read(root / vendor / "package" / "img" / vendor / "64" / entry["image"]))
            labels[is_test].append(classes.index(entry["category"]))
    train, test = (torch.from_numpy(np.stack(images[is_test])).permute(0, 3, 1, 2) for is_test in (False, True))
    train, test = standardise(train, test)
    return train, torch.tensor(labels[False]), test, torch.tensor(labels[True])


def _read(path: Path) -> np.ndarray:
    """One picture on white, uint8, shape (28, 28, 3)."""
    with Image.open(path) as picture:
        drawn = picture.convert("RGBA")
    white = Image.new("RGBA", drawn.size, "white")
    return np.asarray(Image.alpha_composite(white, drawn).convert("RGB").resize((WIDTH, WIDTH), Image.Resampling.BOX))
