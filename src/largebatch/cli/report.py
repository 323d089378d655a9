"""`largebatch report`: draw a study's page, or that of a moments log, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from largebatch.cli.output import write_stdout
from largebatch.errors import RecordError
from largebatch.noise.history import history
from largebatch.records.files import read_json
from largebatch.records.moments_log import is_moments_log, read_moments
from largebatch.report.moments_page import write_moments_report
from largebatch.report.page import write_report

HELP = """Draw a page and its figures from a study's result.json, or from the moments log of a training of your own.

Example: largebatch report largebatch-out/digits-seed0

Example: largebatch report runs/moments.jsonl
"""
_EITHER = "give a study's folder (with result.json), a moments log (*.jsonl), or a folder with moments.jsonl."


def report_command(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A folder with result.json or moments.jsonl, or a moments log (*.jsonl)."),
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write. [default: beside what is read]")] = None,
) -> None:
    """Write the page and print its path."""
    log = path / "moments.jsonl" if path.is_dir() else path
    if path.is_dir() and (path / "result.json").exists():
        page = write_report(_study(path / "result.json"), out or path)
    elif is_moments_log(log):
        page = write_moments_report(history(read_moments(log)), out or log.parent, name=log.stem)
    else:
        what = "is neither a study's folder nor a moments log" if path.exists() else "does not exist"
        raise RecordError(f"{path} {what}: {_EITHER}")
    write_stdout(str(page))


def _study(path: Path) -> dict[str, Any]:
    """Read a study's result; a stranger's result.json is not called broken, nor to be deleted."""
    try:
        document = read_json(path)
    except RecordError:
        document = {}
    if "schema_version" not in document:
        raise RecordError(f"{path} is no study's result: {_EITHER}")
    return document
