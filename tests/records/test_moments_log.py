"""What was measured comes back to the last bit, once each, after kills, resumed trainings and full disks."""

import json
import multiprocessing
import os
import resource
import signal
import time

import pytest
import torch
from torch import nn

from largebatch.errors import ConfigError, RecordError, StorageError
from largebatch.noise.ledger import MeasuredStep
from largebatch.noise.moments import StepMoments, add_moments, solve_moments, solve_two_sizes
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.records.moments_log import MomentsLog, is_moments_log, read_moments


def made_step(step, groups=("rest",), preconditioned=False):
    parts = {name: solve_moments([1.0 + step, 9.0, 3.0 + row], [4, 4, 2], 4.0) for row, name in enumerate(groups)}
    total = add_moments(list(parts.values()))
    return MeasuredStep(step=step, moments=total, groups=parts, preconditioned=total if preconditioned else None)


def lines_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def steps_of(path):
    return [line["step"] for line in lines_of(path)[1:]]


def write(path, steps, **header):
    with MomentsLog(path, **{"unit": "examples"} | header) as log:
        for step in steps:
            log(made_step(step))


def training(log, steps, state=None, fail_at=None):
    """A monitor's training on made-up data that depends on the step alone; state.pt is saved every 3 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with NoiseScaleMonitor(
        model, microbatch=8, every=1, groups={"first": "0.*"}, precondition_by=optimizer, on_measured=[log]
    ) as monitor:
        parts = {"monitor": monitor, "model": model, "optimizer": optimizer}
        for name, part in parts.items():
            if state is not None:
                part.load_state_dict(state[name])
        for step in range(monitor.num_steps, fail_at or steps):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            for inputs in torch.randn(4, 8, 3, generator=generator):
                (model(inputs).square().mean() / 4).backward()
            monitor.step()
            optimizer.step()
            if step % 3 == 2:
                torch.save({name: part.state_dict() for name, part in parts.items()}, log.path.parent / "state.pt")


def test_a_monitors_steps_come_back_to_the_last_bit(tmp_path):
    seen = []
    with MomentsLog(tmp_path / "deep" / "moments.jsonl", unit="tokens", world_size=2, optimizer="adam") as log:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        monitor = NoiseScaleMonitor(
            model, microbatch=8, every=1, unit="tokens", groups={"first": "0.*"}, precondition_by=optimizer,
            on_measured=[log, seen.append],
        )  # fmt: skip
        for _ in range(5):
            optimizer.zero_grad()
            for inputs in torch.randn(4, 8, 3):
                (model(inputs).square().mean() / 4).backward()
            monitor.step()
            optimizer.step()
        monitor.close()
    table = read_moments(log.path)
    assert (table.header.unit, table.header.world_size, table.header.optimizer) == ("tokens", 2, "adam")
    assert table.step.tolist() == [1, 2, 3, 4, 5]
    assert table.trace_cov.tolist() == [one.moments.trace_cov for one in seen]
    assert table.grad_sq_norm.tolist() == [one.moments.grad_sq_norm for one in seen]
    assert set(table.groups) == {"first", "rest"}
    for name, columns in table.groups.items():
        assert columns.trace_cov.tolist() == [one.groups[name].trace_cov for one in seen]
    # Adam has no metric before its first step.
    assert seen[0].preconditioned is None
    assert lines_of(log.path)[1]["preconditioned"] is None
    assert table.preconditioned.grad_sq_norm[1:].tolist() == [one.preconditioned.grad_sq_norm for one in seen[1:]]


def test_the_raw_norms_of_a_line_give_its_moments_again(tmp_path):
    with MomentsLog(tmp_path / "m.jsonl", unit="examples") as log:
        log(made_step(1, groups=("a", "rest"), preconditioned=True))
    line = lines_of(log.path)[1]
    for part in (line, *line["groups"].values(), line["preconditioned"]):
        again = solve_two_sizes(part["sq_norm_small"], line["units_small"], part["sq_norm_step"], line["units_step"])
        assert again == pytest.approx((part["trace_cov"], part["grad_sq_norm"]))
    assert set(StepMoments.__slots__) <= set(line)


def test_a_single_group_is_not_written_twice(tmp_path):
    write(tmp_path / "m.jsonl", [1])
    assert lines_of(tmp_path / "m.jsonl")[1]["groups"] == {}


def test_nothing_is_on_disk_before_the_first_step(tmp_path):
    MomentsLog(tmp_path / "m.jsonl", unit="examples").close()
    assert os.listdir(tmp_path) == []


def test_a_training_resumed_from_a_checkpoint_leaves_the_log_of_one_that_was_never_stopped(tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    with MomentsLog(tmp_path / "whole" / "m.jsonl", unit="examples") as log:
        training(log, 12)
    with MomentsLog(tmp_path / "killed" / "m.jsonl", unit="examples") as log:
        training(log, 12, fail_at=8)
    path = tmp_path / "killed" / "m.jsonl"
    assert steps_of(path) == list(range(1, 9))
    with path.open("ab") as file:
        file.write(b'{"step":9,"trace_c')
    state = torch.load(tmp_path / "killed" / "state.pt", weights_only=True)
    assert state["monitor"]["num_steps"] == 6
    with MomentsLog(path, unit="examples") as log:
        training(log, 12, state=state)
    assert path.read_bytes() == (tmp_path / "whole" / "m.jsonl").read_bytes()


@pytest.mark.parametrize(("first", "kept"), [(4, [1, 2, 3]), (2, [1]), (9, [1, 2, 3, 4, 5])])
def test_lines_from_the_first_new_step_on_are_dropped_and_it_is_said(tmp_path, caplog, first, kept):
    path = tmp_path / "m.jsonl"
    write(path, range(1, 6))
    write(path, [first])
    assert steps_of(path) == [*kept, first]
    assert ("dropped" in caplog.text) == (len(kept) < 5)
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_a_training_that_starts_over_writes_its_own_header(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2], optimizer="sgd")
    write(path, [1], optimizer="adam")
    assert read_moments(path).header.optimizer == "adam"


# A first step that is not finite is not measured: a script that is run again may then begin at 2.
@pytest.mark.parametrize("first", [1, 2])
def test_a_script_that_is_run_again_loses_no_old_log(tmp_path, caplog, first):
    path = tmp_path / "moments.jsonl"
    old = []
    for run in range(3):
        write(path, range(first, first + 5 - run))
        assert steps_of(path) == list(range(first, first + 5 - run))
        old.append(path.read_bytes())
    assert (tmp_path / "moments.1.jsonl").read_bytes() == old[0]
    assert (tmp_path / "moments.2.jsonl").read_bytes() == old[1]
    assert len(caplog.records) == 2
    assert "moved to moments.1.jsonl" in caplog.text
    assert "dropped" not in caplog.text


def test_a_log_that_holds_no_step_is_written_again_in_its_place(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, [1])
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    write(path, [1])
    assert os.listdir(tmp_path) == ["m.jsonl"]


@pytest.mark.parametrize(
    ("content", "is_one"),
    [
        (b'{"kind": "moments"}\n', True),
        (b'{"kind":"x"}\n', False),
        (b"[1]\n", False),
        (b"\x89PNG", False),
        (b"", False),
    ],
)
def test_a_log_is_known_by_its_first_line(tmp_path, content, is_one):
    (tmp_path / "any").write_bytes(content)
    assert is_moments_log(tmp_path / "any") is is_one
    assert not is_moments_log(tmp_path)
    assert not is_moments_log(tmp_path / "none")


@pytest.mark.parametrize("torn", range(0, 40, 3))
def test_a_kill_in_the_header_or_in_a_line_costs_no_more_than_it(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2])
    whole = path.read_bytes()
    for cut in (torn, whole.index(b"\n") + 1 + torn, len(whole) - 1 - torn):
        path.write_bytes(whole[:cut])
        complete = max(0, whole[:cut].count(b"\n") - 1)
        write(path, [5])
        assert steps_of(path) == [*range(1, complete + 1), 5]


def _log_for_ever(path):
    log, step = MomentsLog(path, unit="examples"), 0
    while True:
        step += 1
        log(made_step(step, groups=("a", "b", "rest")))


def test_a_killed_training_leaves_whole_steps_that_can_be_read_while_it_runs(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = multiprocessing.get_context("fork").Process(target=_log_for_ever, args=(path,))
    writer.start()
    deadline = time.monotonic() + 60
    while (not path.exists() or path.stat().st_size < 50_000) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert read_moments(path).step[0] == 1
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    table = read_moments(path)
    assert table.step.tolist() == list(range(1, len(table.step) + 1))


def _fill_the_disk(path, result):
    log = MomentsLog(path, unit="examples")
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    step = 0
    try:
        while step < 1000:
            log(made_step(step + 1))
            step += 1
    except StorageError as error:
        result.put((str(error), step))


def test_a_full_disk_is_one_sentence_and_nothing_half_written(tmp_path):
    path = tmp_path / "m.jsonl"
    context = multiprocessing.get_context("fork")
    result = context.Queue()
    process = context.Process(target=_fill_the_disk, args=(path, result))
    process.start()
    message, steps = result.get(timeout=30)
    process.join()
    assert str(path) in message
    assert steps > 5
    assert path.read_bytes().endswith(b"\n")
    assert steps_of(path) == list(range(1, steps + 1))


def test_another_units_log_and_a_strangers_file_are_left_alone(tmp_path):
    path, other = tmp_path / "m.jsonl", tmp_path / "notes.txt"
    write(path, [1], unit="tokens")
    other.write_text("not yours")
    for file, message in ((path, "counts tokens"), (other, "left as it is")):
        before = file.read_bytes()
        with pytest.raises(RecordError, match=message):
            write(file, [2])
        assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "no moments log"),
        (lambda lines: lines[1:], "no moments log"),
        (lambda lines: lines[:1], "no measured step"),
        (lambda lines: [lines[0], "{}", *lines[2:]], "line 2"),
        (lambda lines: [*lines[:2], "no json", lines[3]], "line 3 is not JSON"),
        (lambda lines: [*lines[:2], "[1]", lines[3]], "line 3 holds a list"),
        (lambda lines: [lines[0], lines[2], lines[1]], "line 3: step 1 comes after 2"),
        (lambda lines: [lines[0], lines[1].replace('"batch":10', '"batch":null')], "line 2"),
        (lambda lines: [lines[0], lines[1].replace('"trace_cov":', '"trace_cov":"x')], "line 2"),
        (lambda lines: [lines[0].replace(":1,", ":99,"), *lines[1:]], "schema version 99"),
        (lambda lines: [lines[0].replace('"unit"', '"unti"'), *lines[1:]], "header"),
    ],
)
def test_what_is_no_log_is_refused_with_its_line(tmp_path, change, message):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2, 3])
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    with pytest.raises(RecordError, match=message):
        read_moments(path)
    with pytest.raises(RecordError, match="does not exist"):
        read_moments(tmp_path / "none.jsonl")
    with pytest.raises(RecordError, match="cannot be read"):
        read_moments(tmp_path)


def test_a_group_that_comes_later_has_no_number_before(tmp_path):
    with MomentsLog(tmp_path / "m.jsonl", unit="examples") as log:
        for step, groups in enumerate([("a", "rest"), ("a", "b", "rest"), ("a", "rest")], start=1):
            log(made_step(step, groups=groups))
    table = read_moments(log.path)
    assert [value == value for value in table.groups["b"].trace_cov] == [False, True, False]
    assert all(len(columns.grad_sq_norm) == 3 for columns in table.groups.values())


@pytest.mark.parametrize(
    "bad", [{"unit": "bytes"}, {"world_size": 0}, {"optimizer": "lion"}, {"dataset_size": True}], ids=str
)
def test_bad_settings_are_refused_at_once(tmp_path, bad):
    with pytest.raises(ConfigError):
        MomentsLog(tmp_path / "m.jsonl", **{"unit": "examples"} | bad)


def test_a_broken_line_in_the_middle_costs_no_line_after_it(tmp_path):
    """Going on from there would cut off all that follows, which is whole."""
    path = tmp_path / "moments.jsonl"
    write(path, range(1, 31))
    content = path.read_bytes().splitlines(keepends=True)
    content[5] = b'{"step": 5, "trace\n'
    path.write_bytes(b"".join(content))
    with pytest.raises(RecordError, match=r"line 6 is not JSON, and 25 line\(s\) follow it"):
        write(path, [31])
    assert path.read_bytes() == b"".join(content)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_microbatches", 0, "num_microbatches=0"),
        ("batch", 1, "batch=1, num_microbatches="),
        ("step", -4, "step=-4"),
        ("trace_cov", 1e308, r"1e\+308 and .* none that a training measures"),
        ("grad_sq_norm", float("nan"), "nan are none that a training measures"),
        ("trace_cov", "long", "TypeError"),
    ],
)
def test_numbers_that_no_training_writes_are_named_with_their_line(tmp_path, key, value, words):
    path = tmp_path / "moments.jsonl"
    write(path, range(1, 6))
    lines = path.read_text().splitlines()
    lines[3] = json.dumps(json.loads(lines[3]) | {key: value})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordError, match=f"line 4: .*{words}"):
        read_moments(path)


def test_deeply_nested_json_is_no_log_and_no_line(tmp_path):
    path = tmp_path / "moments.jsonl"
    deep = "[" * 200_000
    path.write_text(deep + "\n")
    assert not is_moments_log(path)
    path.unlink()
    write(path, range(1, 3))
    with path.open("a") as file:
        file.write(deep + "\n" + deep + "\n")
    with pytest.raises(RecordError, match="line 4 is not JSON"):
        read_moments(path)
