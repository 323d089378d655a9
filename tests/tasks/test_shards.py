"""Shards give what the folder gave, bit for bit, from wherever they lie, and one that is not whole is named."""

import errno
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from helpers import linear_task
from largebatch.errors import ConfigError, DataError, StorageError
from largebatch.tasks.image_folder import ImageFolder, image_folders
from largebatch.tasks.shards import Shards, shard_folders, write_shard_folders, write_shards
from largebatch.train.feed import Feed

NUM_PICTURES = 24
SHARD_BYTES = 40_000


def make_folder(folder, classes=("cat", "dog", "née"), num=NUM_PICTURES):
    for number in range(num):
        path = folder / classes[number % len(classes)] / f"{number}.{('jpg', 'PNG')[number % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(0, 256, (30 + number, 40, 3), dtype=np.uint8)
        Image.fromarray(values).save(path)


@pytest.fixture
def data(tmp_path):
    make_folder(tmp_path / "data" / "train")
    make_folder(tmp_path / "data" / "val", num=6)
    return tmp_path / "data"


@pytest.fixture
def packed(data, tmp_path):
    write_shard_folders(data, tmp_path / "packed", shard_bytes=SHARD_BYTES)
    return tmp_path / "packed"


def shards_of(folder):
    return sorted(folder.glob("*.tar"))


def assert_equal_batches(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_shards_give_the_folder_s_pictures_in_the_folder_s_order(data, packed):
    for plain, sharded in zip(image_folders(data, size=16), shard_folders([packed], size=16), strict=True):
        assert plain.classes == sharded.classes and len(plain) == len(sharded)
        assert [plain.read(index) for index in range(len(plain))] == [sharded.read(i) for i in range(len(sharded))]
        indices = torch.arange(len(plain)).flip(0)
        random = torch.rand(len(plain), 8, generator=torch.Generator().manual_seed(0))
        assert_equal_batches(plain.fetch(indices), sharded.fetch(indices))
        assert_equal_batches(plain.fetch_augmented(indices, random), sharded.fetch_augmented(indices, random))


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_from_shards_sees_the_folder_s_steps_for_any_number_of_workers(data, packed, loaders, world_size):
    steps = []
    for train, held_out in (image_folders(data, size=16), shard_folders([packed], size=16)):
        feed = Feed(
            replace(linear_task(), train=train, held_out=held_out), seed=0, batch=10, microbatch=3, start=20,
            device=torch.device("cpu"), rank=world_size - 1, world_size=world_size, loaders=loaders,
        )  # fmt: skip
        steps.append([tensor for _ in range(3) for batch in feed.step() for tensor in batch])
        feed.close()
    assert_equal_batches(*steps)


def test_a_shard_is_a_tar_file_in_webdataset_s_layout(data, packed):
    """Each picture beside its class under one key: what webdataset groups into a sample."""
    plain = ImageFolder(data / "train")
    members = []
    for path in shards_of(packed / "train"):
        assert path.stat().st_size <= SHARD_BYTES + 2 * tarfile.RECORDSIZE  # headers, and tar's padding at the end
        with tarfile.open(path) as tar:
            members += [(member.name, tar.extractfile(member).read()) for member in tar]
    assert len(shards_of(packed / "train")) > 2
    for index in range(NUM_PICTURES):
        (name, picture), (class_name, label) = members[2 * index : 2 * index + 2]
        assert name == f"{index:08d}{Path(plain.name(index)).suffix.lower()}" and class_name == f"{index:08d}.cls"
        assert (picture, int(label)) == plain.read(index)


def test_shards_may_lie_in_several_places_and_behind_urls(data, packed, tmp_path):
    plain, away = ImageFolder(data / "train", size=16), tmp_path / "other disk"
    away.mkdir()
    moved = shards_of(packed / "train")
    moved[0].rename(away / moved[0].name)
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/far/{moved[1].name}", moved[1].read_bytes())
    moved[1].unlink()
    sharded = Shards([packed / "train", away, "memory://far"], size=16)
    assert [plain.read(index) for index in range(NUM_PICTURES)] == [sharded.read(i) for i in range(NUM_PICTURES)]
    memory.rm("/far", recursive=True)
    with pytest.raises(DataError, match=rf"memory://far/{moved[1].name} cannot be read"):
        for index in range(NUM_PICTURES):
            sharded.read(index)


def test_connections_are_made_anew_in_a_forked_process(packed):
    """A socket that two processes share mixes their answers up."""
    sharded = Shards([packed / "train"], size=16)
    ours = sharded._files._system("file")
    sharded._files.process = -1  # as after a fork
    sharded.read(0)
    assert sharded._files.process == os.getpid()
    assert ours is not None


def test_a_picture_that_is_none_is_named_by_its_shard(data, tmp_path):
    (data / "train" / "cat" / "0.jpg").write_bytes(b"<html>")
    write_shards(ImageFolder(data / "train"), tmp_path / "packed")
    sharded = Shards([tmp_path / "packed"], size=16)
    images, labels = sharded.fetch(torch.arange(NUM_PICTURES))
    assert len(images) == len(labels) == NUM_PICTURES - 1
    assert sharded.take_skipped() == [("shard-00000.tar:00000000.jpg", "no picture of a known format")]


def cut(path, to=0.5):
    os.truncate(path, int(path.stat().st_size * to))


def interrupt(folder):
    (folder / "index.npz").unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (
            lambda folder: cut(folder / "shard-00001.tar"),
            r"shard-00001\.tar, of [\d,]+ bytes, is cut short .* has [\d,]+ bytes",
        ),
        (lambda folder: (folder / "shard-00002.tar").unlink(), r"shard shard-00002\.tar, .*is in none of .*train"),
        (lambda folder: cut(folder / "index.npz"), r"index\.npz \([\d,]+ bytes\) was cut short"),
        (interrupt, r"no index\.npz in .*written last"),
        (lambda folder: (folder / "index.npz").write_bytes(b""), r"index\.npz \(0 bytes\) was cut short"),
    ],
    ids=["cut shard", "missing shard", "cut index", "interrupted", "empty index"],
)
def test_what_is_not_whole_is_one_sentence_that_names_it(packed, harm, words):
    harm(packed / "train")
    with pytest.raises(DataError, match=words):
        shard_folders([packed])


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_shard_that_is_cut_while_training_is_named_too(packed, loaders):
    train, held_out = shard_folders([packed], size=16)
    cut(packed / "train" / "shard-00001.tar", to=0.1)
    task = replace(linear_task(), train=train, held_out=held_out)
    feed = Feed(task, seed=0, batch=NUM_PICTURES, microbatch=4, start=0, device=torch.device("cpu"), loaders=loaders)
    with pytest.raises(DataError, match=r"shard-00001\.tar was cut short: of [\d,]+ bytes from [\d,]+ on there are"):
        feed.step()
    feed.close()


