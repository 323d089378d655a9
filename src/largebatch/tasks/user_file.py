"""Which task does a user's own Python file define?"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from largebatch.errors import ConfigError, LargebatchError
from largebatch.tasks.task import Task

_HOW = "Define `task = lb.Task(...)`, or `def task(data): return lb.Task(...)`"


def load(path: Path, data: Path | None = None) -> Task:
    """Run a Python file and take its `task`: a Task, or a function of the data directory that returns one.

    The file's own folder is searched first by its imports, as when Python runs it.

    Args:
        path: the file.
        data: handed to the file's function; a file whose `task` is not a function takes none.

    Returns:
        The task.

    Raises:
        ConfigError: the file is missing, does not run, or defines no task; where its own code raised, with
            the line. The original exception is the cause.
        LargebatchError: whatever the file's own code raised of that family, unchanged.
    """
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ConfigError(f"task file {path} {what}. Give the path of a Python file that defines `task`.")
    found = _run(path)
    if inspect.isclass(found) or not (isinstance(found, Task) or callable(found)):
        raise ConfigError(f"`task` in {path} is {_kind(found)}, not a Task or a function. {_HOW}.")
    if isinstance(found, Task):
        if data is not None:
            raise ConfigError(
                f"`task` in {path} is not a function, so data={data} cannot be handed to it. "
                "Leave --data out, or define `def task(data): return lb.Task(...)`."
            )
        return found
    try:
        inspect.signature(found).bind(data)
    except TypeError as error:
        raise ConfigError(
            f"the function `task` in {path} must take one argument, the data directory or None; {error}. {_HOW}."
        ) from error
    made = _guarded(path, lambda: found(data))
    if not isinstance(made, Task):
        raise ConfigError(f"the function `task` in {path} returned {_kind(made)}, not a Task. {_HOW}.")
    return made


def _run(path: Path) -> Any:
    """The file's `task`, after running it under a module name of its own (so that pickle can find it)."""
    where = path.resolve()
    name = f"largebatch_task_{where.stem}_{hashlib.sha256(str(where).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder, loader = str(where.parent), spec.loader
    sys.modules[name] = module
    if folder not in sys.path:
        sys.path.insert(0, folder)
    _guarded(path, lambda: loader.exec_module(module))
    if not hasattr(module, "task"):
        raise ConfigError(f"task file {path} defines no `task`. {_HOW}.")
    return module.task


def _guarded(path: Path, call: Callable[[], Any]) -> Any:
    """Call it; what the user's code raises becomes one sentence with the file's own line."""
    try:
        return call()
    except LargebatchError:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split()) or "no message"
        raise ConfigError(
            f"task file {path} raised {type(error).__name__} at {_line(path, error)}: {said}. "
            "Correct the file and run the same command again."
        ) from error


def _line(path: Path, error: BaseException) -> str:
    """'line N' of the user's file where the error came from: the innermost frame that is in it."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).resolve() == path.resolve():
        return f"line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"line {lines[-1]}" if lines else "an unknown line"


def _kind(value: Any) -> str:
    """'None', or the type's name with its article."""
    if value is None:
        return "None"
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    return f"of type {type(value).__name__}"
