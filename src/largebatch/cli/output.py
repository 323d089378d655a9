"""How does the command line speak: progress while it works, a table at the end, one sentence when it fails?"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.records.schema import RunSpec
from largebatch.train.progress import Progress as RunProgress

console = Console(stderr=True, highlight=False)
"""Everything for people goes to standard error; standard output is for `--json` and paths."""


def fail(error: Exception) -> None:
    """Print one sentence about an error."""
    console.print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True)


def say_stopped() -> None:
    """Print that a command was stopped, which is no error."""
    console.print("stopped. Nothing finished is lost: run the same command again to go on.", soft_wrap=True)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


class StudyProgress:
    """Live lines of a study: its phase, the cells of the round, and the measured run's noise scale."""

    def __init__(self) -> None:
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TimeRemainingColumn(), console=console, transient=True, refresh_per_second=4,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._row = self._bar.add_task("starting", total=None)
        self._phase = ""
        self._started = time.monotonic()
        self._last_shown = 0.0

    def __enter__(self) -> StudyProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_phase(self, name: str, detail: str) -> None:
        """A phase begins: leave a line behind."""
        self._phase = name
        elapsed = time.monotonic() - self._started
        self._bar.console.print(f"[dim]{elapsed:6.1f} s[/]  [bold]{name}[/]  {_escape(detail)}", soft_wrap=True)
        self._bar.update(self._row, description=name, total=None, completed=0)

    def on_update(self, running: Sequence[RunSpec], finished: Sequence[RunSpec], total: int) -> None:
        """Cells of the round began or ended."""
        shown = ", ".join(f"batch {spec.batch} lr {spec.lr:.3g}" for spec in running)
        self._bar.update(self._row, description=f"{self._phase}  {shown}", total=total, completed=len(finished))

    def on_step(
        self, progress: RunProgress, loss: float, monitor: NoiseScaleMonitor | None, total: int, rate: str = ""
    ) -> None:
        """A step of the measured run: loss, noise scale with its interval, how fast it is, time left."""
        now = time.monotonic()
        if now - self._last_shown < 0.25:
            return
        self._last_shown = now
        noise = f"  {monitor.noise_scale}" if monitor is not None else ""
        noise += f"  {rate}" if rate else ""
        self._bar.update(
            self._row, description=f"{self._phase}  step {progress.step}  loss {loss:.4f}{noise}", total=total,
            completed=progress.step,
        )  # fmt: skip


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table for people."""
    table = Table(title=_escape(title), title_justify="left", show_edge=False, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_escape(str(cell)) for cell in row))
    console.print(table)


def write_stdout(text: str) -> None:
    """Print what another program may read."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