def test_an_index_of_another_version_says_so(packed):
    path = packed / "train" / "index.npz"
    with np.load(path) as arrays:
        changed = dict(arrays) | {"version": np.array(7)}
    np.savez(path, **changed)
    with pytest.raises(DataError, match="version 7, not 1"):
        Shards([packed / "train"])


def test_halves_of_different_data_are_refused(packed, data, tmp_path):
    make_folder(tmp_path / "wolves", classes=("cat", "wolf"))
    write_shards(ImageFolder(tmp_path / "wolves"), tmp_path / "mixed" / "val")
    (packed / "train").rename(tmp_path / "mixed" / "train")
    with pytest.raises(DataError, match="dog, née, wolf"):
        shard_folders([tmp_path / "mixed"])


def test_shards_are_never_written_over(packed, data):
    with pytest.raises(ConfigError, match="holds shards already"):
        write_shards(ImageFolder(data / "train"), packed / "train")


@pytest.mark.parametrize(
    "call", [lambda data, out: Shards([]), lambda data, out: write_shards(data, out, shard_bytes=0)]
)
def test_numbers_that_cannot_be_are_refused(data, tmp_path, call):
    with pytest.raises(ConfigError):
        call(ImageFolder(data / "train"), tmp_path / "out")


def test_a_full_disk_leaves_nothing_that_passes_for_whole(data, tmp_path, monkeypatch):
    written = tarfile.TarFile.addfile

    def fill(self, member, file=None):
        if member.name.startswith("00000009"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(self, member, file)

    monkeypatch.setattr(tarfile.TarFile, "addfile", fill)
    with pytest.raises(StorageError, match="No space left"):
        write_shards(ImageFolder(data / "train"), tmp_path / "packed", shard_bytes=SHARD_BYTES)
    assert shards_of(tmp_path / "packed")
    with pytest.raises(DataError, match="written last"):
        Shards([tmp_path / "packed"])
    monkeypatch.undo()
    write_shards(ImageFolder(data / "train"), tmp_path / "packed", shard_bytes=SHARD_BYTES)
    assert len(Shards([tmp_path / "packed"])) == NUM_PICTURES
