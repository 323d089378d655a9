"""A checkpoint is whole or it is not used; the one before it always can be; any number of workers reads it."""

import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from largebatch.errors import CheckpointError, StorageError
from largebatch.train import checkpoint_files
from largebatch.train.checkpoint import Checkpoints, load_weights, save_weights
from largebatch.train.workers import WorkerLostError
from workers import on_workers

NEWEST, BEFORE = "step-000000020", "step-000000010"


def state_at(step: int, size: int = 40) -> dict:
    """A state that says everywhere which step it is of."""
    return {
        "model": {"weight": torch.full((size, 3), float(step)), "steps": torch.tensor(step)},
        "optimizer": {"param_groups": [{"lr": step / 8, "params": ["weight"]}]},
    }


def step_of(state: dict) -> int:
    """The step of a state; all of it agrees."""
    steps = {*state["model"]["weight"].flatten().tolist(), int(state["model"]["steps"])}
    steps.add(8 * state["optimizer"]["param_groups"][0]["lr"])
    assert len(steps) == 1, f"a state of several steps: {steps}"
    return int(steps.pop())


def saved(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, state_at(step), {"step": step})
    checkpoints.wait()
    return checkpoints


def loaded(folder: Path) -> int | None:
    """The step that is loaded; facts and state agree on it."""
    state = state_at(-8)
    facts = Checkpoints(folder).load(state)
    assert facts is None or facts["step"] == step_of(state)
    return None if facts is None else facts["step"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_was_saved_comes_back_in_place(tmp_path):
    facts = {"crossings": [None, 1.5], "last": (3, 0.1), "rng": torch.get_rng_state(), "key": "k"}
    Checkpoints(tmp_path, asynchronous=False).save(10, state_at(10), facts)
    state = state_at(0)
    weight = state["model"]["weight"]
    found = Checkpoints(tmp_path).load(state)
    assert step_of(state) == 10 and state["model"]["weight"] is weight
    assert torch.equal(found.pop("rng"), facts.pop("rng")) and found == facts


def test_no_checkpoint_is_no_error_and_costs_no_import(tmp_path, root):
    """Studies train for seconds: torch.distributed.checkpoint takes one to import, and waits for the first save."""
    program = (
        "import sys; from pathlib import Path; from largebatch.train.checkpoint import Checkpoints;"
        "folder = Path(sys.argv[1]); assert Checkpoints(folder).load({}) is None; Checkpoints(folder).delete();"
        "assert 'torch.distributed.checkpoint' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=root)


def test_what_is_saved_is_the_state_of_then_not_of_later(tmp_path, monkeypatch):
    changed = threading.Event()
    write = checkpoint_files.Writer.write_data

    def write_later(self, plan, planner):
        assert changed.wait(60)
        return write(self, plan, planner)

    monkeypatch.setattr(checkpoint_files.Writer, "write_data", write_later)
    state, facts = state_at(10), {"step": 10, "list": [1]}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, state, facts)
    state["model"]["weight"].add_(1)
    state["model"]["steps"].add_(1)
    state["optimizer"]["param_groups"][0]["lr"] = 0.0
    facts["step"] = 11
    changed.set()
    checkpoints.wait()
    assert loaded(tmp_path) == 10


def test_saves_in_a_row_leave_the_last_two(tmp_path):
    saved(tmp_path, 10, 20, 30)
    assert names(tmp_path) == [NEWEST, "step-000000030"] and loaded(tmp_path) == 30


def test_a_step_saved_again_is_newer_than_its_first(tmp_path):
    saved(tmp_path, 10)
    for n in range(12):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(10, state_at(10), {"step": 10, "n": n})
        checkpoints.wait()
        assert len(names(tmp_path)) == 2
        assert Checkpoints(tmp_path).load(state_at(0))["n"] == n


def test_a_course_that_was_left_leaves_nothing(tmp_path, caplog):
    """Step 20 is damaged, so the run goes on from 10; its step 15 is then the newest, and 10 the one before."""
    saved(tmp_path, 10, 20)
    (tmp_path / "checkpoints" / NEWEST / "plain.pt").write_bytes(b"")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load(state_at(0)) == {"step": 10}
    checkpoints.save(15, state_at(15), {"step": 15})
    checkpoints.wait()
    assert names(tmp_path) == [BEFORE, "step-000000015"]
    # At the damaged step itself: the one before it is the last good one, not the damaged one.
    saved(tmp_path, 20)
    (tmp_path / "checkpoints" / NEWEST / "plain.pt").write_bytes(b"")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.load(state_at(0))
    checkpoints.save(20, state_at(20), {"step": 20})
    checkpoints.wait()
    assert names(tmp_path) == ["step-000000015", NEWEST + ".1"]


def test_deleting_leaves_nothing(tmp_path):
    for name in ("checkpoint.pt", "checkpoint.pt.previous"):
        (tmp_path / name).write_bytes(b"of layout 1")
    saved(tmp_path, 10, 20).delete()
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    saved(folder, 10, 20)
    return folder


FILES = ["MANIFEST", ".metadata", "plain.pt", "__0_0.distcp"]


@settings(max_examples=150)
@given(name=st.sampled_from(FILES), where=st.floats(0, 1), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_costs_the_newest_checkpoint_and_no_more(two, name, where, bit):
    path = two / "checkpoints" / NEWEST / name
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[round(where * (len(whole) - 1))] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        assert loaded(two) == 10
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "empty", "gone", "longer", "folder"])
def test_a_damaged_file_is_said_and_the_checkpoint_before_it_used(tmp_path, caplog, name, how):
    saved(tmp_path, 10, 20)
    path = tmp_path / "checkpoints" / NEWEST / name
    whole = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "gone":
        path.write_bytes({"cut": whole[:-1], "empty": b"", "longer": whole + b"\0"}[how])
    assert loaded(tmp_path) == 10
    assert f"{NEWEST} is damaged" in caplog.text


