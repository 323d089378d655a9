"""What does a run write line by line, and what does a resume keep of it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from largebatch.errors import CheckpointError
from largebatch.noise.ledger import MeasuredStep
from largebatch.records.files import JsonLines

_FILES = ("steps", "evaluations")


class RunLines:
    """`steps.jsonl` and `evaluations.jsonl` of a run, written by worker 0; elsewhere nothing is written."""

    def __init__(self, folder: Path, written: Mapping[str, int], *, writes: bool) -> None:
        """Open both, keeping the first `written` lines of each: what came after the checkpoint is written again.

        Raises:
            CheckpointError: lines that the checkpoint counts on are gone.
        """
        self._files = {
            name: JsonLines(folder / f"{name}.jsonl", keep=written.get(name, 0)) for name in _FILES if writes
        }
        if any(file.count != written.get(name, 0) for name, file in self._files.items()):
            self.close()
            raise CheckpointError(f"the checkpoint counts on lines that {folder} has lost.")

    def steps(self, records: list[dict[str, Any]]) -> None:
        """Append measured steps."""
        for record in records if self._files else ():
            self._files["steps"].append(record)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Append an evaluation."""
        if self._files:
            self._files["evaluations"].append(record)

    def counts(self) -> dict[str, int]:
        """Lines of each file."""
        return {name: file.count for name, file in self._files.items()}

    def sync(self) -> None:
        """Force the lines onto the disk, before a checkpoint that counts on them."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class MeasuredRows:
    """Joins what the monitor says of a step, on an accelerator some steps later, with what the loop knew of it.

    >>> rows = MeasuredRows()
    >>> rows.note(1, {"loss": 0.5})
    >>> rows.take()
    []
    """

    def __init__(self) -> None:
        self._noted: dict[int, dict[str, Any]] = {}
        self._found: list[MeasuredStep] = []

    def note(self, step: int, row: dict[str, Any]) -> None:
        """Keep what is to be written of a step, if it turns out to have been measured."""
        self._noted[step] = row

    def found(self, measured: MeasuredStep) -> None:
        """Called by the monitor, on worker 0, step after step."""
        self._found.append(measured)

    def take(self) -> list[dict[str, Any]]:
        """The lines that are whole, in order; a step that was skipped has none."""
        lines: list[dict[str, Any]] = []
        for measured in self._found:
            lines.append({"step": measured.step, **self._noted[measured.step], **asdict(measured.moments)})
            self._noted = {step: row for step, row in self._noted.items() if step > measured.step}
        self._found = []
        return lines
