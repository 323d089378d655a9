"""Does `largebatch audit` find what is wrong in a file of one's own, and say what it cannot use?"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from largebatch.cli.app import run

ROOT = Path(__file__).resolve().parents[2]

SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def setup():
    torch.manual_seed(0)
    rows = torch.randn(64, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    norms = [p for p in model[1].parameters()]
    others = [p for p in (*model[0].parameters(), *model[3].parameters())]
    optimizer = torch.optim.SGD(
        [{"params": others}, {"params": norms, "weight_decay": 0.0}], lr=0.1, weight_decay=DECAY
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    loader = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
    seen = []

    def step(batch):
        (model(batch[0]).square().mean() / 2).backward()
        seen.append(1)
        if len(seen) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            STEP
    return {"model": model, "optimizer": optimizer, "dataloader": loader, "scheduler": scheduler, "step": step,
            "accumulation": 2}
"""


def written(folder, *, text=SETUP, step="scheduler.step()", decay="0.0"):
    path = folder / "my_task.py"
    path.write_text(text.replace("STEP", step).replace("DECAY", decay))
    return path


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def cli(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        code = run(["audit", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return call


def test_a_sane_file_shows_nothing_and_ends_with_0(cli, tmp_path):
    code, out, err = cli(written(tmp_path))
    assert code == 0, err
    assert "nothing found" in err and "over 4 optimizer steps" in err and out == ""


def test_a_fault_in_steps_ends_with_1_and_says_all_of_it(cli, tmp_path):
    path = written(tmp_path, text=SETUP.replace("mean() / 2", "mean()"))
    code, out, err = cli(path)
    assert code == 1 and "LB405" in err
    for word in ("seen:", "why:", "what to do:", "wrong when:", "not divided by 2"):
        assert word in err
    code, out, _ = cli(path, "--json", "--steps", 4)
    found = json.loads(out)
    assert code == 1 and [row["code"] for row in found["findings"]] == ["LB405"]
    assert found["num_steps"] == 2 and found["findings"][0]["severity"] == "error"
    assert set(found["findings"][0]) == {"code", "name", "severity", "seen", "why", "fix", "wrong_when"}


def test_notes_alone_end_with_0(cli, tmp_path):
    code, out, err = cli(written(tmp_path, decay="1e-4"), "--json")
    assert code == 0, err
    assert [row["severity"] for row in json.loads(out)["findings"]] == ["note"]


def test_without_steps_it_is_audited_at_rest(cli, tmp_path):
    code, _, err = cli(written(tmp_path, text=SETUP.replace('"step": step,', "")))
    assert code == 0 and "at rest only" in err


def test_an_object_and_a_loop_of_one_s_own_do_too(cli, tmp_path):
    text = SETUP.replace(
        '    return {"model"',
        """
    def train():
        for batch in loader:
            step(batch)
        with torch.no_grad():
            model(rows)
    from types import SimpleNamespace
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, train=train, accumulation=2)
    _ = {"model\"""",
    )
    code, out, err = cli(written(tmp_path, text=text), "--json")
    assert code == 1, err
    assert [row["code"] for row in json.loads(out)["findings"]] == ["LB203"]
    assert json.loads(out)["num_steps"] == 8


def test_the_batch_of_the_command_line_is_the_one_that_is_audited(cli, tmp_path):
    text = SETUP.replace('"accumulation": 2}', '"accumulation": 2, "reference_batch": 8, "reference_lr": 0.1}')
    path = written(tmp_path, text=text)
    assert cli(path)[0] == 0
    code, out, _ = cli(path, "--json", "--batch", 256)
    assert code == 1 and "LB104" in [row["code"] for row in json.loads(out)["findings"]]


def test_a_task_s_recipe_is_audited_at_its_batch_and_in_steps(cli):
    code, out, err = cli("digits", "--json", "--steps", 3)
    assert code == 0, err
    assert json.loads(out) == {"findings": [], "num_steps": 3, "unread": []}


def test_the_example_finds_what_it_says(cli):
    code, out, _ = cli(ROOT / "examples" / "audit_my_task.py", "--json")
    assert code == 1
    codes = [row["code"] for row in json.loads(out)["findings"] if row["severity"] != "note"]
    assert codes == ["LB401", "LB405", "LB101"]


BAD = {
    "no such file": (None, "does not exist"),
    "neither": ("x = 1", "defines neither `setup` nor `task`"),
    "an argument": ("def setup(data): return {}", "takes no argument; it asks for data"),
    "no model": ("def setup(): return {'optimizer': 1}", "returns no model"),
    "nothing": ("def setup(): pass", "returns no model and no optimizer"),
    "an unknown name": ("def setup(): return {'modle': 1}", "Did you mean 'model'?"),
    "no optimizer": (
        "from torch import nn\ndef setup(): return {'model': nn.Linear(1, 1), 'optimizer': 3}",
        "optimizer is a torch.optim.Optimizer; got",
    ),
    "it raises": ("def setup():\n    return 1 / 0", "ZeroDivisionError: division by zero"),
    "no Python": ("def setup(:", "SyntaxError"),
    "a step without data": (SETUP.replace('"dataloader": loader, ', ""), "'step' without 'dataloader'"),
    "no function": (SETUP.replace('"step": step', '"step": 3'), "is a function; got int"),
    "a step that raises": (SETUP.replace("seen.append(1)", "seen.append(no)"), "NameError: name 'no' is not defined"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_one_sentence_and_ends_with_2(cli, tmp_path, bad):
    text, words = BAD[bad]
    path = tmp_path / "my_task.py" if text is None else written(tmp_path, text=text)
    code, out, err = cli(path)
    assert (code, out, err.count("error:")) == (2, "", 1), err
    assert words in err and "Traceback" not in err


def test_help_teaches_by_example(cli):
    code, out, _ = cli("--help")
    assert code == 0 and "Example: largebatch audit" in out and "def setup():" in out and "Exit code" in out
