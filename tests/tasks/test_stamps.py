"""Stamps on photographs: masks exact to the pixel, halves that share nothing, and a task that reads them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from largebatch.errors import DataError
from largebatch.tasks.catalog import load_task
from largebatch.tasks.coco import CocoSplit
from largebatch.tasks.detection_ap import average_precision

pytest.importorskip("pycocotools", reason="pip install pycocotools")
pytest.importorskip("torchvision", reason="pip install torchvision")
from scripts import make_stamps

SCRIPT = Path(make_stamps.__file__)
PURE = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], dtype=np.uint8)


def _disc(colour: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """An ellipse of one colour whose alpha fades at the edge; the colour goes on where it is transparent."""
    width, height = size
    rows, columns = np.mgrid[:height, :width]
    away = np.hypot((columns - width / 2 + 0.5) / (width / 2), (rows - height / 2 + 0.5) / (height / 2))
    alpha = np.clip((1 - away) * 12 * 255, 0, 255).astype(np.uint8)
    return Image.fromarray(np.dstack([np.broadcast_to(colour, (height, width, 3)), alpha]))


def _black() -> list[Image.Image]:
    return [Image.new("RGB", (300, 200))]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_each_mask_is_what_the_picture_shows_of_its_stamp_whatever_covers_it(seed: int):
    """Over black, a stamp of pure colour shows its alpha: it is opaque (alpha >= 128) where its channel is >= 128.

    Where a stamp's fading edge lies over another, two channels mix and the picture cannot say; everywhere else it does,
    under a covering stamp too, which leaves nothing of the channel below.
    """
    stamps = [[_disc(colour, size)] for colour, size in zip(PURE, [(60, 40), (50, 50), (30, 80)], strict=True)]
    pixels, objects = make_stamps.compose(stamps, _black(), np.random.default_rng(seed))
    assert pixels.shape == (128, 128, 3) and pixels.dtype == np.uint8
    assert 1 <= len(objects) <= 4
    alone = (pixels > 0).sum(axis=2) <= 1
    assert alone.mean() > 0.9
    for kind in range(3):
        shown = [mask for what, mask in objects if what == kind] or [np.zeros((128, 128), bool)]
        if len(shown) > 1:
            continue  # edges of two stamps of one colour add up
        np.testing.assert_array_equal(shown[0][alone], (pixels[..., kind] >= 128)[alone])
    total = sum(mask.astype(int) for _, mask in objects)
    assert total.max() == 1  # no pixel belongs to two objects
    assert all(mask.sum() >= 0.25 * 36 * 8 for _, mask in objects)


def test_what_is_covered_stays_visible_by_six_tenths():
    stamps = [[Image.new("RGBA", (40, 40), (255, 0, 0, 255))]]
    for seed in range(30):
        _, objects = make_stamps.compose(stamps, _black(), np.random.default_rng(seed))
        for _, mask in objects:
            rows, columns = mask.any(1).sum(), mask.any(0).sum()
            assert mask.sum() >= 0.6 * max(rows, columns) ** 2 - 1e-9 or max(rows, columns) < 36
            assert mask.sum() >= 0.6 * 36 * 36 - 36  # the smallest stamp, rounded


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> tuple[Path, Path]:
    """Ten stamps for each class, each of a grey of its own, and eight photographs, the held-out ones brighter."""
    root = tmp_path_factory.mktemp("sources")
    for number, name in enumerate(make_stamps.MORE_CLASSES):
        folder = root / "stamps" / name / ("below" if number % 2 else "")
        folder.mkdir(parents=True)
        for index in range(10):
            _disc(np.array([200, 10 * index, 20 * number], np.uint8), (50, 40)).save(folder / f"{index}.png")
    (root / "photographs").mkdir()
    for index in range(8):
        Image.new("RGB", (400, 300), (0, 0, 255 if index % 4 == 3 else 80)).save(root / "photographs" / f"{index}.jpg")
    return root / "stamps", root / "photographs"


def _make(sources: tuple[Path, Path], out: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, *sources, out, "--train", "12", "--held-out", "5", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(sources: tuple[Path, Path], tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "stamps"
    made = _make(sources, out)
    assert made.returncode == 0, made.stderr
    return out


def _files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(sources, folder: Path, tmp_path: Path):
    assert _make(sources, tmp_path / "again").returncode == 0
    assert _files(tmp_path / "again") == _files(folder)
    assert _make(sources, tmp_path / "other", "--seed", "1").returncode == 0
    same, other = _files(folder), _files(tmp_path / "other")
    assert set(same) == set(other) and not any(same[name] == other[name] for name in same)


def test_more_pictures_begin_with_the_same_ones(sources, folder: Path, tmp_path: Path):
    command = [sys.executable, SCRIPT, *sources, tmp_path / "more", "--train", "15", "--held-out", "5"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    same, more = _files(folder / "train2017"), _files(tmp_path / "more" / "train2017")
    assert len(more) == 15 and all(more[name] == content for name, content in same.items())


def test_the_halves_share_no_stamp_and_no_photograph(sources):
    for names in (make_stamps.CLASSES, make_stamps.MORE_CLASSES):
        seen = []
        for held_out in (False, True):
            stamps = make_stamps.read_stamps(sources[0], held_out, names)
            assert [len(stamps_of_class) for stamps_of_class in stamps] == [2 if held_out else 8] * len(names)
            seen.append({stamp.getpixel((20, 20))[:3] for stamps_of_class in stamps for stamp in stamps_of_class})
        assert not seen[0] & seen[1] and len(seen[0] | seen[1]) == 10 * len(names)
    blues = [
        {photo.getpixel((5, 5))[2] > 150 for photo in make_stamps.read_photographs(sources[1], held_out)}
        for held_out in (False, True)
    ]
    assert blues == [{False}, {True}]


def test_the_annotations_are_coco_and_say_what_the_masks_are(folder: Path):
    for half, num in (("train2017", 12), ("val2017", 5)):
        path = folder / "annotations" / f"instances_{half}.json"
        split = CocoSplit(folder / half, path)
        assert len(split) == num and split.category_names == ("mammals", "fruit", "houses", "roadsigns")
        _, targets = split.fetch(torch.arange(num))
        listed = json.loads(path.read_text())["annotations"]
        masks = [mask for target in targets for mask in target["masks"]]
        boxes = [box for target in targets for box in target["boxes"]]
        assert len(listed) == len(masks)
        for entry, mask, box in zip(listed, masks, boxes, strict=True):
            rows, columns = mask.nonzero().unbind(1)
            edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert entry["area"] == mask.sum().item() > 0
            assert box.tolist() == [edge.item() for edge in edges]


def test_the_class_folders_are_what_an_image_folder_reads(folder: Path):
    from torchvision.datasets import ImageFolder

    for half, num in (("train", 48), ("val", 10)):
        found = ImageFolder(str(folder / "classes" / half))
        assert len(found) == num and len(found.classes) == 8
        counts = np.bincount(found.targets)
        assert counts.max() - counts.min() <= 1
        assert found[0][0].size == (64, 64)


def test_the_task_reads_what_the_script_wrote_and_trains_on_it(folder: Path):
    task = load_task("stamps", folder)
    assert (len(task.train), len(task.held_out), task.max_microbatch) == (12, 5, 2)
    torch.manual_seed(0)
    model = task.model()
    assert 10e6 < sum(parameter.numel() for parameter in model.parameters()) < 13e6
    batch = task.train.fetch(torch.arange(2))
    task.loss(model, batch).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    assert set(average_precision(model, task.held_out)) >= {"box_ap", "mask_ap"}
    assert model.training


def test_absent_data_names_the_command_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LARGEBATCH_DATA", raising=False)
    with pytest.raises(DataError, match=r"no COCO folder in .*/data/stamps.*scripts/fetch_data\.sh stamps"):
        load_task("stamps")


def test_too_few_stamps_too_few_photographs_and_a_full_folder_are_refused_in_one_line(sources, folder, tmp_path: Path):
    made = _make(sources, folder)
    assert made.returncode == 1 and f"{folder} is there and not empty" in made.stderr
    few = tmp_path / "few" / "animals" / "mammals"
    few.mkdir(parents=True)
    _disc(PURE[0], (20, 20)).save(few / "one.png")
    made = _make((tmp_path / "few", sources[1]), tmp_path / "out")
    assert made.returncode == 1 and "holds 0 stamps" in made.stderr
    made = _make((sources[0], tmp_path), tmp_path / "out2")
    assert made.returncode == 1 and "holds 0 JPEG files, too few" in made.stderr
    assert all(line.count("\n") <= 1 for line in (made.stderr,))
