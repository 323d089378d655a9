"""IDX files, the places where data is looked for, and what is said when it is not what it should be."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from largebatch.errors import DataError
from largebatch.tasks import fashion_mnist, mnist
from largebatch.tasks.catalog import load_task
from largebatch.tasks.files import IDX_NAMES, download, find_idx, places, read_classes
from largebatch.tasks.idx import read_idx


def _idx(array: np.ndarray) -> bytes:
    """An IDX file written independently of the reader."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def _write_set(folder: Path, *, num: int = 200, num_held_out: int = 50, seed: int = 0, gz: bool = True) -> None:
    """A small data set of the same format."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [rng.integers(0, 256, (num, 28, 28)), np.arange(num) % 10]
    arrays += [rng.integers(0, 256, (num_held_out, 28, 28)), np.arange(num_held_out) % 10]
    for name, array in zip(IDX_NAMES, arrays, strict=True):
        content = _idx(array)
        (folder / f"{name}.gz").write_bytes(gzip.compress(content)) if gz else (folder / name).write_bytes(content)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without data, no environment variable, no system folder and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LARGEBATCH_DATA", raising=False)
    for module in (fashion_mnist, mnist):
        monkeypatch.setattr(module, "download", lambda *_: "no network in this test")
        usual = module.places
        monkeypatch.setattr(
            module, "places", lambda *a, usual=usual: [p for p in usual(*a) if not str(p).startswith("/usr/share")]
        )
    return tmp_path


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=3), packed=st.booleans(), seed=st.integers(0, 99))
def test_what_was_written_is_read(tmp_path_factory, shape: list[int], packed: bool, seed: int):
    array = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(gzip.compress(_idx(array)) if packed else _idx(array))
    read = read_idx(path, num_dims=array.ndim)
    assert read.dtype == torch.uint8
    np.testing.assert_array_equal(read.numpy(), array)


def test_a_raw_file_cut_short_names_the_file_and_both_sizes(tmp_path: Path):
    path = tmp_path / "cut"
    path.write_bytes(_idx(np.zeros((10, 28, 28)))[:-100])
    with pytest.raises(DataError, match=r"cut is cut short: .* 10 x 28 x 28, which is 7,856 bytes .* holds 7,756\. D"):
        read_idx(path, 3)


def test_a_gzip_file_cut_short_names_the_file_and_both_sizes(tmp_path: Path):
    path = tmp_path / "cut.gz"
    noise = np.random.default_rng(0).integers(
        0, 256, (10, 28, 28)
    )  # noise does not shrink: the half file has half of it
    packed = gzip.compress(_idx(noise))
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(
        DataError, match=r"cut\.gz is cut short \(its gzip stream ends early\).* 7,856 bytes .* holds \d"
    ):
        read_idx(path, 3)


def test_a_damaged_gzip_file_is_refused_even_where_every_byte_is_there(tmp_path: Path):
    path = tmp_path / "damaged.gz"
    packed = bytearray(gzip.compress(_idx(np.zeros((10, 28, 28)))))
    packed[-6] ^= 0xFF  # in the checksum
    path.write_bytes(bytes(packed))
    with pytest.raises(DataError, match=r"damaged\.gz \([\d,]+ bytes\) is damaged \(gzip: .*incorrect data check"):
        read_idx(path, 3)


def test_a_gzip_file_that_lost_only_its_checksum_is_refused(tmp_path: Path):
    path = tmp_path / "torn.gz"
    path.write_bytes(gzip.compress(_idx(np.zeros((10, 28, 28))))[:-8])
    with pytest.raises(DataError, match=r"torn\.gz is cut short .*checksum is missing"):
        read_idx(path, 3)


def test_bytes_after_the_array_are_refused(tmp_path: Path):
    path = tmp_path / "long"
    path.write_bytes(_idx(np.zeros(5)) + b"x")
    with pytest.raises(DataError, match=r"long is too long: .* 13 bytes .* holds 14"):
        read_idx(path, 1)


@pytest.mark.parametrize("size", [0, 3, 9])
def test_a_file_shorter_than_its_header_is_cut_short(tmp_path: Path, size: int):
    path = tmp_path / "tiny"
    path.write_bytes(_idx(np.zeros((2, 2, 2)))[:size])
    with pytest.raises(DataError, match=rf"tiny is cut short.*it has {size}\."):
        read_idx(path, 3)


def test_another_kind_of_file_is_no_idx_file(tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match=r"page\.html is not an IDX file of unsigned bytes: it starts with 0x3c68746d"):
        read_idx(path, 3)
    path.write_bytes(b"\0\0\x0d\x01\0\0\0\0")  # 0x0d: float32
    with pytest.raises(DataError, match=r"not an IDX file of unsigned bytes"):
        read_idx(path, 1)


def test_labels_where_images_belong_are_refused(tmp_path: Path):
    path = tmp_path / "labels"
    path.write_bytes(_idx(np.zeros(5)))
    with pytest.raises(DataError, match=r"array of 1 dims, but 3 are needed.*swapped"):
        read_idx(path, 3)


def test_a_file_that_is_not_there_is_a_data_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"gone cannot be read: No such file"):
        read_idx(tmp_path / "gone", 3)


def test_images_and_labels_must_be_as_many_and_labels_must_be_classes(tmp_path: Path):
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(_idx(np.zeros((4, 2, 2))))
    labels.write_bytes(_idx(np.zeros(3)))
    with pytest.raises(DataError, match=r"4 images, but .* 3 labels"):
        read_classes(images, labels, num_classes=10)
    labels.write_bytes(_idx(np.array([0, 1, 2, 10])))
    with pytest.raises(DataError, match=r"a label 10; labels must be below 10"):
        read_classes(images, labels, num_classes=10)


def test_a_directory_that_the_user_names_is_the_only_one_tried(nowhere: Path):
    _write_set(nowhere / "data" / "fashion-mnist")
    assert len(load_task("fashion-mnist").train) == 200
    with pytest.raises(DataError, match=r"no files of fashion-mnist in .*/empty") as raised:
        load_task("fashion-mnist", nowhere / "empty")
    assert str(nowhere / "data" / "fashion-mnist") not in str(raised.value).split("Fetch")[0]


def test_the_environment_variable_comes_before_the_working_directory(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    _write_set(nowhere / "data" / "fashion-mnist", num=200)
    _write_set(nowhere / "mine" / "fashion-mnist", num=300)
    assert len(load_task("fashion-mnist").train) == 200
    monkeypatch.setenv("LARGEBATCH_DATA", str(nowhere / "mine"))
    assert len(load_task("fashion-mnist").train) == 300


def test_one_data_set_is_never_taken_for_another_that_has_the_same_file_names(nowhere: Path):
    _write_set(nowhere / "data" / "fashion-mnist")
    _write_set(nowhere / "data")
    with pytest.raises(DataError, match=r"no files of mnist in"):
        load_task("mnist")


@pytest.mark.parametrize("below", ["", "fashion-mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("gz", [True, False])
def test_files_are_found_in_every_usual_layout_packed_or_not(nowhere: Path, below: str, gz: bool):
    _write_set(nowhere / "here" / below, gz=gz)
    task = load_task("fashion-mnist", nowhere / "here")
    assert (len(task.train), len(task.held_out)) == (200, 50)
    assert task.train.fetch(torch.arange(3))[1].tolist() == [0, 1, 2]


def test_the_system_folder_is_the_last_of_the_usual_places(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LARGEBATCH_DATA", "/elsewhere")
    order = places("fashion-mnist", "FashionMNIST", None)
    named = [str(path) for path in order if path.name == "fashion-mnist"]
    assert named == ["/elsewhere/fashion-mnist", "data/fashion-mnist", "/usr/share/datasets/fashion-mnist"]


def test_an_incomplete_set_names_the_missing_file(tmp_path: Path):
    _write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"has 3 of 4 files; missing: t10k-labels-idx1-ubyte \(or with \.gz\)"):
        find_idx([tmp_path])


@pytest.mark.parametrize("name", ["fashion-mnist", "mnist"])
def test_absent_data_names_the_paths_and_the_commands_that_fetch_it(nowhere: Path, name: str):
    with pytest.raises(DataError) as raised:
        load_task(name)
    said = str(raised.value)
    for part in (str(nowhere / "data" / name), f"scripts/fetch_data.sh {name}", "no network in this test", "--data"):
        assert part in said
    assert "\n" not in said


def test_a_failed_download_says_why_in_one_line_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("torchvision.datasets", reason="pip install torchvision")

    def fail(root: str, download: bool) -> None:
        (Path(root) / "FashionMNIST" / "raw").mkdir(parents=True)
        raise RuntimeError("no\nroute")

    monkeypatch.setattr(datasets, "FashionMNIST", fail)
    why = download("FashionMNIST", tmp_path / "data" / "fashion-mnist", lambda: None)
    assert why == "torchvision could not download it (RuntimeError: no route)"
    assert not (tmp_path / "data").exists()


def test_a_download_that_works_is_used(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("torchvision.datasets", reason="pip install torchvision")
    monkeypatch.setattr(
        datasets, "FashionMNIST", lambda root, download: _write_set(Path(root) / "FashionMNIST" / "raw", gz=False)
    )
    monkeypatch.setattr(fashion_mnist, "download", download)
    assert len(load_task("fashion-mnist").train) == 200


def _write_json(folder: Path, num: int = 30) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(0).random((10, num, 784)).round(3)
    for digit in range(10):
        (folder / f"{digit}.json").write_text(json.dumps({"data": values[digit].ravel().tolist()}))
    return values


@pytest.mark.parametrize("below", ["digits", "src/digits", ""])
def test_the_json_digits_are_read_and_one_in_five_is_held_out_with_a_warning(nowhere, caplog, below: str):
    values = _write_json(nowhere / "here" / below)
    task = load_task("mnist", nowhere / "here")
    assert (len(task.train), len(task.held_out)) == (240, 60)
    assert "without an official split" in caplog.text and "240 + 60" in caplog.text
    inputs, labels = task.held_out.fetch(torch.arange(60))
    assert labels.tolist() == sorted([*range(10)] * 6)
    train = np.delete(values, np.s_[::5], axis=1)
    expected = (values[:, ::5].reshape(-1, 1, 28, 28) - train.mean()) / train.std()
    np.testing.assert_allclose(inputs.numpy(), expected, atol=1e-5)


def test_idx_files_are_preferred_to_json(nowhere: Path):
    _write_json(nowhere / "data" / "mnist" / "digits")
    _write_set(nowhere / "data" / "mnist" / "MNIST" / "raw")
    assert len(load_task("mnist").train) == 200


def test_a_json_file_cut_short_missing_or_odd_is_one_sentence(nowhere: Path):
    folder = nowhere / "digits"
    _write_json(folder, num=5)
    whole = (folder / "4.json").read_text()
    (folder / "4.json").write_text(whole[:5000])
    with pytest.raises(DataError, match=r"4\.json \(5,000 bytes\) is cut short .*fetch_data\.sh mnist"):
        load_task("mnist", nowhere)
    (folder / "4.json").write_text(json.dumps({"data": [0.5] * 785}))
    with pytest.raises(DataError, match=r"4\.json holds 785 numbers, not a multiple of 784"):
        load_task("mnist", nowhere)
    (folder / "4.json").write_text("[1]")
    with pytest.raises(DataError, match=r"4\.json .* key 'data'"):
        load_task("mnist", nowhere)
    (folder / "4.json").unlink()
    with pytest.raises(DataError, match=r"4\.json cannot be read: No such file"):
        load_task("mnist", nowhere)
