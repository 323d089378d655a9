"""`largebatch report`: draw a study's page, or that of a moments log, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from largebatch.cli.output import write_stdout
from largebatch.noise.history import history
from largebatch.records.files import read_json
from largebatch.records.moments_log import read_moments
from largebatch.report.moments_page import write_moments_report
from largebatch.report.page import write_report

HELP = """Draw a page and its figures from a study's result.json, or from the moments log of a training of your own.

Example: largebatch report largebatch-out/digits-seed0

Example: largebatch report runs/moments.jsonl
"""


def report_command(
    folder: Annotated[
        Path, typer.Argument(help="A folder with result.json or moments.jsonl, or a moments log (*.jsonl).")
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write. [default: beside what is read]")] = None,
) -> None:
    """Write the page and print its path."""
    log = folder / "moments.jsonl"
    if folder.suffix == ".jsonl" and not folder.is_dir():
        log = folder
    elif (folder / "result.json").exists() or not log.exists():
        write_stdout(str(write_report(read_json(folder / "result.json"), out or folder)))
        return
    page = write_moments_report(history(read_moments(log)), out or log.parent, name=log.stem)
    write_stdout(str(page))
