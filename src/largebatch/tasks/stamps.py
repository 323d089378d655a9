"""Can a small Mask R-CNN find stamps that were pasted on photographs? A stand-in for COCO, under its own name.

scripts/make_stamps.py builds the pictures: 128 x 128 patches of real photographs with 1 to 4 stamps of Tux Paint
(drawings and cut-out photographs with an alpha channel) in 4 classes, masks exact to the pixel. Held-out pictures have
stamps and photographs of their own: none of either is seen in training. The detector scales them to 96 pixels, where a
step costs half.
"""

from __future__ import annotations

from pathlib import Path

from largebatch.recipe.recipe import Recipe
from largebatch.tasks.detection import make_task, read_halves
from largebatch.tasks.detection_model import DetectorShape
from largebatch.tasks.task import Task

NAME = "stamps"
_COMMANDS = ["scripts/fetch_data.sh stamps"]

SHAPE = DetectorShape(
    resnet="resnet18", min_size=96, max_size=96, anchor_sizes=(16, 24, 36, 54, 80), fpn_channels=64,
    box_features=128, mask_channels=(64, 64), proposals=200, anchors_sampled=64, rois_sampled=64, detections=20,
)  # fmt: skip


def load(data: Path | None = None, backbone: Path | None = None) -> Task:
    """Make the task: a ResNet-18 with a feature pyramid and small heads, 12 million weights.

    Args:
        data: the folder that scripts/make_stamps.py wrote; None looks in the usual places.
        backbone: weights of a ResNet-18 trained to classify; None starts from random ones, with group norm.

    Raises:
        DataError: the folder is missing or not what it should be.
        CheckpointError: the backbone's file cannot be read.
        ConfigError: the backbone is of another architecture.
    """
    train, held_out = read_halves(NAME, data, _COMMANDS)
    recipe = Recipe(
        reference_batch=4, reference_lr=0.01, epochs=6, decay_epochs=(4.5,), momentum=0.9, nesterov=False,
        weight_decay=1e-4, warmup_epochs=0.5,
    )  # fmt: skip
    return make_task(NAME, train, held_out, SHAPE, recipe, backbone)