def test_when_none_is_whole_nothing_is_loaded_in_silence(two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    for name, file in ((NEWEST, "plain.pt"), (BEFORE, "__0_0.distcp")):
        (tmp_path / "checkpoints" / name / file).write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=rf"{NEWEST} \(plain.pt .*{BEFORE} \(__0_0.* Delete .*checkpoints to start"
    ):
        loaded(tmp_path)


def rewrite(place: Path, **changes) -> None:
    """A manifest that is right again after the files were changed on purpose."""
    document = json.loads((place / "MANIFEST").read_bytes().partition(b"\n")[2])
    document["files"] = {name: checkpoint_files.fingerprint(place / name) for name in document["files"]}
    text = json.dumps(document | changes).encode()
    (place / "MANIFEST").write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def test_another_layout_is_refused_in_one_sentence(two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path / "checkpoints" / NEWEST, layout=3)
    with pytest.raises(CheckpointError, match=r"has layout 3, and this version of largebatch reads 2. Use the version"):
        loaded(tmp_path)


def test_the_single_file_of_layout_1_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"largebatch checkpoint 1\n")
    with pytest.raises(CheckpointError, match=r"checkpoint.pt is a checkpoint of layout 1.*delete the file"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.pop("steps"), "model/steps has no place here"),
        (lambda model: model.update(bias=torch.zeros(2)), "model/bias is not in it"),
        (lambda model: model.update(weight=torch.zeros(3, 40)), r"model/weight is \(40, 3\) in it and \(3, 40\) here"),
    ],
)
def test_another_model_is_refused_by_what_differs_and_stays_as_it_is(two, change, said):
    state = state_at(8)
    change(state["model"])
    with pytest.raises(CheckpointError, match=rf"{NEWEST} was saved by another model or optimizer: {said}\. Choose"):
        Checkpoints(two).load(state)
    assert state["model"]["weight"].unique().numel() == 1 and state["optimizer"]["param_groups"][0]["lr"] == 1


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("/tmp/largebatch-evil",))


@pytest.mark.parametrize("name", [".metadata", "plain.pt"])
def test_no_code_is_run_by_loading(two, tmp_path, name):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    place = tmp_path / "checkpoints" / NEWEST
    if name == ".metadata":
        (place / name).write_bytes(pickle.dumps(Evil()))
    else:
        torch.save({"facts": Evil(), "plain": {}}, place / name)
    rewrite(place)
    with pytest.raises(Exception, match=r"posix.mkdir|nt.mkdir"):
        loaded(tmp_path)
    assert not Path("/tmp/largebatch-evil").exists()


# -------------------------------------------------------------------------------------------------------------- kills


