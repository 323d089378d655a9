"""A folder of pictures is what torchvision makes of it: the same index, boxes of the same law, the same pixels."""

import io
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import binomtest, ks_2samp
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as peer

from helpers import linear_task
from largebatch.errors import ConfigError, DataError
from largebatch.recipe.sampler import draws
from largebatch.tasks import pictures
from largebatch.tasks.image_folder import ImageFolder, image_folders
from largebatch.tasks.pictures import Box, centre_crop, normalised, random_box, training_crop
from largebatch.tasks.task import AugmentedSplit
from largebatch.train.feed import Feed, FinishedSplit, SkippingSplit

PHOTOGRAPHS = Path(sklearn.datasets.__file__).parent / "images"  # two of 640 x 427, in scikit-learn's wheel


def photograph(name="china"):
    return (PHOTOGRAPHS / f"{name}.jpg").read_bytes()


def encoded(picture, kind="PNG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def noise(width, height, seed=0, mode="RGB"):
    channels = {"RGB": 3, "CMYK": 4, "L": 1}[mode]
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def draw(index, seed=0):
    return torch.from_numpy(draws(seed, 0, np.array([index]))[0]).to(torch.float32)


def box_of(data, index):
    """The box and the mirroring that `training_crop` takes for these draws."""
    chance = random.Random(draw(index).numpy().tobytes())
    box = random_box(*Image.open(io.BytesIO(data)).size, chance)
    return box, chance.random() < 0.5


@pytest.mark.parametrize("size", [(500, 375), (64, 64), (1000, 90), (90, 1000), (7, 5)])
def test_boxes_have_torchvision_s_law(size):
    """10 tries and the box in the centre included: 1000 x 90 pixels have it in most cases. Two samples of 6,000."""
    width, height = size
    ours = np.array([random_box(width, height, random.Random(seed)) for seed in range(6000)])
    torch.manual_seed(0)
    crop, image = v2.RandomResizedCrop(224, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)), torch.empty(3, height, width)
    theirs = [crop.make_params([image]) for _ in range(6000)]
    theirs = np.array([[box[name] for name in ("left", "top", "width", "height")] for box in theirs])
    assert (ours >= 0).all() and (ours[:, :2] + ours[:, 2:] <= size).all() and (ours[:, 2:] > 0).all()
    for column in range(4):
        assert ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    areas, ratios = (
        [ks_2samp(values(ours), values(theirs)).pvalue for values in (area, ratio)]
        for area, ratio in [(lambda box: box[:, 2] * box[:, 3], lambda box: box[:, 2] / box[:, 3])] * 2
    )
    assert min(areas + ratios) > 1e-3


def test_half_of_the_crops_are_mirrored_whatever_their_box():
    boxes = [box_of(photograph(), index) for index in range(2000)]
    assert binomtest(sum(mirrored for _, mirrored in boxes), 2000).pvalue > 1e-3
    left = [[box.left for box, mirrored in boxes if mirrored is which] for which in (True, False)]
    assert ks_2samp(*left).pvalue > 1e-3


def test_draws_alone_fix_a_crop():
    first, again = (training_crop(photograph(), 64, draw(5)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, training_crop(photograph(), 64, draw(6)))


@pytest.mark.parametrize("name", ["china", "flower"])
def test_training_pixels_are_those_of_torchvision_s_resized_crop(name):
    """Pillow's resize, which the reference preset uses, rounds elsewhere: one level of 255 is all that may differ."""
    data = photograph(name)
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    for index in range(12):
        (left, top, width, height), mirrored = box_of(data, index)
        theirs = peer.resized_crop(picture, top, left, height, width, [224, 224], antialias=True)
        theirs = peer.pil_to_tensor(peer.horizontal_flip(theirs) if mirrored else theirs)
        ours = training_crop(data, 224, draw(index))
        assert ours.shape == (3, 224, 224) and ours.dtype == torch.uint8
        assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("size", [64, 40, 24])
def test_what_is_decoded_at_a_half_or_less_stays_near_the_whole(size):
    """Another filter than the whole picture's, so the difference is bounded, not none: 1.5 levels of 255 on average."""
    parts = []
    for name in ("china", "flower"):
        data = photograph(name)
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        for index in range(30):
            (left, top, width, height), mirrored = box_of(data, index)
            theirs = peer.resized_crop(picture, top, left, height, width, [size, size], antialias=True)
            theirs = peer.pil_to_tensor(peer.horizontal_flip(theirs) if mirrored else theirs)
            difference = (training_crop(data, size, draw(index)).int() - theirs).abs().float()
            parts.append(max(part for part in (1, 2, 4, 8) if part == 1 or min(width, height) >= 2 * part * size))
            if parts[-1] == 1:
                assert difference.max() <= 1
            else:
                assert difference.max() > 1  # it did take the short way
                assert difference.mean() <= 1.5 and difference.quantile(0.99) <= 12
    assert len(set(parts) - {1}) >= 1


@settings(max_examples=60)
@given(width=st.integers(1, 90), height=st.integers(1, 90), size=st.sampled_from([1, 8, 15, 32]))
def test_a_centre_crop_is_torchvision_s_resize_and_centre_crop(width, height, size):
    """Bit for bit, whatever the shape: torch's kernels on the same bytes."""
    picture = noise(width, height, seed=width * 91 + height)
    evaluation = v2.Compose([v2.Resize(round(size * 256 / 224), antialias=True), v2.CenterCrop(size)])
    assert torch.equal(centre_crop(encoded(picture), size), evaluation(peer.pil_to_tensor(picture)))


def test_a_jpeg_s_centre_is_the_reference_preset_s():
    data = photograph()
    evaluation = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224), v2.PILToTensor()])
    theirs = evaluation(Image.open(io.BytesIO(data)).convert("RGB"))
    assert (centre_crop(data, 224).int() - theirs.int()).abs().max() <= 1


