"""Is the house as docs/architecture.md says: short rooms, floors that look down only, nothing hidden at import?"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "largebatch"
MODULES = sorted(PACKAGE.rglob("*.py"))
EXTRAS = ("scipy", "sklearn", "typer", "rich", "plotly", "jinja2", "matplotlib", "torchvision", "pandas", "PIL")

modules = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(argument) for argument in arguments], cwd=ROOT, capture_output=True, text=True)


@modules
def test_no_module_is_longer_than_400_lines(path: Path):
    assert len(path.read_text().splitlines()) <= 400


@modules
def test_every_module_opens_with_the_question_it_answers(path: Path):
    source = path.read_text()
    if path.name in ("__init__.py", "__main__.py") and not source.strip():
        return
    first_line = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    assert first_line, f"{path} has no docstring"
    # A verb of the command line and a package's front say what they do or hold.
    exempt = path.parent == PACKAGE / "cli" or path.name in ("__init__.py", "__main__.py")
    assert exempt or "?" in first_line, f"not a question: {first_line!r}"


@modules
def test_only_the_command_line_prints(path: Path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    prints = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert not prints or path.is_relative_to(PACKAGE / "cli"), f"print in lines {prints}: use logging"


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def test_an_oracle_shares_no_code_with_what_it_checks():
    for path in (ROOT / "tests" / "oracles").rglob("*.py"):
        assert not [name for name in imported_names(path) if name.split(".")[0] in ("largebatch", "torch")], path


def test_each_floor_imports_only_from_floors_below():
    result = run(Path(sys.executable).parent / "lint-imports", "--no-cache", "--no-logo")
    assert result.returncode == 0, result.stdout + result.stderr


BARE_IMPORT = f"""
import importlib.abc, json, logging, os, random, sys, threading, warnings

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ImportError(f"{{name}} is an extra and must not be imported with largebatch")

sys.meta_path.insert(0, Blocked())
import numpy, torch

def state():
    return {{
        "torch draws": torch.get_rng_state().tolist(),
        "numpy draws": repr(numpy.random.get_state()),
        "python draws": repr(random.getstate()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "default dtype": str(torch.get_default_dtype()),
        "determinism": [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark],
        "environment": dict(os.environ),
        "log handlers": len(logging.getLogger().handlers),
        "warning filters": len(warnings.filters),
        "running threads": threading.active_count(),
    }}

before = state()
import largebatch
after = state()
print(json.dumps([key for key in before if before[key] != after[key]]))
"""


def test_importing_largebatch_changes_nothing_and_needs_no_extra():
    result = run(sys.executable, "-W", "error::ImportWarning", "-c", BARE_IMPORT)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [], "importing largebatch changed these"


def test_the_public_surface_is_what_it_was_and_stays_small():
    public = list(importlib.import_module("largebatch").__all__)
    golden = (ROOT / "tests" / "golden" / "public_api.txt").read_text().split()
    assert public == sorted(public), "keep __all__ sorted"
    assert len(public) <= 40, "at most 40 public names"
    assert public == golden, "the public surface changed: if that is meant, change tests/golden/public_api.txt with it"


def test_every_public_name_exists_and_is_documented():
    largebatch = importlib.import_module("largebatch")
    for name in largebatch.__all__:
        assert getattr(largebatch, name).__doc__, f"{name} has no docstring"
