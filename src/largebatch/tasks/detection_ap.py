"""How good is a detector, in COCO's average precision of boxes and masks?

Detections are plain lists, each picture's made by the worker it fell to: joined, they score as on one worker.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from largebatch.tasks.coco import CocoSplit
from largebatch.tasks.detection_model import in_mode

AT_ONCE = 2
"""Pictures in one forward; it changes padding only."""
MASK = 0.5
"""From which probability a pixel belongs to a mask."""


def average_precision(model: nn.Module, split: CocoSplit) -> dict[str, float]:
    """COCO's average precision of a detector on a whole split.

    Args:
        model: a torchvision detector with masks, in any mode; it is left in it.
        split: the pictures and what is on them.

    Returns:
        `box_ap`, `mask_ap` (mean over IoU 0.50 to 0.95 and classes), `box_ap50`, `mask_ap50`, `box_ap75`,
        `mask_ap75`, each in [0, 1].

    Source: Lin 2014 (COCO), as pycocotools computes it; Goyal 2017, Table 3.
    """
    return score(split, detections(model, split, range(len(split))))


@torch.no_grad()
def detections(model: nn.Module, split: CocoSplit, indices: Sequence[int]) -> list[dict[str, Any]]:
    """What the model finds in some of a split's pictures, in the form of COCO's results.

    Args:
        model: a torchvision detector with masks.
        split: the pictures.
        indices: which of them, into `split`: a worker's share, say `range(rank, len(split), world_size)`.

    Returns:
        A dict for each detection: image_id, category_id, score, bbox (x, y, width, height), segmentation (run
        lengths). Plain values, so they travel by `all_gather_object`, and their order over pictures is of no account.
    """
    device = next(model.parameters()).device
    found: list[dict[str, Any]] = []
    with in_mode(model, training=False):
        for start in range(0, len(indices), AT_ONCE):
            pictures, targets = split.fetch(torch.as_tensor(indices[start : start + AT_ONCE]))
            results = model([picture.to(device) for picture in pictures])
            for target, result in zip(targets, results, strict=True):
                found += _rows(split, int(target["image_id"]), {key: value.cpu() for key, value in result.items()})
    return found


def _rows(split: CocoSplit, image_id: int, result: dict[str, Tensor]) -> list[dict[str, Any]]:
    from pycocotools import mask as run_lengths

    masks = (result["masks"][:, 0] >= MASK).to(torch.uint8).numpy()
    corners = result["boxes"].to(torch.float64)
    boxes = torch.cat((corners[:, :2], corners[:, 2:] - corners[:, :2]), dim=1).tolist()
    rows: list[dict[str, Any]] = []
    for label, sure, box, mask in zip(result["labels"].tolist(), result["scores"].tolist(), boxes, masks, strict=True):
        encoded: Any = run_lengths.encode(np.asfortranarray(mask))
        rows.append({
            "image_id": image_id, "category_id": split.category_ids[label - 1], "score": sure, "bbox": box,
            "segmentation": {"size": [int(side) for side in encoded["size"]], "counts": encoded["counts"]},
        })  # fmt: skip
    return rows


def score(split: CocoSplit, found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Average precision of detections over a split, as `average_precision` returns it; none at all scores 0."""
    from pycocotools import cocoeval

    judging: Any = cocoeval.COCOeval

    scores: dict[str, float] = {}
    for kind, part, without in (("box", "bbox", "segmentation"), ("mask", "segm", "bbox")):
        values = (0.0, 0.0, 0.0)
        if found:
            # A mask's area is its own, not its box's: pycocotools takes the box's where there is one.
            results = [{key: value for key, value in row.items() if key != without} for row in found]
            with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
                judge = judging(split.coco, split.coco.loadRes(copy.deepcopy(results)), part)
                judge.params.imgIds = list(split.image_ids)
                judge.evaluate()
                judge.accumulate()
                judge.summarize()
            values = judge.stats[:3]
        for name, value in zip(("ap", "ap50", "ap75"), values, strict=True):
            scores[f"{kind}_{name}"] = float(value)
    return scores
