"""Does what the documentation shows run, and does what it points to exist?"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```python\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[str]:
    """The page's runnable Python: blocks that start with ```python (sketches are marked ```py)."""
    return [textwrap.dedent(body) for _, body in FENCE.findall(page.read_text())]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_on_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path):
    code = "\n".join(blocks(page))
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_file_a_page_at_the_root_links_to_exists(page: Path):
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert not missing
