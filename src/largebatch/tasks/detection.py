"""Can a Mask R-CNN find and outline the objects of COCO, and at which batch is it trained?

The losses of a detector are means over regions that are sampled inside a forward, so the microbatch is part of the
loss's definition, as batch norm's n is. This task's normalisation: `loss` returns the microbatch's own loss times its
pictures. The step's loss is then the mean over pictures of the losses of their microbatches, for any accumulation and
any number of workers, as long as the microbatch is kept (2 pictures, as on each GPU of Goyal 2017, sec. 5.4).
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from largebatch.errors import DataError
from largebatch.recipe.recipe import Recipe
from largebatch.tasks.coco import HALVES, Batch, CocoSplit
from largebatch.tasks.detection_ap import average_precision
from largebatch.tasks.detection_backbone import read_weights
from largebatch.tasks.detection_model import DetectorShape, Norm, in_mode, make_detector
from largebatch.tasks.files import places
from largebatch.tasks.task import Task

logger = logging.getLogger(__name__)

NAME = "detection"
MICROBATCH = 2
"""Pictures in one forward: part of the loss."""
_UNITS, _DECAY = 160_000 * 16, 120_000 / 160_000
_COMMANDS = [
    "https://cocodataset.org/#download (train2017.zip, val2017.zip, annotations_trainval2017.zip, side by side)"
]


def table_3b_recipe(num_pictures: int) -> Recipe:
    """The schedule of Goyal's Table 3b: 160,000 steps of 16 pictures at 0.02, 1,280,000 of 2 at 0.0025.

    A tenth of the rate after 120,000 of the 160,000 steps: He 2017 (Mask R-CNN), sec. 3.1, whose hyper-parameters the
    table is made with, as are the momentum of 0.9 (plain) and the weight decay of 1e-4. A recipe counts whole epochs:
    for COCO's 117,266 pictures these are 22, which is 161,241 steps. Above 16 pictures, where neither paper goes, the
    warmup is the same share of the run as Goyal's 5 of 90 epochs.

    Args:
        num_pictures: training pictures, >= 1.

    >>> recipe = table_3b_recipe(117_266)
    >>> [(batch, round(recipe.resolve(batch, 117_266).lr, 5)) for batch in (2, 4, 8, 16)]
    [(2, 0.0025), (4, 0.005), (8, 0.01), (16, 0.02)]
    """
    epochs = max(1, round(_UNITS / num_pictures))
    return Recipe(
        reference_batch=16, reference_lr=0.02, epochs=epochs, decay_epochs=(_DECAY * epochs,), momentum=0.9,
        nesterov=False, weight_decay=1e-4, warmup_epochs=epochs * 5 / 90, shown_up_to=16,
    )  # fmt: skip


def load(data: Path | None = None, backbone: Path | None = None, *, norm: Norm | None = None) -> Task:
    """Make the task from a COCO folder: Mask R-CNN, ResNet-50 with a feature pyramid, boxes and masks.

    Args:
        data: the folder with train2017, val2017 and annotations; None looks in the usual places.
        backbone: weights of a ResNet-50 trained to classify: `model.pt` of `largebatch train imagenet`, or
            torchvision's state dict. None starts from random weights, with group norm.
        norm: "frozen" (batch norm with the backbone's statistics) or "group"; None takes what fits the backbone.

    Returns:
        The task. Its error is the share of objects, drawn or found, that have no partner (see `errors`); average
        precision is `detection_ap.average_precision`.

    Raises:
        DataError: the folder or its annotations are not what they should be.
        CheckpointError: the backbone's file cannot be read.
        ConfigError: the backbone is of another architecture.
        MissingExtraError: torchvision or pycocotools is not installed.

    Source: Goyal 2017, sec. 5.4, Table 3; He 2017 (Mask R-CNN), sec. 3.1.
    """
    train, held_out = read_halves("coco", data, _COMMANDS)
    if backbone is None:
        logger.warning(
            "no backbone is given: the detector starts from random weights, with group norm. Goyal 2017, Table 3, "
            "starts from a ResNet-50 trained on ImageNet: --backbone CHECKPOINT."
        )
    recipe = table_3b_recipe(len(train))
    return make_task(
        NAME, train, held_out, DetectorShape(), recipe, backbone, norm=norm, loaders=4, num_goal_examples=64
    )


def read_halves(folder: str, data: Path | None, commands: list[str]) -> tuple[CocoSplit, CocoSplit]:
    """Training and held-out half of `data`, or of the first `folder` in the usual places. Raises DataError."""
    folders = [data] if data is not None else [place for place in places(folder, folder, None) if place.name == folder]
    for root in folders:
        if (root / "annotations").is_dir():
            halves = [
                CocoSplit(root / half, root / "annotations" / f"instances_{half}.json", only_annotated=index == 0)
                for index, half in enumerate(HALVES)
            ]
            if halves[0].category_ids != halves[1].category_ids:
                raise DataError(
                    f"the two annotation files in {root / 'annotations'} list different categories "
                    f"({len(halves[0].category_ids)} and {len(halves[1].category_ids)}). Use files of one release."
                )
            return halves[0], halves[1]
    looked = ", ".join(str(root.absolute()) for root in folders)
    raise DataError(
        f"no COCO folder in {looked}: it has train2017, val2017 and annotations. Get it by: "
        f"{'; '.join(commands)}. Or give its directory with --data."
    )


def make_task(
    name: str, train: CocoSplit, held_out: CocoSplit, shape: DetectorShape, recipe: Recipe, backbone: Path | None,
    *, norm: Norm | None = None, loaders: int = 0, num_goal_examples: int = 64, microbatch: int = MICROBATCH,
) -> Task:  # fmt: skip
    """A detection task over two halves; the backbone is read and tried once, here, and copied at every fresh start."""
    weights = read_weights(backbone) if backbone is not None else None
    model = partial(make_detector, shape, len(train.category_ids), weights=weights, source=backbone or "", norm=norm)
    with torch.random.fork_rng(devices=[]):
        model()  # a wrong architecture, or a missing package, is said before a run begins
    return Task(
        name=name, train=train, held_out=held_out, model=model, loss=loss, errors=errors, recipe=recipe, augment=flip,
        microbatch=microbatch, max_microbatch=microbatch, measures=average_precision, loaders=loaders,
        num_goal_examples=num_goal_examples,
    )  # fmt: skip


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Pictures of the microbatch times its loss: the sum of torchvision's five, each a mean over sampled regions.

    In evaluation mode (goals, held-out loss) the regions are sampled from a fixed seed, so that the loss is a function
    of the weights, and the generator is left as it was.
    """
    pictures, targets = batch
    with contextlib.ExitStack() as stack:
        if not model.training:
            device = pictures[0].device
            stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
            torch.manual_seed(0)
        stack.enter_context(in_mode(model, training=True))
        parts = model(pictures, targets)
    return len(pictures) * torch.stack(list(parts.values())).sum()


SCORE = IOU = 0.5
"""From which score a detection counts, and from which overlap of boxes it has found an object."""


@torch.no_grad()
def errors(model: nn.Module, batch: Batch) -> Tensor:
    """Sum over pictures of the share of objects without a partner, among those that are there and those found.

    A detection with a score of at least 0.5 is the partner of the object of its class whose box it overlaps most, by
    0.5 or more, best score first, each object once. With h partners, m objects missed and f detections too many a
    picture's error is (m + f) / (h + m + f): 0 is perfect, and neither silence nor finding everything everywhere is
    rewarded. A picture without objects in which none is found has no error.
    """
    pictures, targets = batch
    with in_mode(model, training=False):
        found = model(pictures)
    shares = [_share_wrong(one, target) for one, target in zip(found, targets, strict=True)]
    return torch.tensor(sum(shares), dtype=torch.float32, device=pictures[0].device)


def _share_wrong(found: dict[str, Tensor], target: dict[str, Tensor]) -> float:
    from torchvision.ops import box_iou

    sure = found["scores"] >= SCORE
    boxes, labels = found["boxes"][sure], found["labels"][sure]
    order = found["scores"][sure].argsort(descending=True, stable=True)
    overlaps = box_iou(boxes, target["boxes"])
    overlaps[labels.unsqueeze(1) != target["labels"].unsqueeze(0)] = 0
    taken: set[int] = set()
    for row in overlaps[order].tolist():
        free = [(overlap, -index) for index, overlap in enumerate(row) if index not in taken and overlap >= IOU]
        if free:
            taken.add(-max(free)[1])
    num_all = len(boxes) + len(target["boxes"]) - len(taken)
    return (num_all - len(taken)) / num_all if num_all else 0.0


def flip(batch: Batch, draws: Tensor) -> Batch:
    """Mirror every second picture, on average, with its boxes and masks: the papers' only augmentation.

    Source: He 2017 (Mask R-CNN), sec. 3.1; Goyal 2017, sec. 5.4.
    """
    pictures, targets = list(batch[0]), list(batch[1])
    for index in (draws[:, 0] < 0.5).nonzero().flatten().tolist():
        width = pictures[index].shape[-1]
        x1, y1, x2, y2 = targets[index]["boxes"].unbind(1)
        boxes = torch.stack((width - x2, y1, width - x1, y2), dim=1)
        pictures[index] = pictures[index].flip(-1)
        targets[index] = {**targets[index], "boxes": boxes, "masks": targets[index]["masks"].flip(-1)}
    return pictures, targets
