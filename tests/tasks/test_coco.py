"""What a COCO folder holds: boxes, labels and masks to the pixel, and one sentence for everything that is wrong."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from coco_folder import random_pictures, run_lengths, write_half
from largebatch.errors import DataError, MissingExtraError
from largebatch.tasks.coco import CocoSplit

pytest.importorskip("pycocotools", reason="pip install pycocotools")


def _split(root: Path, half: str = "train2017", **options) -> CocoSplit:
    return CocoSplit(root / half, root / "annotations" / f"instances_{half}.json", **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_half(tmp_path, "train2017", [[(5, 4, 20, 10, 7), (30, 8, 12, 30, 90)], [(0, 0, 64, 48, 3)]])
    return tmp_path


def _edit(folder: Path, change) -> None:
    path = folder / "annotations" / "instances_train2017.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def test_boxes_labels_and_masks_are_those_that_were_drawn(folder: Path):
    pictures, targets = _split(folder).fetch(torch.tensor([1, 0]))
    assert [tuple(picture.shape) for picture in pictures] == [(3, 48, 64)] * 2
    first = targets[1]
    assert first["boxes"].tolist() == [[5, 4, 25, 14], [30, 8, 42, 38]]
    assert first["labels"].tolist() == [2, 3]  # 3, 7, 90 are the classes 1, 2, 3
    assert first["image_id"].item() == 10
    drawn = np.zeros((2, 48, 64), np.uint8)
    drawn[0, 4:14, 5:25] = drawn[1, 8:38, 30:42] = 1
    np.testing.assert_array_equal(first["masks"].numpy(), drawn)  # a polygon, and run lengths
    # The picture's own pixels say the same: the green of category 7 is nowhere else.
    green = (pictures[1][1] > 0.9).numpy()
    np.testing.assert_array_equal(green, drawn[0].astype(bool))
    assert targets[0]["boxes"].tolist() == [[0, 0, 64, 48]]


@given(seed=st.integers(0, 10_000))
def test_every_mask_fills_its_box_and_lies_in_the_picture(tmp_path_factory, seed: int):
    root = tmp_path_factory.mktemp("coco")
    drawn = random_pictures(2, seed)
    write_half(root, "train2017", drawn)
    _, targets = _split(root).fetch(torch.arange(2))
    for rectangles, target in zip(drawn, targets, strict=True):
        assert target["boxes"].tolist() == [[x, y, x + w, y + h] for x, y, w, h, _ in rectangles]
        for mask, (x, y, w, h, _) in zip(target["masks"], rectangles, strict=True):
            assert mask.sum() == w * h and mask[y : y + h, x : x + w].all()


def test_a_box_that_juts_out_is_cut_at_the_edge(folder: Path):
    _edit(folder, lambda found: found["annotations"][2].update(bbox=[-3, 40, 80, 20]))
    assert _split(folder).fetch(torch.tensor([1]))[1][0]["boxes"].tolist() == [[0, 40, 64, 48]]


def test_crowds_are_no_objects_and_pictures_without_one_are_left_out_of_training_alone(folder: Path):
    _edit(folder, lambda found: found["annotations"][2].update(iscrowd=1))
    assert len(_split(folder, only_annotated=True)) == 1
    whole = _split(folder)
    assert whole.image_ids == (10, 20)
    target = whole.fetch(torch.tensor([1]))[1][0]
    assert target["boxes"].shape == (0, 4) and target["masks"].shape == (0, 48, 64) and not len(target["labels"])


def test_a_missing_annotation_file_names_itself_and_what_a_folder_holds(tmp_path: Path):
    with pytest.raises(DataError, match=r"instances_train2017\.json cannot be read: No such file.*--data"):
        _split(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"images": [', r"is no JSON file, or is cut short"),
        ("[1, 2]", r"lacks the lists images, categories, annotations"),
        ('{"images": [], "categories": []}', r"lacks the lists annotations"),
        ('{"images": [], "categories": [], "annotations": []}', r"has no annotations: there is nothing to detect"),
    ],
)
def test_a_broken_annotation_file_is_one_sentence(folder: Path, text: str, said: str):
    (folder / "annotations" / "instances_train2017.json").write_text(text)
    with pytest.raises(DataError, match=said) as raised:
        _split(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("part", "key"), [("images", "height"), ("annotations", "segmentation"), ("categories", "id")])
def test_an_entry_without_a_key_is_named(folder: Path, part: str, key: str):
    _edit(folder, lambda found: found[part][0].pop(key))
    with pytest.raises(DataError, match=rf"an entry of '{part}' in .* lacks {key}"):
        _split(folder)


def test_missing_pictures_are_counted_and_the_first_is_named(tmp_path: Path):
    write_half(tmp_path, "train2017", random_pictures(4))
    for number in (2, 3, 4):
        (tmp_path / "train2017" / f"{number:03}.png").unlink()
    with pytest.raises(DataError, match=r"names 3 pictures of 4 that are not in .*train2017; the first is 002\.png"):
        _split(tmp_path)


def test_a_folder_without_pictures_is_named(folder: Path):
    with pytest.raises(DataError, match=r"should be in .*elsewhere: No such file"):
        CocoSplit(folder / "elsewhere", folder / "annotations" / "instances_train2017.json")


@pytest.mark.parametrize(("key", "what"), [("image_id", "pictures"), ("category_id", "categories")])
def test_annotations_of_unlisted_pictures_or_categories_are_counted_and_named(folder: Path, key: str, what: str):
    _edit(folder, lambda found: [entry.update({key: 777}) for entry in found["annotations"][1:]])
    with pytest.raises(DataError, match=rf"2 annotations in .* name {what} .*the first, 2, names {key} 777"):
        _split(folder)


def test_a_file_that_is_no_picture_or_is_cut_short_is_named_when_it_is_fetched(folder: Path):
    split = _split(folder)
    (folder / "train2017" / "001.png").write_text("not a picture")
    with pytest.raises(DataError, match=r"001\.png cannot be read as a picture"):
        split.fetch(torch.tensor([0]))
    path = folder / "train2017" / "002.png"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"002\.png cannot be read as a picture"):
        split.fetch(torch.tensor([1]))


def test_a_picture_of_another_size_than_its_annotations_is_refused(folder: Path):
    split = _split(folder)
    Image.new("RGB", (32, 24)).save(folder / "train2017" / "001.png")
    with pytest.raises(DataError, match=r"001\.png has 32 x 24 pixels, but .* was made for 64 x 48"):
        split.fetch(torch.tensor([0]))


@pytest.mark.parametrize(
    "box", [[5, 4, 0, 10], [5, 4, 10, -1], [70, 4, 10, 10], [1, 2, 3], ["a", 0, 1, 1], [0, 0, float("nan"), 4]]
)
def test_boxes_without_area_in_the_picture_are_counted_and_the_first_is_shown(folder: Path, box: list):
    _edit(folder, lambda found: found["annotations"][1].update(bbox=box))
    with pytest.raises(DataError, match=r"1 of 3 objects in .* without area .* annotation 2 of 001\.png, bbox \["):
        _split(folder)


def test_one_box_without_area_among_thousands_as_in_coco_is_left_out_with_a_warning(folder: Path, caplog):
    def grow(found: dict) -> None:
        first = found["annotations"][0]
        found["annotations"] += [{**first, "id": number} for number in range(10, 1010)]
        found["annotations"][1]["bbox"] = [30, 8, 12, 0]

    _edit(folder, grow)
    with caplog.at_level(logging.WARNING):
        split = _split(folder)
    assert "1 of 1003 objects have no area and are left out; the first is annotation 2 of 001.png" in caplog.text
    assert len(split.fetch(torch.tensor([0]))[1][0]["boxes"]) == 1001


def test_a_segmentation_that_is_neither_polygons_nor_run_lengths_is_named(folder: Path):
    _edit(folder, lambda found: found["annotations"][0].update(segmentation={"size": [48, 64]}))
    with pytest.raises(DataError, match=r"segmentation of annotation 1 in .* is neither polygons nor run lengths"):
        _split(folder).fetch(torch.tensor([0]))


def test_nothing_is_printed(folder: Path, capsys):
    _split(folder).fetch(torch.tensor([0]))
    assert capsys.readouterr().out == ""


def test_without_pycocotools_the_line_that_installs_it_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "pycocotools.coco", None)
    with pytest.raises(MissingExtraError, match=r"'pycocotools'.*pip install 'largebatch\[vision\]'"):
        _split(folder)


def test_the_hand_made_run_lengths_are_those_of_pycocotools():
    from pycocotools import mask as theirs

    mask = np.random.default_rng(0).random((9, 13)) < 0.4
    again = theirs.decode(theirs.frPyObjects(run_lengths(mask), 9, 13))
    np.testing.assert_array_equal(again.astype(bool), mask)
