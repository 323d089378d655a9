"""Which pictures and which objects does a COCO folder hold?

A COCO folder has `train2017/` and `val2017/` with the pictures and `annotations/instances_train2017.json`,
`annotations/instances_val2017.json` with the objects: boxes and masks (polygons or run lengths), read by pycocotools.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from largebatch.errors import DataError, MissingExtraError

logger = logging.getLogger(__name__)

HALVES = ("train2017", "val2017")
"""The folders of training and of held-out pictures."""

MAX_FLAT_BOXES = 1e-3
"""Share of boxes without area that are left out with a warning, as torchvision's and Detectron's loaders leave out the
two of COCO's 860,001 training boxes; more of them mean that the boxes are written in another form."""

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]
"""Pictures, float32 in [0, 1], shape (3, height, width) each, and for each the dict that torchvision's models take."""


class CocoSplit:
    """Half of a COCO folder: pictures that are decoded when they are fetched, and their objects.

    Crowds (`iscrowd`) are no objects of training; pycocotools leaves what lies on them out of an evaluation.

    Args:
        pictures: the folder with the picture files.
        annotations: the JSON file that says what is on them.
        only_annotated: leave pictures without an object out, as is usual in training (a picture without one teaches
            no box); a held-out half keeps them.

    Raises:
        DataError: the annotations are missing, broken or empty, name pictures that are not there, or have boxes
            without area.
        MissingExtraError: pycocotools is not installed.
    """

    def __init__(self, pictures: Path, annotations: Path, *, only_annotated: bool = False) -> None:
        self.pictures, self.annotations = pictures, annotations
        self.coco = _read(annotations)
        ids = sorted(self.coco.cats)
        self.category_ids: tuple[int, ...] = tuple(ids)
        """COCO's number of each class; label l of a target is `category_ids[l - 1]`, and 0 is the background."""
        self.category_names: tuple[str, ...] = tuple(str(self.coco.cats[number].get("name", number)) for number in ids)
        self._label_of = {number: label for label, number in enumerate(ids, start=1)}
        _check_pictures(pictures, annotations, list(self.coco.imgs.values()))
        self._objects = _objects(annotations, self.coco)
        chosen = sorted(self.coco.imgs)
        if only_annotated:
            chosen = [number for number in chosen if self._objects.get(number)]
            if len(chosen) < len(self.coco.imgs):
                dropped = len(self.coco.imgs) - len(chosen)
                logger.info("%s: %s of %s pictures hold no object and are left out", annotations, dropped,
                            len(self.coco.imgs))  # fmt: skip
        self.image_ids: tuple[int, ...] = tuple(chosen)
        """COCO's number of each picture, in the order of the indices."""

    def __len__(self) -> int:
        return len(self.image_ids)

    def fetch(self, indices: Tensor) -> Batch:
        """Return the pictures at `indices` and their targets.

        Returns:
            Pictures, and a dict for each: `boxes` (num_objects, 4) as x1, y1, x2, y2 in pixels, float32; `labels`
            (num_objects,), int64, from 1; `masks` (num_objects, height, width), uint8; `image_id`, int64.

        Raises:
            DataError: a file is no picture, or not of the size that its annotations were made for.
        """
        parts = [self._one(self.image_ids[index]) for index in indices.tolist()]
        return [picture for picture, _ in parts], [target for _, target in parts]

    def _one(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        entry, objects = self.coco.imgs[number], self._objects.get(number, [])
        picture = _decode(self.pictures / entry["file_name"])
        height, width = picture.shape[1:]
        if (height, width) != (entry["height"], entry["width"]):
            raise DataError(
                f"{self.pictures / entry['file_name']} has {width} x {height} pixels, but {self.annotations} was made "
                f"for {entry['width']} x {entry['height']}: its boxes and masks would not fit. Fetch the picture again."
            )
        masks = [self._mask(found) for found in objects]
        target = {
            "boxes": torch.tensor([_corners(found["bbox"], width, height) for found in objects]).reshape(-1, 4),
            "labels": torch.tensor([self._label_of[found["category_id"]] for found in objects], dtype=torch.int64),
            "masks": torch.from_numpy(np.stack(masks)) if masks else torch.zeros(0, height, width, dtype=torch.uint8),
            "image_id": torch.tensor(number),
        }
        return picture, target

    def _mask(self, found: dict[str, Any]) -> np.ndarray[Any, Any]:
        try:
            return self.coco.annToMask(found)
        except Exception as error:  # whatever pycocotools makes of it
            raise DataError(
                f"the segmentation of annotation {found['id']} in {self.annotations} is neither polygons nor run "
                f"lengths ({' '.join(str(error).split())}). Correct it or leave the annotation out."
            ) from error


def _corners(box: Sequence[float], width: int, height: int) -> list[float]:
    """COCO's x, y, width, height as x1, y1, x2, y2, cut at the picture's edges."""
    x, y, w, h = box
    return [max(x, 0.0), max(y, 0.0), min(x + w, float(width)), min(y + h, float(height))]


def _decode(path: Path) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path) as file:
            pixels = np.array(file.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as a picture ({said}). Fetch it again.") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32) / 255


def _read(path: Path) -> Any:
    """Pycocotools' index of an annotation file whose parts are what they should be."""
    try:
        from pycocotools.coco import COCO
    except ImportError as error:
        raise MissingExtraError("pycocotools", "vision", "reading COCO annotations") from error
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. A COCO folder has annotations/instances_train2017.json and "
            "annotations/instances_val2017.json; give it with --data."
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON file, or is cut short ({error}). Fetch it again.") from error
    parts: dict[str, Any] = content if isinstance(content, dict) else {}
    wrong = [key for key in _KEYS if not isinstance(parts.get(key), list)]
    if wrong:
        raise DataError(f"{path} holds no COCO annotations: it lacks the lists {', '.join(wrong)}.")
    _check_entries(path, parts)
    coco: Any = COCO()
    coco.dataset = content
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        coco.createIndex()
    return coco


_KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "categories": ("id",),
    "annotations": ("id", "image_id", "category_id", "bbox", "segmentation"),
}