def die_at(call: int, folder: Path) -> None:
    """Save step 20, and be killed by oneself just before the given call that changes the disk."""
    counter = itertools.count()

    def dying(function):
        def wrapped(*args, **kwargs):
            if next(counter) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    for owner, name in (
        (os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"), (os, "write"),
        (Path, "open"), (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"),
    ):  # fmt: skip
        setattr(owner, name, dying(getattr(owner, name)))
    saved(folder, 20)
    os._exit(0)


def test_a_kill_before_any_call_that_changes_the_disk_costs_the_new_checkpoint_at_most(tmp_path):
    context = multiprocessing.get_context("fork")
    steps = []
    for call in itertools.count():
        folder = tmp_path / str(call)
        saved(folder, 5, 10)
        process = context.Process(target=die_at, args=(call, folder))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        steps.append(loaded(folder))
        # Whatever the kill has left, the next save goes through, and all of it is gone.
        saved(folder, 30)
        assert loaded(folder) == 30 and len(names(folder)) == 2
        if process.exitcode == 0:
            break
    assert len(steps) > 10 and steps == sorted(steps) and set(steps) == {10, 20}


def save_for_ever(folder: Path, sender) -> None:
    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder)
    facts = checkpoints.load(state_at(0, 20_000))
    for step in itertools.count(facts["step"] + 1 if facts else 1):
        checkpoints.save(step, state_at(step, 20_000), {"step": step})  # returns when the one before it stands
        sender.send(step - 1)


def kill_while_saving(folder: Path, kills: int) -> None:
    context = multiprocessing.get_context("fork")
    stands = 0
    for seed in range(kills):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=save_for_ever, args=(folder, sender), daemon=True)
        process.start()
        sender.close()
        draw = random.Random(seed)
        try:
            for _ in range(draw.randint(1, 4)):
                stands = receiver.recv()
            threading.Event().wait(draw.uniform(0, 0.05))  # anywhere in what a save does
        finally:
            process.kill()
            process.join()
        while receiver.poll():
            try:
                stands = receiver.recv()
            except EOFError:
                break
        state = state_at(0, 20_000)
        facts = Checkpoints(folder).load(state)
        assert (0 if facts is None else step_of(state)) >= stands
    assert stands > kills / 2


def test_kills_at_random_moments_never_cost_a_checkpoint_that_stood(tmp_path):
    kill_while_saving(tmp_path, kills=3)


@pytest.mark.proofs
def test_20_kills_at_random_moments_never_cost_a_checkpoint_that_stood(tmp_path):
    kill_while_saving(tmp_path, kills=20)


# ------------------------------------------------------------------------------------------------------- many workers


