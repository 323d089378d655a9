"""Does every benchmark keep the rule: one claim, one JSON line, an exit code, and --quick within its time?"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_"))
KEYS = ["claim", "value", "goal", "holds", "peers", "how"]

EXAMPLE = """
import sys
sys.path.insert(0, {folder!r})
from _harness import arguments, claim
arguments("an example", ["--quick"])
claim("it is at most 1", value={value}, goal="<= 1", holds={value} <= 1, peers={{"other 1.0": 3.0}}, how="one try")
"""


def run(*arguments: str, timeout: float = 60) -> tuple[int, dict[str, object]]:
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    lines = result.stdout.strip().splitlines()
    assert lines, f"printed nothing\n{result.stderr[-4000:]}"
    try:
        return result.returncode, json.loads(lines[-1])
    except ValueError:
        pytest.fail(f"the last line is not JSON: {lines[-1]!r}\n{result.stderr[-4000:]}")


@pytest.mark.parametrize(("value", "code"), [("0.5", 0), ("2.0", 1), ("float('nan')", 1), ("-float('inf')", 1)])
def test_a_claim_ends_with_its_json_line_and_its_exit_code(value: str, code: int):
    returncode, record = run("-c", EXAMPLE.format(folder=str(ROOT / "benchmarks"), value=value))
    assert returncode == code
    assert list(record) == KEYS
    assert record["holds"] is (code == 0)
    assert record["peers"] == {"other 1.0": 3.0}
    assert {"method", "command", "commit", "hardware", "torch", "threads"} <= set(record["how"])  # type: ignore[arg-type]


def check(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} does not say what it claims"
    # 50 s is the rule on an idle machine; tests share theirs, so the limit here only stops what hangs.
    on_cpu = ["--device", "cpu"] if path.stem == "gpu" else []
    returncode, record = run(str(path.relative_to(ROOT)), "--quick", *on_cpu, timeout=600)
    assert list(record) == KEYS
    assert isinstance(record["claim"], str)
    assert isinstance(record["peers"], dict)
    assert isinstance(record["holds"], bool)
    assert returncode == (0 if record["holds"] else 1)


LONG = {"allreduce", "gpu", "overlap", "training", "weak_scaling"}
"""Many processes, or a ResNet-50: too long for their time where tests share the machine, so `make proofs` has them."""

if BENCHMARKS:  # an empty parameter set would count as a skip

    @pytest.mark.timeout(700)
    @pytest.mark.parametrize(
        "path",
        [pytest.param(path, marks=[pytest.mark.proofs] if path.stem in LONG else []) for path in BENCHMARKS],
        ids=lambda path: path.stem,
    )
    def test_a_benchmark_keeps_the_rule(path: Path):
        if "peers_python" in path.read_text() and not os.path.exists(ROOT / ".venv-peers" / "bin" / "python"):
            pytest.skip("the peers' packages are not installed. Run: make peers")
        check(path)
