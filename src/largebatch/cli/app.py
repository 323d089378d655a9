"""Which verbs are there, and how does a failure end?"""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType
from typing import Annotated

import typer

from largebatch.cli import allreduce, audit, recipe, report, simulate, study, tasks, train
from largebatch.cli.output import fail, say_stopped, write_stdout
from largebatch.errors import LargebatchError

app = typer.Typer(
    name="largebatch", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Find the batch size that is worth it, then train at it without losing accuracy.",
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        write_stdout(version("largebatch"))
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find the batch size that is worth it, then train at it without losing accuracy."""


app.command("study", help=study.HELP)(study.study_command)
app.command("train", help=train.HELP)(train.train_command)
app.command("audit", help=audit.HELP)(audit.audit_command)
app.command("recipe", help=recipe.HELP)(recipe.recipe_command)
app.command("report", help=report.HELP)(report.report_command)
app.command("simulate", help=simulate.HELP)(simulate.simulate_command)
app.command("allreduce", help=allreduce.HELP)(allreduce.allreduce_command)
app.command("tasks", help=tasks.HELP)(tasks.tasks_command)


class _StoppedError(BaseException):
    """Ctrl-C or a polite kill; no `except Exception` on the way may swallow it."""


def _stop(_signal: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # one is enough; a second must not break the farewell
        signal.signal(number, signal.SIG_IGN)
    raise _StoppedError


def run(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code: 2 for a user's error, 130 when it was stopped."""
    logging.basicConfig(level=logging.WARNING, format="note: %(message)s")
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        app(args=list(arguments))
    except LargebatchError as error:
        fail(error)
        return 2
    except _StoppedError:
        say_stopped()
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    finally:  # from here on a signal ends the process without a word
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