def make(kind: str, adam: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    if kind == "sharded":  # 5 and 3 rows over 2, 3 or 4 workers: uneven, and empty parts too
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    if adam:
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(10 * seed + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(8, 7)).square().sum().backward()
    optimizer.step()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Everything by name, gathered by torch and not by a checkpoint."""
    options = StateDictOptions(full_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    found = {name: value.numpy().copy() for name, value in weights.items()}
    for name, entries in moments["state"].items():
        found |= {f"{name}/{key}": value.numpy().copy() for key, value in entries.items()}
    return found


def group_of(kind: str):
    return None if kind == "alone" else dist.group.WORLD


def train_and_save(rank: int, kind: str, adam: bool, folder: Path):
    model, optimizer = make(kind, adam)
    for seed in range(3):
        take_step(model, optimizer, seed)
    weights, moments = get_state_dict(model, optimizer)
    checkpoints = Checkpoints(folder, group=group_of(kind))
    checkpoints.save(3, {"model": weights, "optimizer": moments}, {"rank": rank})
    state = whole_state(model, optimizer)  # collectives of the job while the checkpoint has its own
    take_step(model, optimizer, seed=9)
    checkpoints.wait()
    return state, whole_state(model, optimizer)


def load_and_go_on(rank: int, kind: str, adam: bool, folder: Path):
    model, optimizer = make(kind, adam)
    weights, moments = get_state_dict(model, optimizer)
    checkpoints = Checkpoints(folder, group=group_of(kind))
    facts = checkpoints.load({"model": weights, "optimizer": moments})
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    state = whole_state(model, optimizer)
    take_step(model, optimizer, seed=9)
    return facts, state, whole_state(model, optimizer)


PAIRS = [
    ("alone", 1, "alone", 1, "sgd"), ("alone", 1, "ddp", 2, "sgd"), ("ddp", 2, "alone", 1, "adamw"),
    ("ddp", 2, "ddp", 2, "sgd"), ("ddp", 4, "ddp", 2, "sgd"), ("ddp", 2, "sharded", 4, "adamw"),
    ("sharded", 4, "ddp", 2, "sgd"), ("sharded", 2, "sharded", 2, "adamw"), ("sharded", 2, "sharded", 2, "sgd"),
    ("sharded", 4, "sharded", 3, "adamw"), ("sharded", 2, "alone", 1, "sgd"), ("alone", 1, "sharded", 3, "adamw"),
]  # fmt: skip


@pytest.mark.parametrize(("writer", "writers", "reader", "readers", "optimizer"), PAIRS)
def test_any_number_of_workers_reads_what_any_other_wrote_to_the_bit(
    tmp_path, writer, writers, reader, readers, optimizer
):
    adam = optimizer == "adamw"
    written = on_workers(writers, train_and_save, writer, adam, tmp_path)
    read = on_workers(readers, load_and_go_on, reader, adam, tmp_path)
    # Batch norm's statistics differ between workers; rank 0's are those that go on.
    before, after = written[0]
    for facts, state, _ in read:
        assert facts == {"rank": 0}
        assert state.keys() == before.keys()
        for name, value in before.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)
    if (writer, writers) == (reader, readers):  # and then the next step is the same step
        for name, value in after.items():
            np.testing.assert_array_equal(read[0][2][name], value, err_msg=name)


def save_where_files_may_not_grow(rank: int, folder: Path, full: tuple[int, ...]):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(size: int) -> dict:
        whole = torch.arange(float(size))
        return {
            "model": {"w": torch.distributed.tensor.distribute_tensor(whole, mesh, [torch.distributed.tensor.Shard(0)])}
        }

    checkpoints = Checkpoints(folder, group=dist.group.WORLD)
    checkpoints.save(1, state(100), {"step": 1})
    checkpoints.wait()
    if rank in full:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    checkpoints.save(2, state(50_000), {"step": 2})
    try:
        checkpoints.wait()
        said = "nothing"
    except StorageError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    fresh = state(100)
    fresh["model"]["w"].mul_(0)
    facts = checkpoints.load(fresh)
    there = sorted(path.name for path in checkpoints.folder.iterdir())
    total = float(fresh["model"]["w"].full_tensor().sum())
    checkpoints.save(3, state(100), {"step": 3})  # and with room again it goes on
    checkpoints.wait()
    return said, facts, total, there, checkpoints.load(fresh)


@pytest.mark.parametrize("full", [(0,), (1,), (0, 1)], ids=str)
def test_a_disk_that_takes_no_more_is_one_sentence_on_every_rank_and_the_last_good_one_stays(tmp_path, full):
    for said, facts, total, there, later in on_workers(2, save_where_files_may_not_grow, tmp_path, full):
        assert said.startswith(f"cannot write {tmp_path}/checkpoints/step-000000002: File too large. What was there")
        assert "\n" not in said
        assert facts == {"step": 1} and total == 99 * 100 / 2 and there == ["step-000000001"]
        assert later == {"step": 3}


def fill_disk(rank: int, folder: Path):
    checkpoints = Checkpoints(folder, group=dist.group.WORLD)
    step = 0
    try:
        for step in itertools.count(1):
            checkpoints.save(step, state_at(step, 2_000 * step), {"step": step})
    except StorageError as error:
        state = state_at(0, 2_000 * (step - 2))
        return str(error), step, checkpoints.load(state), step_of(state)


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
def test_a_real_full_disk_in_the_middle_of_a_save(small_disk):
    for said, step, facts, loaded_step in on_workers(2, fill_disk, small_disk):
        assert "No space left on device" in said and step > 3
        # `save` of this step raised the error of the one in flight, that of the step before it.
        assert f"step-{step - 1:09d}" in said and facts == {"step": step - 2} and loaded_step == step - 2


def lose_a_worker(rank: int, folder: Path):
    checkpoints = Checkpoints(folder, group=dist.group.WORLD)
    checkpoints.save(10, state_at(10), {"step": 10})
    checkpoints.wait()
    if rank == 1:
        checkpoint_files.Writer.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(20, state_at(20), {"step": 20})
    with pytest.raises(WorkerLostError, match=r"step-000000020 was not saved, since another worker .*run the same"):
        checkpoints.wait()
    (folder / "said").touch()


def test_a_worker_killed_in_the_middle_of_a_save_hangs_nobody(tmp_path):
    with pytest.raises(AssertionError, match=r"worker 1 died|worker 0 raised"):  # the barrier after the body, too
        on_workers(2, lose_a_worker, tmp_path)
    assert (tmp_path / "said").exists()
    assert loaded(tmp_path) == 10


# ------------------------------------------------------------------------------------------------------ final weights


def test_weights_come_back(tmp_path):
    save_weights(tmp_path / "model.pt", "digits", {"w": torch.arange(5.0)})
    assert load_weights(tmp_path / "model.pt")["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other", "gone"])
def test_damaged_weights_are_not_used(tmp_path, damage):
    path = tmp_path / "model.pt"
    save_weights(path, "digits", {"w": torch.arange(5.0)})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    changed = {"flip": data, "cut": data[:-10], "empty": b"", "other": b"PK\x03\x04" + bytes(100), "gone": b""}[damage]
    path.unlink() if damage == "gone" else path.write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"model.pt cannot be"):
        load_weights(path)
