"""What does every test share? One thread, fixed randomness, the data's places, and the rule about skips.

A test whose browser, data or service is absent skips and says how to get it. In CI (CI=true) everything is there, so
a skip there is a failure unless its reason is on the short list below: a suite cannot go green by running nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

ALLOWED_SKIPS_IN_CI = {
    "needs a CUDA device": "CI has no GPU; docs/log.md says what ran on one",
    "this machine makes no network namespaces": "a container may lack the right, whoever it runs as",
    "no bridge here": "so may its kernel the module",
    "no veth pairs here": "and this one",
}
"""Part of a skip's reason -> why it is right that CI skips it."""

# Two processes of two threads each on two cores are many times slower than one thread each (OpenMP barriers).
torch.set_num_threads(1)

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if IN_CI else "local")


def forbid_skip(report: pytest.TestReport | pytest.CollectReport, in_ci: bool = IN_CI) -> None:
    """Turn a skip that CI must not have into a failure that says so."""
    if not in_ci or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if any(allowed in reason for allowed in ALLOWED_SKIPS_IN_CI):
        return
    report.outcome = "failed"
    report.longrepr = (
        f"skipped in CI, where everything must run: {reason} (allowed: ALLOWED_SKIPS_IN_CI in tests/conftest.py)"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report: Any = yield
    forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report: Any = yield
    forbid_skip(report)
    return report


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Lightning, Accelerate and transformers leave MASTER_PORT, LOCAL_RANK and more: not for the next test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Where scripts/fetch_data.sh puts data, and where the tasks look for it."""
    return Path(os.environ.get("DATA_DIR") or os.environ.get("LARGEBATCH_DATA") or ROOT / "data")


def fetched(data_dir: Path, name: str, file: str) -> Path:
    folder = data_dir / name
    if not (folder / file).exists():
        pytest.skip(f"no {name} in {data_dir}. Run: scripts/fetch_data.sh {name}")
    return folder


@pytest.fixture(scope="session")
def fashion_mnist_dir(data_dir: Path) -> Path:
    """The folder with Fashion-MNIST's four IDX files (gzipped)."""
    return fetched(data_dir, "fashion-mnist", "train-images-idx3-ubyte.gz")


@pytest.fixture(scope="session")
def mnist_dir(data_dir: Path) -> Path:
    """The folder with digits/{0..9}.json, 10,000 MNIST digits."""
    return fetched(data_dir, "mnist", "digits/9.json")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium that can run headless."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium here. Run: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """A playwright browser with no network but file:// and data: (a page must work offline)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A real file system of its own, 64 kB or as large as the test's `@pytest.mark.parametrize(..., indirect)` says."""
    disk, size = tmp_path / "disk", getattr(request, "param", "64k")
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)