def _check_entries(path: Path, parts: dict[str, Any]) -> None:
    if not any(not entry.get("iscrowd") for entry in parts["annotations"] if isinstance(entry, dict)):
        raise DataError(f"{path} has no annotations: there is nothing to detect. Use a file with annotated objects.")
    for part, keys in _KEYS.items():
        for entry in parts[part]:
            lacking = [key for key in keys if key not in entry] if isinstance(entry, dict) else ["everything"]
            if lacking:
                raise DataError(f"an entry of {part!r} in {path} lacks {', '.join(lacking)}: {str(entry)[:80]}.")
    images, categories = ({entry["id"] for entry in parts[part]} for part in ("images", "categories"))
    for key, known, what in (("image_id", images, "pictures"), ("category_id", categories, "categories")):
        strange = [entry for entry in parts["annotations"] if entry[key] not in known]
        if strange:
            raise DataError(
                f"{len(strange):,} annotations in {path} name {what} that the file does not list; the first, "
                f"{strange[0]['id']}, names {key} {strange[0][key]}. Fetch the file again, or leave them out."
            )


def _check_pictures(folder: Path, annotations: Path, entries: list[dict[str, Any]]) -> None:
    try:
        there = set(os.listdir(folder))
    except OSError as error:
        raise DataError(f"the pictures of {annotations} should be in {folder}: {error.strerror}.") from error
    gone = [entry["file_name"] for entry in entries if entry["file_name"] not in there]
    # Names with a folder in them are looked up one by one.
    gone = [name for name in gone if "/" not in name or not (folder / name).is_file()]
    if gone:
        raise DataError(
            f"{annotations} names {len(gone):,} pictures of {len(entries):,} that are not in {folder}; the first is "
            f"{gone[0]}. Fetch the pictures again."
        )


def _objects(path: Path, coco: Any) -> dict[int, list[dict[str, Any]]]:
    """The objects of each picture, in the order of the file: annotations that are no crowd and have an area."""
    objects: dict[int, list[dict[str, Any]]] = {}
    flat: list[dict[str, Any]] = []
    num = 0
    for found in coco.dataset["annotations"]:
        if found.get("iscrowd"):
            continue
        num += 1
        entry = coco.imgs[found["image_id"]]
        try:
            x1, y1, x2, y2 = _corners(found["bbox"], entry["width"], entry["height"])
        except (TypeError, ValueError):
            x1 = y1 = x2 = y2 = 0.0
        if x2 > x1 and y2 > y1 and found["segmentation"]:
            objects.setdefault(found["image_id"], []).append(found)
        else:
            flat.append(found)
    if flat:
        first = flat[0]
        where = f"annotation {first['id']} of {coco.imgs[first['image_id']]['file_name']}, bbox {first['bbox']}"
        if len(flat) > MAX_FLAT_BOXES * num:
            raise DataError(
                f"{len(flat):,} of {num:,} objects in {path} have a box without area in the picture, or no mask; the "
                f"first is {where}. Boxes are x, y, width, height in pixels: correct them or leave them out."
            )
        logger.warning("%s: %s of %s objects have no area and are left out; the first is %s", path, len(flat), num,
                       where)  # fmt: skip
    return objects
