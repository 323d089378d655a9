"""A record survives a kill in the middle of a line, a full disk, and a reader that looks while it is written."""

import json
import multiprocessing
import os
import resource
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.errors import RecordError, StorageError
from largebatch.records.files import JsonLines, read_json, read_lines, write_json


@given(
    records=st.lists(
        st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False)), max_size=5
    ),
    torn=st.integers(1, 40),
)
def test_a_torn_last_line_is_dropped_and_the_file_goes_on(tmp_path_factory, records, torn):
    path = tmp_path_factory.mktemp("lines") / "steps.jsonl"
    with JsonLines(path) as lines:
        for record in records:
            lines.append(record)
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps({"step": 12345, "note": "x" * 40}).encode()[:torn])
    assert read_lines(path) == records
    with JsonLines(path) as lines:
        lines.append({"step": 1.0})
    assert read_lines(path) == [*records, {"step": 1.0}]


def test_lines_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    path = tmp_path / "steps.jsonl"
    with JsonLines(path) as lines:
        for step in range(5):
            lines.append({"step": step})
    JsonLines(path, keep=3).close()
    assert [line["step"] for line in read_lines(path)] == [0, 1, 2]


def test_nan_and_infinity_become_null_that_any_reader_can_read(tmp_path):
    write_json(tmp_path / "a.json", {"nan": float("nan"), "deep": [float("inf"), (1.5,)]})
    assert read_json(tmp_path / "a.json") == {"nan": None, "deep": [None, [1.5]]}


def _append_for_ever(path):
    lines = JsonLines(path)
    step = 0
    while True:
        lines.append({"step": step, "padding": "x" * 500})
        step += 1


def test_a_killed_writer_leaves_only_whole_records(tmp_path):
    path = tmp_path / "steps.jsonl"
    writer = multiprocessing.get_context("fork").Process(target=_append_for_ever, args=(path,))
    writer.start()
    while len(read_lines(path)) < 50:
        time.sleep(0.005)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    assert [line["step"] for line in read_lines(path)] == list(range(len(read_lines(path))))


def _write_more_than_the_disk_takes(path, result):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        write_json(path, {"much": "x" * 100_000})
    except StorageError as error:
        result.put(str(error))


def test_a_full_disk_leaves_the_old_document_whole(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"old": 1})
    context = multiprocessing.get_context("fork")
    result = context.Queue()
    process = context.Process(target=_write_more_than_the_disk_takes, args=(path, result))
    process.start()
    message = result.get(timeout=30)
    process.join()
    assert str(path) in message and "unchanged" in message
    assert read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["result.json"], "no temporary file is left"


def _append_until_the_disk_is_full(path, result):
    lines = JsonLines(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        while True:
            lines.append({"line": lines.count, "padding": "x" * 300})
    except StorageError as error:
        full = (str(error), lines.count, path.stat().st_size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    lines.append({"line": lines.count})
    lines.close()
    result.put(full)


def test_a_full_disk_leaves_whole_lines_and_the_file_goes_on_once_there_is_room(tmp_path):
    path = tmp_path / "steps.jsonl"
    context = multiprocessing.get_context("fork")
    result = context.Queue()
    process = context.Process(target=_append_until_the_disk_is_full, args=(path, result))
    process.start()
    message, count, size = result.get(timeout=30)
    process.join()
    assert str(path) in message
    assert 0 < size < 4000
    content = path.read_bytes()
    assert content[:size].endswith(b"\n")
    assert [json.loads(line)["line"] for line in content.splitlines()] == list(range(count + 1))


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "cannot be read"), (b"[1]", "holds a list"), (None, "does not exist")]
)
def test_a_file_that_is_no_record_is_said_in_one_sentence(tmp_path, content, message):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        read_json(path)
