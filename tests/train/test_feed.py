"""What a feed gives is a function of (seed, position), whatever fetches it; and its loaders end when it does."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import linear_task
from largebatch.errors import ConfigError, DataError, MissingExtraError
from largebatch.recipe.sampler import ShuffledStream, draws
from largebatch.train.feed import Feed

CPU = torch.device("cpu")
NUM_EXAMPLES = 100


def shifted(batch, random):
    return batch[0] + random[:, :4], batch[1]


class Augmenting:
    """Rows of numbers that add their draws themselves and leave out whatever `bad` names."""

    def __init__(self, bad=()):
        self.bad, self._skipped = set(bad), []

    def __len__(self):
        return NUM_EXAMPLES

    def fetch(self, indices):
        raise AssertionError("training examples are fetched augmented")

    def fetch_augmented(self, indices, draws):
        assert draws.dtype == torch.float32
        kept = torch.tensor([int(index) not in self.bad for index in indices])
        self._skipped += [(f"row {int(index)}", "drawn to be bad") for index in indices[~kept]]
        return indices[kept].double()[:, None] + draws[kept].double(), indices[kept]

    def take_skipped(self):
        taken, self._skipped = self._skipped, []
        return taken


class Failing(Augmenting):
    """Row 70 of the data cannot be read, in a way that its error says."""

    error = DataError("picture 70 is cut short: fetch it again.")

    def fetch_augmented(self, indices, draws):
        if 70 in indices:
            raise self.error
        return super().fetch_augmented(indices, draws)


class Killing(Augmenting):
    def fetch_augmented(self, indices, draws):
        if 70 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fetch_augmented(indices, draws)


def with_split(split, **changes):
    from dataclasses import replace

    return replace(linear_task(num_examples=NUM_EXAMPLES), train=split, **changes)


def take(task, num_steps, **settings):
    feed = Feed(task, **({"seed": 3, "batch": 12, "microbatch": 5, "start": 0, "device": CPU} | settings))
    try:
        return [feed.step() for _ in range(num_steps)]
    finally:
        feed.close()


def flat(steps):
    return [tensor for step in steps for batch in step for tensor in batch]


def assert_same_bits(ones, others):
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def oracle_step(task, *, seed, batch, microbatch, start, rank, world_size):
    """A step's microbatches said once more, example by example, from the stream's positions alone."""
    stream, share = ShuffledStream(NUM_EXAMPLES, seed), batch // world_size
    positions = [start + rank * share + offset for offset in range(share)]
    rows = [(int(stream.indices(position, 1)[0]), position // NUM_EXAMPLES) for position in positions]
    parts = [rows[first : first + microbatch] for first in range(0, share, microbatch)]
    microbatches = []
    for part in parts:
        examples = [tuple(tensor[index] for tensor in task.train.tensors) for index, _ in part]
        random = [draws(seed, epoch, np.array([index]))[0].astype(np.float32) for index, epoch in part]
        batch = tuple(torch.stack(column) for column in zip(*examples, strict=True))
        microbatches.append(shifted(batch, torch.from_numpy(np.stack(random))))
    return microbatches


@settings(max_examples=40)
@given(data=st.data())
def test_a_step_is_the_rank_s_run_of_the_global_batch_cut_and_augmented(data):
    """Goyal 2017, remark 4; across an epoch's end too, where the draws become the next epoch's."""
    world_size = data.draw(st.integers(1, 4))
    batch = world_size * data.draw(st.integers(1, NUM_EXAMPLES // world_size))
    where = {
        "seed": data.draw(st.integers(0, 2**64 - 1)), "batch": batch, "microbatch": data.draw(st.integers(1, batch)),
        "start": data.draw(st.integers(0, 5 * NUM_EXAMPLES)), "rank": data.draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
    }  # fmt: skip
    task = linear_task(num_examples=NUM_EXAMPLES, augment=shifted)
    first, second = take(task, 2, **where)
    assert_same_bits(flat([first]), flat([oracle_step(task, **where)]))
    assert_same_bits(flat([second]), flat([oracle_step(task, **where | {"start": where["start"] + batch})]))


@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("task", ["augment", "fetch_augmented", "plain"])
def test_any_number_of_loaders_gives_the_same_bits(task, loaders):
    made = {
        "augment": lambda: linear_task(num_examples=NUM_EXAMPLES, augment=shifted),
        "fetch_augmented": lambda: with_split(Augmenting(bad=[3, 41])),
        "plain": lambda: linear_task(num_examples=NUM_EXAMPLES),
    }[task]
    alone, ahead = (take(made(), 11, start=95, rank=1, world_size=2, loaders=n) for n in (0, loaders))
    assert_same_bits(flat(alone), flat(ahead))


def test_a_feed_that_begins_where_another_was_left_goes_on_as_it_would_have():
    """What was fetched ahead is no part of the position: the loop's own progress is all there is."""
    task = linear_task(num_examples=NUM_EXAMPLES, augment=shifted)
    whole = take(task, 9, loaders=2)
    parts = take(task, 4, loaders=2) + take(task, 5, start=4 * 12, loaders=1)
    assert_same_bits(flat(whole), flat(parts))


