"""How does a report made by this very commit get into the documentation? It is drawn while the docs are built.

mkdocs calls `on_files`; the committed result of runs/study_digits becomes sample/report.html, so no page of 5 MB lies
in the repository and none can be older than the code that draws it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from largebatch.records.files import read_json
from largebatch.report.page import write_report

RESULT = Path(__file__).resolve().parents[1] / "runs" / "study_digits" / "result.json"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the sample report to the site."""
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(read_json(RESULT), Path(folder))
        files.append(File.generated(config, "sample/report.html", content=page.read_text()))
    return files
