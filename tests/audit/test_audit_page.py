"""Is what docs/how-to/audit.md shows the example's code, and the command's own words?"""

import re
import signal
from pathlib import Path

import pytest

from largebatch.cli.app import run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "audit.md").read_text()
EXAMPLE = ROOT / "examples" / "audit_my_task.py"


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_training_on_the_page_is_the_example():
    first = re.findall(r"^```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE)[0]
    assert EXAMPLE.read_text().partition('"""\n\n')[2] == first


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_the_output_on_the_page_is_the_commands(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["audit", str(EXAMPLE)]) == 1
    said = [line.strip() for line in capsys.readouterr().err.splitlines()]
    shown = re.findall(r"^```text\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE)[0].splitlines()
    assert "4 finding(s)" in shown[0] and "..." in shown
    missing = [line for line in shown[1:] if line != "..." and line.strip() not in said]
    assert not missing
