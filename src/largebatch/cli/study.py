"""`largebatch study`: how large a batch is worth it here, and what must change to use it?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from largebatch.cli.output import StudyProgress, console, print_table, write_stdout
from largebatch.report.page import summary_rows, write_report
from largebatch.study.context import Context
from largebatch.study.study import study

HELP = """Find the batch size that is worth it for TASK, and check that training at it loses nothing.

TASK is a name from `largebatch tasks`, or the path of a Python file that defines `task = lb.Task(...)`.

The study measures the gradient noise scale at the baseline, predicts the critical batch size, verifies it by training
to the same loss at many batch sizes, trains large batches by Goyal's rules beside the baseline, and writes report.html,
result.json and figures. Stop it at any moment; the same command goes on where it was.

Examples:

  largebatch study digits

  largebatch study fashion-mnist --jobs 2 --out studies/fashion

  largebatch study my_task.py --budget 30
"""


def default_out(task: str, seed: int) -> Path:
    """Where a study goes when --out is not given."""
    return Path("largebatch-out") / f"{Path(task).stem}-seed{seed}"


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def study_command(
    task: Annotated[str, typer.Argument(help="A task's name, or a Python file that defines one.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data files.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study. [default: largebatch-out/TASK-seedN]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Every draw follows from it.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side, one thread each. [default: the number of cores]")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Minutes the study may take, about.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json on standard output.")] = False,
) -> None:
    """Run a study, write its report and print its summary."""
    folder = out or default_out(task, seed)
    with StudyProgress() as progress:

        def configure(context: Context) -> None:
            context.on_phase = progress.on_phase
            context.launcher.on_update = progress.on_update
            context.on_step = lambda where, loss, monitor: progress.on_step(
                where, loss, monitor, context.measured_steps
            )

        result = study(
            task, out=folder, data=data, seed=seed, jobs=jobs or available_cores(), budget=budget, configure=configure
        ).to_json()
        progress.on_phase("report", f"{folder / 'report.html'}")
        page = write_report(result, folder)
    print_table("", ("", ""), summary_rows(result))
    console.print(result["summary"], soft_wrap=True, markup=False)
    for warning in result["warnings"]:
        console.print(f"note: {warning}", soft_wrap=True, markup=False)
    if as_json:
        write_stdout(json.dumps(result, indent=1))
    else:
        write_stdout(str(page))
