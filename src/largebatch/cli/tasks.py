"""`largebatch tasks`: what can be trained?"""

from __future__ import annotations

from largebatch.cli.output import write_stdout
from largebatch.tasks.catalog import TASKS

HELP = "List the tasks that largebatch ships. Your own is a Python file: see docs/how-to/own-task.md."


def tasks_command() -> None:
    """List the tasks."""
    width = max(map(len, TASKS))
    for name, (description, _) in sorted(TASKS.items()):
        write_stdout(f"{name:<{width}}  {description}")