def test_a_changed_number_of_workers_keeps_the_global_order():
    task = linear_task(num_examples=NUM_EXAMPLES)
    alone = take(task, 3, microbatch=12)
    ranks = [take(task, 3, microbatch=12, rank=rank, world_size=3) for rank in range(3)]
    for step in range(3):
        together = torch.cat([ranks[rank][step][0][0] for rank in range(3)])
        assert torch.equal(together, alone[step][0][0])


def test_loaders_move_no_random_number_of_torch_s():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(linear_task(num_examples=NUM_EXAMPLES), 2, loaders=2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("loaders", [0, 2])
def test_what_was_left_out_is_added_up_by_name_and_said_once(loaders, caplog):
    feed = Feed(
        with_split(Augmenting(bad=[3, 41])), seed=3, batch=50, microbatch=20, start=0, device=CPU, loaders=loaders
    )
    with caplog.at_level(logging.WARNING):
        counts = [sum(len(labels) for _, labels in feed.step()) for _ in range(4)]
    assert sum(counts) == 2 * NUM_EXAMPLES - 4
    assert feed.skipped == {"row 3": 2, "row 41": 2}
    assert sorted(record.message for record in caplog.records) == [
        f"left out row {row}: drawn to be bad" for row in (3, 41)
    ]
    feed.close()


def test_what_was_left_out_ahead_of_the_loop_is_not_counted_yet():
    """All 100 rows are fetched ahead within the first two steps; only what the loop had may be counted."""
    feed = Feed(with_split(Augmenting(bad=range(10))), seed=3, batch=5, microbatch=1, start=0, device=CPU, loaders=2)
    had = [int(index) for _ in range(4) for index in ShuffledStream(NUM_EXAMPLES, 3).indices(5 * _, 5)]
    for _ in range(4):
        feed.step()
    assert feed.skipped == {f"row {index}": 1 for index in had if index < 10}
    feed.close()


def run_to_the_error(split, loaders):
    feed = Feed(with_split(split), seed=3, batch=10, microbatch=5, start=0, device=CPU, loaders=loaders)
    processes = list(feed._processes)
    try:
        for _ in range(NUM_EXAMPLES // 10):
            feed.step()
    finally:
        feed.close()
        assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize(
    "error", [Failing.error, MissingExtraError("streaming", "shards", "reading shards")], ids=["data", "extra"]
)
def test_a_loader_s_error_reaches_the_loop_as_the_one_sentence_it_was(error, loaders, monkeypatch):
    monkeypatch.setattr(Failing, "error", error)
    with pytest.raises(type(error)) as caught:
        run_to_the_error(Failing(), loaders)
    assert str(caught.value) == str(error)


def test_an_error_arrives_where_its_step_does_although_loaders_met_it_earlier():
    stream = ShuffledStream(NUM_EXAMPLES, 3)
    turn = next(step for step in range(10) if 70 in stream.indices(10 * step, 10))
    feed = Feed(with_split(Failing()), seed=3, batch=10, microbatch=10, start=0, device=CPU, loaders=2)
    for _ in range(turn):
        feed.step()
    with pytest.raises(DataError, match="picture 70"):
        feed.step()
    feed.close()


def test_a_killed_loader_is_one_sentence_that_says_by_what():
    with pytest.raises(DataError, match=r"^loader process \d+, one of 2, was killed by SIGKILL, .*fewer loaders"):
        run_to_the_error(Killing(), 2)


def test_a_loader_s_death_waits_for_the_next_step_and_interrupts_no_other_line():
    """A DataLoader's own handler would raise in the middle of whatever the loop does, a save say."""
    handler = signal.getsignal(signal.SIGCHLD)
    feed = Feed(with_split(Augmenting()), seed=3, batch=10, microbatch=5, start=0, device=CPU, loaders=2)
    assert signal.getsignal(signal.SIGCHLD) == handler
    feed.close()


def test_a_feed_cannot_be_used_after_close_and_closes_twice():
    feed = Feed(linear_task(), seed=0, batch=8, microbatch=8, start=0, device=CPU, loaders=1)
    feed.close()
    feed.close()
    with pytest.raises(ConfigError, match="closed"):
        feed.step()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"microbatch": 0}, "microbatch >= 1"),
        ({"loaders": -1}, "loaders >= 0"),
        ({"batch": 10, "world_size": 4}, "8 or 12"),
        ({"batch": 101}, "at most 100"),
        ({"rank": 2, "world_size": 2}, "no worker 2"),
        ({"start": -1}, "start at 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_starts(changes, words):
    settings = {"seed": 0, "batch": 10, "microbatch": 5, "start": 0, "device": CPU} | changes
    with pytest.raises(ConfigError, match=words):
        Feed(linear_task(num_examples=NUM_EXAMPLES), **settings)


def test_a_task_that_augments_in_two_places_is_refused():
    with pytest.raises(ConfigError, match="fetch_augmented"):
        Feed(with_split(Augmenting(), augment=shifted), seed=0, batch=8, microbatch=8, start=0, device=CPU)


PROGRAM = """
    import os, signal, sys, torch
    sys.path.insert(0, "tests")
    from helpers import linear_task
    from largebatch.train.feed import Feed

    if {catches}:
        caught = []
        signal.signal(signal.SIGTERM, lambda *_: caught.append(1))
    feed = Feed(linear_task(), seed=0, batch=8, microbatch=4, start=0, device=torch.device("cpu"), loaders=2)
    feed.step()
    try:
        print(*(process.pid for process in feed._processes), flush=True)
        sys.stdin.readline()
        for _ in range(40):
            feed.step()
    except KeyboardInterrupt:
        pass
    if {closes}:
        feed.close()
    print("ended", flush=True)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_program(root, *, catches, closes):
    code = textwrap.dedent(PROGRAM).format(catches=catches, closes=closes)
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    return process, pids


def assert_all_end(pids):
    """They look for their parent every 5 s; a minute is the test's patience, not a claim."""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"loaders {pids} outlived the loop"
        time.sleep(0.05)


@pytest.mark.parametrize("closes", [True, False])
def test_ctrl_c_for_the_whole_group_ends_all_without_a_word_from_the_loaders(root, closes):
    process, pids = start_program(root, catches=False, closes=closes)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("ended\n", "", 0)
    assert_all_end(pids)


def test_sigterm_for_the_whole_group_lets_the_loop_take_its_last_steps(root):
    """A scheduler's warning reaches the loaders too; a loop that means to save first still needs them."""
    process, pids = start_program(root, catches=True, closes=True)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate("go on\n", timeout=60)
    assert (out, err, process.returncode) == ("ended\n", "", 0)
    assert_all_end(pids)


def test_loaders_end_when_the_loop_is_killed(root):
    process, pids = start_program(root, catches=False, closes=False)
    process.kill()
    process.communicate(timeout=60)
    assert_all_end(pids)
