"""Every figure in docs/log.md's tables is what a committed result.json says."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = {
    "noise_scales_fashion_mnist": ("scales",), "conditioning_quadratic": ("conditioning",),
    "goyal_curves": ("joined", "forecasts"), "stamps_table3b": ("stamps",),
    "stamps_table3a": ("transfer",), "openclipart": ("training",),
}  # fmt: skip
"""Tables of runs that are no studies."""


def tables_of(name):
    return TABLES.get(name) or (("goyal",) if name.startswith("goyal_") else ("fronts", "large"))


def test_every_table_is_rebuilt_from_its_result():
    check = subprocess.run([sys.executable, ROOT / "scripts" / "write_log_tables.py", "--check"], capture_output=True)
    assert check.returncode == 0, check.stderr.decode()


def test_every_table_has_a_result():
    names = set(re.findall(r"<!-- table: (\w+) ", (ROOT / "docs" / "log.md").read_text()))
    assert names == {path.parent.name for path in (ROOT / "runs").glob("*/result.json")}


def test_every_result_has_a_table_and_says_how_it_was_made():
    log = (ROOT / "docs" / "log.md").read_text()
    results = sorted((ROOT / "runs").glob("*/result.json"))
    assert results
    for result in results:
        name = result.parent.name
        for kind in ("how", *tables_of(name)):
            assert f"<!-- table: {name} {kind} -->" in log
        how = json.loads((result.parent / "how.json").read_text())
        assert {"command", "commit", "hardware", "torch", "seconds"} <= set(how)
        assert (ROOT / "runs" / f"{name}.py").exists()
