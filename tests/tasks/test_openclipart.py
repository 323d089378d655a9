"""Drawings made small once, and the task that tells them apart, on a small folder of the same layout."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image

from largebatch.errors import DataError
from largebatch.records.schema import RunSpec
from largebatch.tasks import decoded
from largebatch.tasks.catalog import load_task
from largebatch.tasks.decoded import decode_folder, small_picture
from largebatch.tasks.openclipart import CLASSES, augment
from largebatch.train.loop import train

PER_CLASS = 18


def draw(path, rng, kind=0):
    """A picture of its own whose colour says its class, partly transparent."""
    pixels = rng.integers(0, 60, (12, 9, 4)).astype(np.uint8)
    pixels[..., :3] += np.uint8(19 * kind)
    pixels[..., 3] = 255
    pixels[:2, :, 3] = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels, "RGBA").save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made, rng = tmp_path_factory.mktemp("openclipart"), np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        for number in range(PER_CLASS):
            draw(made / name / ("inner" if number % 2 else ".") / f"{number:02d}.png", rng, label)
    draw(made / "unsorted" / "left_out.png", rng)
    return made


def test_a_picture_is_averaged_by_opacity_put_on_white_and_keeps_its_sides_in_proportion(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 32, 4)).astype(np.uint8)
    Image.fromarray(pixels, "RGBA").save(tmp_path / "wide.png")
    # Independent: composite at full size in float64, then the mean over boxes of 4 x 4, between two white bands.
    opacity = pixels[..., 3:] / 255.0
    on_white = pixels[..., :3] * opacity + 255 * (1 - opacity)
    means = on_white.reshape(4, 4, 8, 4, 3).mean((1, 3)).transpose(2, 0, 1)
    small = small_picture(tmp_path / "wide.png", 8)
    assert np.all(small[:, :2] == 255) and np.all(small[:, 6:] == 255)
    np.testing.assert_allclose(small[:, 2:6], means, atol=1.5)  # two roundings to whole levels


def test_colours_of_transparent_pixels_are_not_seen(tmp_path):
    pixels = np.full((8, 8, 4), (255, 0, 0, 0), dtype=np.uint8)
    Image.fromarray(pixels, "RGBA").save(tmp_path / "red.png")
    assert np.all(small_picture(tmp_path / "red.png", 4) == 255)


def test_repeats_links_and_files_that_are_no_pictures_are_left_out(tmp_path, caplog):
    rng = np.random.default_rng(1)
    for name in ("a/1.png", "a/2.png", "b/3.png"):
        draw(tmp_path / name, rng)
    # Of class a, where it is found first.
    (tmp_path / "b" / "same.png").write_bytes((tmp_path / "a" / "2.png").read_bytes())
    (tmp_path / "b" / "link.png").symlink_to("../a/1.png")
    (tmp_path / "b" / "nowhere.png").symlink_to("../gone/1.png")
    (tmp_path / "b" / "notes.txt").write_text("no picture")
    (tmp_path / "b" / "cut.png").write_bytes((tmp_path / "b" / "3.png").read_bytes()[:200])
    for _ in range(2):  # decoded, and then what was kept: said each time
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = decode_folder(tmp_path, ["a", "b"], size=8)
        assert found.labels.tolist() == [0, 0, 1] and found.duplicates == 1
        for image, name in zip(found.images, ("a/1.png", "a/2.png", "b/3.png"), strict=True):
            assert np.array_equal(image, small_picture(tmp_path / name, 8))
        assert "left out 2 files" in caplog.text and "b/cut.png (" in caplog.text and "b/notes.txt (" in caplog.text


def test_pictures_are_decoded_once_and_again_when_they_change(tmp_path, monkeypatch, caplog):
    rng, read = np.random.default_rng(2), []
    draw(tmp_path / "a" / "1.png", rng)
    monkeypatch.setattr(
        decoded, "small_picture", lambda path, size: read.append(path.name) or small_picture(path, size)
    )
    first = decode_folder(tmp_path, ["a"], size=8)
    again = decode_folder(tmp_path, ["a"], size=8)
    assert read == ["1.png"] and np.array_equal(first.images, again.images)
    decode_folder(tmp_path, ["a"], size=4)  # a file of its own
    draw(tmp_path / "a" / "2.png", rng)
    assert len(decode_folder(tmp_path, ["a"], size=8).images) == 2
    kept = tmp_path / ".pixels-8.npz"
    kept.write_bytes(kept.read_bytes()[:300])  # a disk that was full
    read.clear()
    assert len(decode_folder(tmp_path, ["a"], size=8).images) == 2 and read == ["1.png", "2.png"]
    kept.unlink()
    kept.mkdir()  # nothing can be kept
    assert len(decode_folder(tmp_path, ["a"], size=8).images) == 2 and "decoded again each time" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [".pixels-4.npz", ".pixels-8.npz", "a"]


def test_one_in_five_of_each_of_the_ten_folders_is_held_out(folder):
    task = load_task("openclipart", folder)
    (inputs, labels), (held_out, classes) = (
        split.fetch(torch.arange(len(split))) for split in (task.train, task.held_out)
    )
    held_out_per_class = torch.bincount(classes, minlength=10)
    assert inputs.shape[1:] == held_out.shape[1:] == (3, 32, 32)
    assert len(labels) + len(classes) == 10 * PER_CLASS and len(classes) == 2 * PER_CLASS
    assert held_out_per_class.min() >= 3 and held_out_per_class.max() <= 4
    assert abs(float(inputs.mean())) < 1e-4 and abs(float(inputs.std()) - 1) < 1e-3
    rows = [{row.numpy().tobytes() for row in part} for part in (inputs, held_out)]
    assert not rows[0] & rows[1]


def test_a_training_picture_is_moved_by_4_pixels_at_most_and_mirrored_as_its_own_draws_say():
    images, draws = torch.rand(6, 3, 32, 32), torch.rand(6, 8)
    draws[0, :3] = torch.tensor([0.5, 0.5, 0.5])  # in the middle, not mirrored
    draws[1, :3] = torch.tensor([0.0, 0.999999, 0.0])
    moved, labels = augment((images, torch.arange(6)), draws)
    assert torch.equal(moved[0], images[0]) and labels.tolist() == list(range(6))
    for image, row, got in zip(images, draws, moved, strict=True):
        down, right = (int(float(part) * 9) - 4 for part in row[:2])
        for y in range(32):
            for x in range(32):
                across = 31 - x if row[2] < 0.5 else x
                here = image[:, min(max(y + down, 0), 31), min(max(across + right, 0), 31)]
                assert torch.equal(got[:, y, x], here)


def test_it_learns_through_the_loop(folder, tmp_path):
    task = load_task("openclipart", folder)
    spec = RunSpec(
        task="openclipart", role="train", batch=64, microbatch=32, lr=0.1, schedule="constant", seed=0, max_steps=40,
        monitor=True, evaluate_epochs=True,
    )  # fmt: skip
    record = train(task, spec, tmp_path)
    losses = [row["train_loss"] for row in record.epochs]
    assert losses[-1] < 0.5 * losses[0] and losses[0] == pytest.approx(np.log(10), abs=0.8)


def test_what_is_no_such_folder_is_one_sentence(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LARGEBATCH_DATA", raising=False)
    monkeypatch.setattr("largebatch.tasks.openclipart._INSTALLED", tmp_path / "usr")
    with pytest.raises(DataError, match=r"no files of openclipart in .*/usr.*scripts/fetch_data\.sh openclipart"):
        load_task("openclipart")
    (tmp_path / "some" / "animals").mkdir(parents=True)
    with pytest.raises(DataError, match=r"some has no folder computer"):
        load_task("openclipart", tmp_path / "some")
    for name in CLASSES:
        (tmp_path / "some" / name).mkdir(exist_ok=True)
    draw(tmp_path / "some" / "animals" / "1.png", np.random.default_rng(0))
    with pytest.raises(DataError, match=r"no picture of class computer, food, .* in .*some"):
        load_task("openclipart", tmp_path / "some")
