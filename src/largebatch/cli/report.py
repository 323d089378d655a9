"""`largebatch report`: draw a finished study's page again, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from largebatch.cli.output import write_stdout
from largebatch.records.files import read_json
from largebatch.report.page import write_report

HELP = """Draw report.html and the figures again from a study's result.json.

Example: largebatch report largebatch-out/digits-seed0
"""


def report_command(
    folder: Annotated[Path, typer.Argument(help="The study's folder, which holds result.json.")],
    out: Annotated[Path | None, typer.Option(help="Where to write. [default: the study's folder]")] = None,
) -> None:
    """Write the report and print its path."""
    write_stdout(str(write_report(read_json(folder / "result.json"), out or folder)))
