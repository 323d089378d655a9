"""`largebatch report` draws a moments log, from a file or a folder, and refuses in one sentence what is none."""

import signal

import pytest
from tests.report.moments_sample import write_log

from largebatch.cli.app import run


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments):
        code = run(list(map(str, arguments)))
        captured = capsys.readouterr()
        return code, captured.out.strip(), " ".join(captured.err.split())

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_folder_or_a_file_gives_the_same_page(cli, tmp_path):
    log = write_log(tmp_path / "run" / "moments.jsonl", 120)
    assert cli("report", log.parent) == (0, str(log.parent / "moments.html"), "")
    assert cli("report", log, "--out", tmp_path / "out") == (0, str(tmp_path / "out" / "moments.html"), "")
    page = (log.parent / "moments.html").read_bytes()
    assert page == (tmp_path / "out" / "moments.html").read_bytes()
    assert b"Batch 64 examples is" in page
    assert (tmp_path / "out" / "figures" / "moments-noise.png").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        ("", "nor a moments log"),
        ('{"step":1}\n', "nor a moments log"),
        ("x\n", "nor a moments log"),
    ],
)
@pytest.mark.parametrize("name", ["m.jsonl", "notes.txt", "notes"])
def test_what_is_no_log_is_one_sentence(cli, tmp_path, content, words, name):
    if content is not None:
        (tmp_path / name).write_text(content)
    code, out, err = cli("report", name)
    assert (code, out) == (2, "")
    assert words in err
    assert name in err
    assert "result.json" in err
    assert "folder with moments.jsonl" in err
    assert "Delete" not in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("*.html"))


def test_a_broken_line_is_named(cli, tmp_path):
    log = write_log(tmp_path / "m.jsonl", 20)
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:5], "{}", *lines[6:]]) + "\n")
    code, _, err = cli("report", log)
    assert code == 2
    assert "line 6" in err


@pytest.mark.parametrize("name", ["q.txt", "q"])
def test_a_log_is_drawn_under_any_name(cli, tmp_path, name):
    log = write_log(tmp_path / name, 20)
    assert cli("report", log) == (0, str(tmp_path / "q.html"), "")


@pytest.mark.parametrize("content", [None, "x", "[1]", '{"accuracy": 1}'])
def test_a_folder_that_is_no_studys_is_left_alone(cli, tmp_path, content):
    folder = tmp_path / "other"
    folder.mkdir()
    if content is not None:
        (folder / "result.json").write_text(content)
    code, out, err = cli("report", folder)
    assert (code, out) == (2, "")
    assert "other" in err
    assert "a study's folder (with result.json), a moments log (*.jsonl), or a folder with moments.jsonl" in err
    assert "Delete" not in err


def test_help_calls_the_argument_a_path(cli):
    code, out, _ = cli("report", "--help")
    assert code == 0
    assert "PATH" in out.splitlines()[0]
    assert "folder}" not in out
