"""A checkpoint is whole or it is not used; the one before it always can be."""

import pytest
import torch

from largebatch.errors import CheckpointError
from largebatch.train.checkpoint import delete_checkpoints, load_checkpoint, previous_of, save_checkpoint


def test_what_was_saved_comes_back(tmp_path):
    state = {"w": torch.arange(5.0), "n": 3, "nested": [{"a": 1.5}, None]}
    save_checkpoint(tmp_path / "c.pt", state)
    loaded = load_checkpoint(tmp_path / "c.pt")
    assert torch.equal(loaded["w"], state["w"]) and loaded["nested"] == state["nested"]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_it_used(tmp_path, caplog, damage):
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"n": 1})
    save_checkpoint(path, {"n": 2})
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes({"flip": data, "cut": data[:-10], "empty": b"", "other": b"PK\x03\x04" + bytes(100)}[damage])
    assert load_checkpoint(path)["n"] == 1
    assert "c.pt is damaged" in caplog.text


def test_when_none_is_whole_nothing_is_loaded_in_silence(tmp_path):
    path = tmp_path / "c.pt"
    for n in (1, 2):
        save_checkpoint(path, {"n": n})
    path.write_bytes(b"x")
    previous_of(path).write_bytes(b"y")
    with pytest.raises(CheckpointError, match="Delete these files"):
        load_checkpoint(path)


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"n": 1})
    save_checkpoint(tmp_path / "other.pt", {"n": 2})
    path.replace(previous_of(path))
    (tmp_path / "other.pt").replace(tmp_path / "c.pt.fresh")
    assert load_checkpoint(path)["n"] == 2


def test_no_checkpoint_is_no_error(tmp_path):
    assert load_checkpoint(tmp_path / "c.pt") is None


def test_deleting_leaves_nothing(tmp_path):
    for n in (1, 2):
        save_checkpoint(tmp_path / "c.pt", {"n": n})
    delete_checkpoints(tmp_path / "c.pt")
    assert not list(tmp_path.iterdir())


def test_no_code_is_run_by_loading(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    save_checkpoint(tmp_path / "c.pt", {"evil": Evil()})
    with pytest.raises(Exception, match=r"(?i)weights_only|unsupported"):
        load_checkpoint(tmp_path / "c.pt")
