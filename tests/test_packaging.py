"""Does what a user installs work: a wheel, in a clean environment, on another torch than the one developed with?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OTHER_TORCH = "torch==2.13.0"
"""Not the release of constraints.txt: the supported range is tested at two points."""

pytestmark = pytest.mark.xdist_group("packaging")


def run(*command: str | Path, cwd: Path, timeout: float = 600) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def readme_monitor() -> str:
    """The README's Python example, as a user would copy it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (monitor,) = (block for block in blocks if "NoiseScaleMonitor" in block)
    return monitor


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[study]", OTHER_TORCH, cwd=folder.parent, timeout=900)
    return python


def test_the_readme_monitor_runs_as_printed(tmp_path: Path):
    output = run(sys.executable, "-c", readme_monitor(), cwd=tmp_path)
    assert re.search(r"\d", output), output


def test_the_wheel_holds_the_package_its_types_and_its_licence_only(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert "largebatch/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"largebatch"}
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    sources = {name for name in sources if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == sources


@pytest.mark.timeout(1200)
def test_the_readme_monitor_runs_from_the_wheel(clean_python: Path, tmp_path: Path):
    where = run(clean_python, "-c", "import largebatch; print(largebatch.__file__)", cwd=tmp_path)
    assert str(ROOT) not in where, "this must test the installed wheel, not the checkout"
    output = run(clean_python, "-c", readme_monitor(), cwd=tmp_path)
    assert re.search(r"\d", output), output


@pytest.mark.timeout(1200)
def test_study_digits_runs_from_the_wheel(clean_python: Path, tmp_path: Path):
    out = tmp_path / "study"
    run(clean_python.parent / "largebatch", "study", "digits", "--out", out, cwd=tmp_path, timeout=1000)
    assert (out / "result.json").stat().st_size > 0
    assert "<html" in (out / "report.html").read_text()[:2000].lower()