def test_bytes_become_the_preset_s_numbers():
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16)
    preset = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(pictures.MEAN, pictures.STD)])
    torch.testing.assert_close(normalised(images), preset(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "data",
    [
        encoded(noise(50, 40, mode="L"), "JPEG"),
        encoded(noise(50, 40, mode="CMYK"), "JPEG"),
        encoded(noise(50, 40), "JPEG", progressive=True),
        encoded(noise(50, 40).convert("P")),
        encoded(noise(50, 40).convert("RGBA"), "WEBP", lossless=True),
        encoded(noise(50, 40, mode="L").convert("1"), "TIFF"),
    ],
    ids=["grey", "CMYK", "progressive", "palette", "alpha", "bilevel"],
)
def test_every_kind_of_picture_becomes_the_three_colours_that_pil_sees(data):
    theirs = peer.pil_to_tensor(Image.open(io.BytesIO(data)).convert("RGB"))
    whole = Box(0, 0, 50, 40)
    assert torch.equal(pictures._resized(pictures._open(data), whole, 50, 40), theirs)


@pytest.fixture
def folder(tmp_path):
    """3 classes, 18 and 6 pictures, two levels of folders, some files that are no pictures."""
    endings = ("jpg", "PNG")
    for half, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(("b", "a", "née")):
            for number in range(count):
                path = tmp_path / half / name / ("more" if number == 1 else "") / f"{number}.{endings[number % 2]}"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise(40 + number, 30 + label, seed=10 * label + number).save(path)
    (tmp_path / "train" / "a" / ".DS_Store").write_bytes(b"hidden")
    return tmp_path


def test_the_index_is_torchvision_s(folder):
    theirs = torchvision.datasets.ImageFolder(folder / "train")
    train, held_out = image_folders(folder, size=16)
    assert list(train.classes) == list(held_out.classes) == theirs.classes
    ours = [(str(train.folder / train.name(index)), train.read(index)[1]) for index in range(len(train))]
    assert ours == theirs.samples
    assert (len(train), len(held_out)) == (18, 6)


def test_a_batch_is_its_pictures_one_by_one(folder):
    train, _ = image_folders(folder, size=16)
    indices = torch.tensor([17, 0, 4, 4])
    random = torch.stack([draw(int(index)) for index in indices])
    images, labels = train.fetch(indices)
    cropped, same_labels = train.finish(train.fetch_augmented(indices, random))
    assert labels.tolist() == same_labels.tolist() == [2, 0, 0, 0]
    for row, index in enumerate(indices.tolist()):
        data = (train.folder / train.name(index)).read_bytes()
        assert torch.equal(images[row], normalised(centre_crop(data, 16)[None])[0])
        assert torch.equal(cropped[row], normalised(training_crop(data, 16, random[row])[None])[0])
    assert images.dtype == cropped.dtype == torch.float32 and labels.dtype == torch.int64
    for protocol in (AugmentedSplit, SkippingSplit, FinishedSplit):
        assert isinstance(train, protocol)


def spoil(folder):
    """Four ways in which a picture is none; returns their names."""
    spoilt = {
        "a/0.jpg": (folder / "train/a/0.jpg").read_bytes()[:-200],
        "b/more/1.PNG": (folder / "train/b/more/1.PNG").read_bytes()[:-200],
        "b/2.jpg": b"",
        "née/4.jpg": b"<html>404</html>",
    }
    for name, data in spoilt.items():
        (folder / "train" / name).write_bytes(data)
    return set(spoilt)


@pytest.mark.parametrize("loaders", [0, 2])
def test_what_is_no_picture_is_left_out_named_and_counted_in_every_epoch(folder, loaders):
    spoilt = spoil(folder)
    train, held_out = image_folders(folder, size=16)
    task = replace(linear_task(), train=train, held_out=held_out)
    feed = Feed(task, seed=0, batch=18, microbatch=9, start=0, device=torch.device("cpu"), loaders=loaders)
    for epoch in (1, 2):
        assert sum(len(labels) for _, labels in feed.step()) == 14
        assert feed.skipped == dict.fromkeys(spoilt, epoch)
    feed.close()


def test_any_number_of_loaders_sees_the_same_pixels(folder):
    spoil(folder)
    train, held_out = image_folders(folder, size=16)
    task = replace(linear_task(), train=train, held_out=held_out)
    steps = []
    for loaders in (0, 1, 2):
        feed = Feed(task, seed=0, batch=10, microbatch=7, start=5, device=torch.device("cpu"), loaders=loaders)
        steps.append([tensor for _ in range(4) for batch in feed.step() for tensor in batch])
        feed.close()
    for found in steps[1:]:
        assert all(torch.equal(one, other) for one, other in zip(steps[0], found, strict=True))


def test_why_a_picture_was_left_out_is_said(folder):
    spoil(folder)
    train, _ = image_folders(folder, size=16)
    train.fetch(torch.arange(18))
    why = dict(train.take_skipped())
    assert why["b/2.jpg"] == "an empty file"
    assert why["née/4.jpg"] == "no picture of a known format"
    assert "truncated" in why["a/0.jpg"] and "truncated" in why["b/more/1.PNG"]
    assert train.take_skipped() == []


def test_a_microbatch_without_a_whole_picture_is_an_error_that_names_them(folder):
    spoil(folder)
    train, _ = image_folders(folder, size=16)
    bad = [index for index in range(18) if train.name(index) in ("b/2.jpg", "a/0.jpg")]
    words = r"none of the 2 pictures .*: a/0\.jpg \(.*truncated.*\), b/2\.jpg \(an empty file\)"
    with pytest.raises(DataError, match=words):
        train.fetch_augmented(torch.tensor(bad), torch.zeros(2, 8))
    assert train.take_skipped() == []


def test_a_picture_that_vanished_is_an_error(folder):
    train, _ = image_folders(folder, size=16)
    (folder / "train" / "a" / "3.PNG").unlink()
    with pytest.raises(DataError, match=r"a/3\.PNG cannot be read: No such file"):
        train.fetch(torch.arange(6))


def test_files_that_are_no_pictures_by_name_are_said(folder, caplog):
    (folder / "train" / "a" / "boxes.txt").write_text("1 2 3")
    image_folders(folder)
    assert "1 files" in caplog.text and "a/boxes.txt" in caplog.text and ".DS_Store" not in caplog.text


def replace_with_file(folder):
    shutil.rmtree(folder)
    folder.write_bytes(b"a zip file, say")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (shutil.rmtree, "does not exist"),
        (replace_with_file, "is a file, not a folder"),
        (lambda folder: shutil.rmtree(folder / "val"), r"has no folder val\. Expected: .*train/CLASS"),
        (lambda folder: [shutil.rmtree(path) for path in folder.iterdir()], "no folder train and no folder val"),
        (lambda folder: [shutil.rmtree(path) for path in (folder / "train").iterdir()], "train has no class folders"),
        (lambda folder: (folder / "train" / "zebra").mkdir(), "no picture in class zebra of .*train"),
        (lambda folder: shutil.rmtree(folder / "val" / "a"), r"train \(3\) and .*val \(2\) differ; only in train: a\."),
        (
            lambda folder: (folder / "val" / "a").rename(folder / "val" / "c"),
            "only in train: a; only in val: c",
        ),
    ],
    ids=["none", "file", "no val", "neither", "no classes", "empty class", "classes missing", "other classes"],
)
def test_bad_folders_are_one_sentence(folder, harm, words):
    harm(folder)
    with pytest.raises(DataError, match=words):
        image_folders(folder)


def test_a_size_must_be_positive(folder):
    with pytest.raises(ConfigError, match="size=0"):
        ImageFolder(folder / "train", size=0)


def test_a_tiny_picture_is_enlarged():
    assert math.prod(training_crop(encoded(noise(1, 1)), 8, draw(0)).shape) == 3 * 64
