"""Does a DataLoader deal out one shuffle an epoch, and go on exactly where the loop stood?"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from largebatch.errors import ConfigError
from largebatch.recipe.batch_sampler import ShuffledBatches, ShuffledLoader
from oracles.recipe_shuffle import permutation, step_sizes, stream
from workers import on_workers

SEED = 3


class Numbers(Dataset[int]):
    """Examples that are their own indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Seeds(Numbers):
    """Examples that are the random seed of the process that fetches them."""

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


def loaders(size: int, world_size: int, **options: Any) -> list[ShuffledLoader]:
    options = {"seed": SEED} | options
    return [ShuffledLoader(Numbers(size), rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def run_steps(workers: list[ShuffledLoader], num_steps: int) -> list[list[int]]:
    """What all workers together use in each of so many steps, in the global order; passes follow one another."""
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    for loader in workers:
        endless = chain.from_iterable(iter(lambda loader=loader: iter(loader), None))
        for number, microbatch in enumerate(islice(endless, num_steps * loader.accumulation)):
            steps[number // loader.accumulation] += microbatch.tolist()
    return steps


@st.composite
def dealt(draw: st.DrawFn) -> dict[str, Any]:
    """(examples, workers, batch, microbatch) of some worlds that share the data."""
    size = draw(st.integers(1, 40))
    worlds = []
    for _ in range(2):
        world_size = draw(st.integers(1, min(4, size)))
        batch = world_size * draw(st.integers(1, size // world_size))
        worlds.append({"world_size": world_size, "batch": batch, "microbatch": draw(st.integers(1, size))})
    return {"size": size, "worlds": worlds}


@settings(max_examples=60)
@given(deal=dealt(), seed=st.integers(0, 2**64 - 1))
def test_what_all_workers_use_in_a_pass_is_one_permutation_each_example_once(deal: dict[str, Any], seed: int):
    # Goyal 2017, remark 4. The pass goes on into the next epoch to fill its last batch.
    size, (world, _) = deal["size"], deal["worlds"]
    workers = loaders(size, seed=seed, **world)
    position = 0
    for epoch in range(3):
        sizes = step_sizes(size, world["batch"], position, keep_short=False)
        assert {loader.epoch for loader in workers} == {epoch}
        assert {len(loader) for loader in workers} == {len(sizes) * workers[0].accumulation}
        parts = [[batch.tolist() for batch in loader] for loader in workers]
        assert len({len(part) for part in parts}) == 1  # all workers do as many backwards
        assert max(map(len, chain(*parts))) <= world["microbatch"]
        used = step_by_step(parts, workers[0].accumulation)
        assert [len(step) for step in used] == sizes
        assert list(chain(*used)) == stream(size, seed, position, sum(sizes))
        in_epoch = list(chain(*used))[: (epoch + 1) * size - position]
        assert in_epoch == permutation(size, seed, epoch)[position - epoch * size :]
        position += sum(sizes)
        assert {loader.position for loader in workers} == {position}


def step_by_step(parts: list[list[list[int]]], accumulation: int) -> list[list[int]]:
    """The examples of each step, worker after worker."""
    num_steps = len(parts[0]) // accumulation
    return [
        list(chain(*(chain(*part[step * accumulation : (step + 1) * accumulation]) for part in parts)))
        for step in range(num_steps)
    ]


@settings(max_examples=60)
@given(deal=dealt())
def test_a_short_last_batch_is_kept_and_dealt_out_to_all_or_refused(deal: dict[str, Any]):
    size, (world, _) = deal["size"], deal["worlds"]
    rest = size % world["batch"]
    try:
        workers = loaders(size, keep_short=True, **world)
    except ConfigError as error:
        local_batch = world["batch"] // world["world_size"]
        parts = world["world_size"] * -(-local_batch // world["microbatch"])
        assert 0 < rest < parts
        assert f"an epoch by a batch of {rest}, too small" in str(error)
        return
    for epoch in range(2):
        sizes = step_sizes(size, world["batch"], epoch * size, keep_short=True)
        parts = [[batch.tolist() for batch in loader] for loader in workers]
        assert {len(part) for part in parts} == {len(sizes) * workers[0].accumulation} == {len(workers[0])}
        assert all(0 < len(batch) <= world["microbatch"] for part in parts for batch in part)
        used = step_by_step(parts, workers[0].accumulation)
        assert [len(step) for step in used] == sizes
        assert list(chain(*used)) == permutation(size, SEED, epoch)
        shares = [sum(map(len, part[-workers[0].accumulation :])) for part in parts]
        assert max(shares) - min(shares) <= workers[0].accumulation


@settings(max_examples=60)
@given(deal=dealt(), num_steps=st.integers(0, 12), into=st.integers(0, 3), data=st.data())
def test_a_state_goes_on_in_any_world_with_any_batch(deal: dict[str, Any], num_steps: int, into: int, data: Any):
    size, (first, second) = deal["size"], deal["worlds"]
    before = loaders(size, **first)
    used = run_steps(before, num_steps)
    for loader in before:  # some microbatches of a step that is not finished: they are used again
        list(islice(loader, min(into, loader.accumulation - 1)))
    states = [json.loads(json.dumps(loader.state_dict())) for loader in before]
    assert states == [{"seed": SEED, "num_examples": size, "position": num_steps * first["batch"]}] * len(before)
    after = loaders(size, **second)
    for loader in after:
        loader.load_state_dict(states[0])
    used += run_steps(after, 5)
    total = num_steps * first["batch"] + 5 * second["batch"]
    assert list(chain(*used)) == stream(size, SEED, 0, total)


@settings(max_examples=10)
@given(
    num_workers=st.integers(0, 2), prefetch=st.integers(1, 5), persistent=st.booleans(), num_batches=st.integers(0, 13),
    other_workers=st.integers(0, 1),
)  # fmt: skip
def test_loader_processes_that_draw_ahead_do_not_move_the_position(
    num_workers: int, prefetch: int, persistent: bool, num_batches: int, other_workers: int
):
    # 20 examples in batches of 6: passes of 4, 3 and 3 steps of 2 microbatches; the loop stops anywhere in them.
    options: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        options |= {"prefetch_factor": prefetch, "persistent_workers": persistent}
    (loader,) = loaders(20, 1, batch=6, microbatch=3, **options)
    endless = chain.from_iterable(iter(lambda: iter(loader), None))
    used = [batch.tolist() for batch in islice(endless, num_batches)]
    assert loader.position == num_batches // 2 * 6
    assert list(chain(*used)) == stream(20, SEED, 0, 3 * num_batches)
    (again,) = loaders(20, 1, batch=6, microbatch=3, num_workers=other_workers)
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in islice(again, 2)] == [
        stream(20, SEED, loader.position, 3),
        stream(20, SEED, loader.position + 3, 3),
    ]


@pytest.mark.parametrize("persistent", [True, False])
def test_what_was_drawn_is_more_than_what_was_used(persistent: bool, monkeypatch: pytest.MonkeyPatch):
    drawn: list[int] = []
    microbatches = ShuffledBatches.microbatches
    monkeypatch.setattr(
        ShuffledBatches, "microbatches", lambda self, position: drawn.append(position) or microbatches(self, position)
    )
    (loader,) = loaders(40, 1, batch=4, num_workers=2, prefetch_factor=3, persistent_workers=persistent)
    used: list[int] = []
    for number, batch in enumerate(loader, start=1):
        used += batch.tolist()
        if number == 3:
            break
    assert loader.position == 12
    assert len(drawn) >= 2 * 3 + 3  # that the test tests something
    for batch in loader:  # a loop that was left early goes on
        used += batch.tolist()
    assert used == permutation(40, SEED, 0)
    assert next(iter(loader)).tolist() == permutation(40, SEED, 1)[:4]


def train(folder: Path, rank: int, world_size: int, num_workers: int, die_at: int | None, num_steps: int) -> None:
    """A loop that writes down what it used and where it stands, and may be killed in the middle of a step."""
    torch.set_num_threads(1)
    loader = ShuffledLoader(
        Numbers(50), batch=8, seed=SEED, rank=rank, world_size=world_size, microbatch=2, num_workers=num_workers,
        endless=True,
    )  # fmt: skip
    saved = folder / "state.json"
    if saved.exists():
        loader.load_state_dict(json.loads(saved.read_text()))
    log = folder / f"used-{world_size}-{rank}"
    step, used = 0, []
    for number, batch in enumerate(loader, start=1):
        used += batch.tolist()
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if number % loader.accumulation == 0:
            step += 1
            log.write_text("\n".join([*(log.read_text().splitlines() if log.exists() else []), json.dumps(used)]))
            used = []
            if world_size == 1:
                (folder / "fresh").write_text(json.dumps(loader.state_dict()))
                (folder / "fresh").replace(saved)
            if step == num_steps:
                return


@pytest.mark.parametrize(("num_workers", "others"), [(2, 0), (0, 1)])
def test_after_a_kill_new_processes_go_on_exactly_where_the_loop_stood(tmp_path: Path, num_workers: int, others: int):
    # Killed with SIGKILL in the middle of step 9, in epoch 1 of 6.25 steps each; two workers take over from one.
    context = multiprocessing.get_context("fork")
    killed = context.Process(target=train, args=(tmp_path, 0, 1, num_workers, 9, 20))
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    workers = [context.Process(target=train, args=(tmp_path, rank, 2, others, None, 11)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    before, *after = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("used-1-0", "used-2-0", "used-2-1")
    )
    assert json.loads((tmp_path / "state.json").read_text())["position"] == 9 * 8 == sum(map(len, before))
    used = [*chain(*before), *chain(*(step for pair in zip(*after, strict=True) for step in pair))]
    assert used == stream(50, SEED, 0, 20 * 8)


def test_lightning_saves_the_position_in_its_own_checkpoints_and_goes_on_there(tmp_path: Path):
    # It saves the state of any loader that has one. 20 examples in batches of 6 are passes of 4, 3 and 3 steps; the
    # checkpoints after steps 5 and 7 are in the middle and at the end of the second.
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.used: list[list[int]] = []

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            self.used.append(batch.tolist())
            return self.weight * batch.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    def fit(num_workers: int, resumed: Path | None = None) -> list[list[int]]:
        model = Model()
        saver = lightning.pytorch.callbacks.ModelCheckpoint(
            dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}"
        )
        trainer = lightning.Trainer(
            max_epochs=3, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[] if resumed else [saver], enable_checkpointing=not resumed,
            default_root_dir=tmp_path,
        )  # fmt: skip
        (loader,) = loaders(20, 1, batch=6, microbatch=3, num_workers=num_workers)
        trainer.fit(model, loader, ckpt_path=resumed)
        return model.used

    whole = fit(1)
    assert list(chain(*whole)) == stream(20, SEED, 0, 60)
    for step in (5, 7):
        assert fit(0, tmp_path / f"step={step}.ckpt") == whole[2 * step :]


def test_an_endless_loader_goes_from_epoch_to_epoch_and_has_no_length():
    (loader,) = loaders(7, 1, batch=3, endless=True)
    assert list(chain(*(batch.tolist() for batch in islice(loader, 9)))) == stream(7, SEED, 0, 27)
    assert (loader.position, loader.epoch) == (27, 3)
    with pytest.raises(TypeError, match="endless and have no length"):
        len(loader)
    kept = loaders(7, 1, batch=3, endless=True, keep_short=True)[0]
    assert [len(batch) for batch in islice(kept, 6)] == [3, 3, 1, 3, 3, 1]


def test_the_length_is_that_of_the_whole_pass_until_the_loop_has_left_it():
    # Progress bars, and loops that compare a microbatch's number with it, resumed ones too. 10 examples in batches of
    # 4 are passes of 3, 2 and 3 steps.
    (loader,) = loaders(10, 1, batch=4, num_workers=1)
    assert [[len(loader) for _ in loader] for _ in range(3)] == [[3] * 3, [2] * 2, [3] * 3]
    (again,) = loaders(10, 1, batch=4)
    again.load_state_dict({"seed": SEED, "num_examples": 10, "position": 8})
    assert (len(again), len(list(again)), len(again)) == (3, 1, 2)


def test_a_batch_sampler_alone_shuffles_anew_in_every_pass():
    batches = ShuffledBatches(10, batch=5, seed=SEED)
    passes = [[batch.tolist() for batch in DataLoader(Numbers(10), batch_sampler=batches)] for _ in range(2)]
    assert [list(chain(*used)) for used in passes] == [permutation(10, SEED, epoch) for epoch in (0, 1)]
    assert list(chain(*ShuffledBatches(10, batch=5, seed=SEED, start=15))) == permutation(10, SEED, 1)[5:]


def job(rank: int) -> tuple[list[list[int]], int]:
    loader = ShuffledLoader(Numbers(24), batch=12, seed=SEED, microbatch=2)
    return [batch.tolist() for batch in loader], loader.accumulation


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rank_and_world_size_are_those_of_the_job(world_size: int):
    results = on_workers(world_size, job)
    accumulation = 6 // world_size + (world_size == 4)  # shares of 12, 6 and 3 in microbatches of at most 2
    assert {count for _, count in results} == {accumulation}
    used = step_by_step([part for part, _ in results], accumulation)
    assert list(chain(*used)) == permutation(24, SEED, 0)


def test_neither_an_iteration_nor_a_resume_draws_from_torchs_random_numbers():
    before = torch.get_rng_state()
    for num_workers in (0, 2):
        (loader,) = loaders(12, 1, batch=4, num_workers=num_workers)
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_loader_processes_draw_differently_on_each_worker_and_alike_after_a_resume():
    def seeds(position: int, rank: int, **options: Any) -> list[int]:
        loader = ShuffledLoader(
            Seeds(12), batch=4, seed=SEED, rank=rank, world_size=2, num_workers=1, collate_fn=list, **options
        )
        loader.load_state_dict({"seed": SEED, "num_examples": 12, "position": position})
        return next(iter(loader))

    assert seeds(0, 0) == seeds(0, 0)
    assert len({seeds(position, rank)[0] for position in (0, 12) for rank in (0, 1)}) == 4
    own = torch.Generator().manual_seed(1)
    assert seeds(0, 0, generator=own) != seeds(0, 0)
    assert not torch.equal(own.get_state(), torch.Generator().manual_seed(1).get_state())


def test_an_older_iteration_may_not_move_the_position_too():
    (loader,) = loaders(12, 1, batch=4)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(ConfigError, match="a newer iteration of this ShuffledLoader has begun"):
        next(older)
    assert next(newer).tolist() == stream(12, SEED, 4, 4)
    loader.load_state_dict({"seed": SEED, "num_examples": 12, "position": 0})
    with pytest.raises(ConfigError, match="or a state was loaded"):
        next(newer)


def test_a_position_that_another_loader_moved_is_not_saved():
    # accelerate's prepare makes a loader of its own from the batch sampler: ours would stand at 0 for ever.
    (loader,) = loaders(12, 1, batch=4)
    list(loader)
    for _ in DataLoader(Numbers(12), batch_sampler=loader.batch_sampler):
        pass
    with pytest.raises(ConfigError, match=r"another loader drew .* leave it out of prepare"):
        loader.state_dict()
    loader.load_state_dict({"seed": SEED, "num_examples": 12, "position": 4})
    assert loader.state_dict()["position"] == 4


class Endless(IterableDataset[int]):
    """Data without a length."""

    def __iter__(self) -> Any:
        return iter(())


def resume(state: dict[str, Any], **options: Any) -> Callable[[], None]:
    return lambda: loaders(10, 2, batch=4, **options)[0].load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: loaders(400, 8, batch=250),
            "a batch of 250 cannot be dealt out evenly to 8 workers. The nearest that can: 248 or 256.",
        ),
        (lambda: loaders(10, 2, batch=12), "a batch of 12 is larger than the data, which has 10 examples"),
        (lambda: loaders(10, 2, batch=4, microbatch=0), "a microbatch has at least 1 example; got 0"),
        (lambda: ShuffledBatches(10, batch=4, seed=0, rank=1), "give both rank and world_size or neither; got rank=1"),
        (lambda: ShuffledBatches(10, batch=4, seed=0, rank=2, world_size=2), "there is no worker 2 among 2"),
        (lambda: ShuffledBatches(10, batch=4, seed=0, start=-4), "start at 0; got start=-4"),
        (
            lambda: loaders(10, 3, batch=9, keep_short=True),
            "keep_short=True would end an epoch by a batch of 1, too small for 3 worker(s) of 1 microbatch(es) to have "
            "an example in each. Use keep_short=False, which fills the batch from the next epoch, or another batch.",
        ),
        (lambda: loaders(10, 1, batch=4, shuffle=True), "shuffle chooses examples, which batch, seed and microbatch"),
        (lambda: loaders(10, 1, batch=4, num_workers=1, in_order=False), "in_order=False gives batches in an order"),
        (lambda: ShuffledLoader(Endless(), batch=4, seed=0), "Endless has no length"),
        (
            resume({"seed": 4, "num_examples": 10, "position": 0}),
            "the state is of seed=4, this loader of seed=3: the examples would not go on in the same order.",
        ),
        (resume({"seed": 3, "num_examples": 11, "position": 0}), "the state is of num_examples=11, this loader of"),
        (resume({"epoch": 3}), "this is no state of a ShuffledLoader, which has seed, num_examples, position"),
        (resume({"seed": 3, "num_examples": 10, "position": -1}), "start at 0; got start=-1"),
        (resume({"seed": 3, "num_examples": 10, "position": 1.5}), "position is a whole number; got 1.5"),
        (
            resume({"seed": 3, "num_examples": 10, "position": 9}, keep_short=True),
            "keep_short=True would end an epoch by a batch of 1, too small for 2 worker(s)",
        ),
    ],
)
def test_what_cannot_be_dealt_out_or_resumed_is_refused_with_its_values(call: Callable[[], None], words: str):
    with pytest.raises(ConfigError) as error:
        call()
    assert words in str(error.value)


def test_a_job_that_is_not_started_yet_is_not_taken_for_one_worker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"launched with 8 workers, but torch\.distributed has not been started"):
        ShuffledBatches(16, batch=8, seed=0)
    assert ShuffledBatches(16, batch=8, seed=0, rank=1, world_size=8).rank == 1


def test_the_oracle_counts_steps_as_goyal_does():
    # Sec. 2.2: 156.39 steps an epoch at 8,192: 157 begin in the first. Small: 10 examples by 4 are 3, 2 and 3 steps.
    assert [len(step_sizes(10, 4, start, keep_short=False)) for start in (0, 12, 20)] == [3, 2, 3]
    assert list(accumulate(step_sizes(10, 4, 0, keep_short=True))) == [4, 8, 10]
    assert len(step_sizes(1_281_167, 8192, 0, keep_short=False)) == 157
    assert ShuffledBatches(1_281_167, batch=8192, seed=0).pass_length(0) == 157


def test_numpy_integers_count_as_pythons():
    count, data = np.int64, list(range(100))
    given = ShuffledLoader(data, batch=count(8), seed=count(3), microbatch=count(4), rank=count(1), world_size=count(2))
    same = ShuffledLoader(data, batch=8, seed=3, microbatch=4, rank=1, world_size=2)
    assert [part.tolist() for part in given] == [part.tolist() for part in same]
    assert json.loads(json.dumps(given.state_dict())) == same.state_dict()
    again = ShuffledLoader(data, batch=8, seed=3)
    again.load_state_dict({**same.state_dict(), "position": count(16)})
    assert json.dumps(again.state_dict()["position"]) == "16"


@pytest.mark.parametrize("name", ["batch", "seed", "microbatch", "rank", "world_size"])
@pytest.mark.parametrize("value", ["8", 2.5, 8.0, float("nan")])
def test_what_is_no_whole_number_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is a whole number; got {value!r}"):
        ShuffledLoader(list(range(100)), **{"batch": 8, "seed": 0, "rank": 0, "world_size": 1, name: value})
