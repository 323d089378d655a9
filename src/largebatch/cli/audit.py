"""`largebatch audit`: what is wrong with a training, before it runs and over a few real steps?"""

from __future__ import annotations

import ast
import difflib
import inspect as python_inspect
import json
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from largebatch.audit.findings import Finding, sort_findings
from largebatch.audit.inspect import inspect
from largebatch.audit.watch import Watched, watch
from largebatch.cli.output import console, print_table, write_stdout
from largebatch.errors import ConfigError
from largebatch.recipe.optimizer import build_optimizer
from largebatch.recipe.schedule import as_torch_scheduler
from largebatch.records.schema import RunSpec
from largebatch.study.launch import blame
from largebatch.study.plan import Protocol, microbatch_for
from largebatch.tasks.catalog import load_task
from largebatch.tasks.task import Task
from largebatch.train.loop import Run

HELP = """Find the classic mistakes of large-batch training in TASK: at rest, and over a few real steps.

TASK is a Python file with a function `setup()` that returns your own training as a dict:

\b
  def setup():
      model, optimizer, loader, scheduler = ...
      def step(batch): ...      # what your loop does with one batch
      return {"model": model, "optimizer": optimizer, "dataloader": loader,
              "scheduler": scheduler, "step": step, "accumulation": 4,
              "reference_batch": 256, "reference_lr": 0.1}

Only model and optimizer are needed. Without "step" nothing is run. In its place, "train": a function without arguments
that runs your loop for a few steps or two epochs. Beside these, all that lb.audit.inspect takes. TASK may also be a
file that defines `task = lb.Task(...)`, or a name from `largebatch tasks`: its recipe is audited then.

Each finding says what was seen, why it matters, what to do, and when it is none. Exit code: 0 where there is no error
and no warning (there may be notes), 1 where there is one, 2 if TASK cannot be used.

Example: largebatch audit examples/audit_my_task.py

Example: largebatch audit digits --batch 256
"""

_LOOP = ("model", "optimizer", "dataloader", "scheduler", "step", "train", "monitor")
_REST = tuple(
    name for name, one in python_inspect.signature(inspect).parameters.items() if one.kind is one.KEYWORD_ONLY
)
KNOWN = (*_LOOP, *_REST)
"""What `setup()` may return."""


@dataclass(kw_only=True, slots=True)
class Audit:
    """What an audit came to."""

    findings: list[Finding]
    """At rest and in steps, each code once, errors first."""
    num_steps: int = 0
    """Optimizer steps that were watched."""
    unread: tuple[str, ...] = ()
    """What kept a loss from being read."""


def audit_command(
    task: Annotated[str, typer.Argument(help="A Python file with `setup()` or `task`, or a task's name.")],
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Units in an optimizer step. [default: the task's reference batch; of the loader]"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Batches given to `step`, or optimizer steps of a task.")] = 8,
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data files.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on standard output.")] = False,
) -> None:
    """Audit, print the findings, and end with 1 if there is an error or a warning."""
    path = Path(task)
    if _has_setup(path):
        found = _audit_setup(path, batch, steps)
    else:
        found = _audit_task(load_task(task, data), task, batch, steps)
    if as_json:
        write_stdout(json.dumps(_as_json(found), indent=1))
    else:
        _show(task, found)
    if any(finding.about.severity != "note" for finding in found.findings):
        raise typer.Exit(1)


def _audit_setup(path: Path, batch: int | None, steps: int) -> Audit:
    """Audit what a file's own `setup()` returns."""
    with blame(str(path)):
        given = _call_setup(path)
    parts = _parts(path, given)
    rest: dict[str, Any] = {name: parts[name] for name in _REST if name in parts}
    if batch is not None:
        rest["batch"] = batch
    model, optimizer, loader = parts["model"], parts["optimizer"], parts.get("dataloader")
    at_rest = inspect(model, optimizer, loader, parts.get("scheduler"), **rest)
    run = _loop(path, parts, steps)
    if run is None:
        return Audit(findings=at_rest)
    accumulation, monitor = rest.get("accumulation", 1), parts.get("monitor")
    plain = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None  # Lightning's mapping, say
    with watch(
        model, plain, loader, parts.get("scheduler"), accumulation=accumulation, monitor=monitor
    ) as watched, blame(str(path)):  # fmt: skip
        run()
    return _together(at_rest, watched)


def _audit_task(task: Task, name: str, batch: int | None, steps: int) -> Audit:
    """Audit a task's recipe at a batch size, and a few steps of the library's own loop on its model and loss."""
    size = batch or task.recipe.reference_batch
    resolved = task.recipe.resolve(size, len(task.train))
    torch.manual_seed(0)
    blamed = blame(name) if name.endswith(".py") else nullcontext()
    with blamed:
        model = task.model()
    optimizer = build_optimizer(model, resolved)
    scheduler = as_torch_scheduler(optimizer, resolved.schedule)
    at_rest = inspect(model, optimizer, None, scheduler, recipe=task.recipe, batch=size)
    microbatch = microbatch_for(size, Protocol(), task)
    spec = RunSpec(
        task=task.name, role="train", batch=size, microbatch=microbatch, lr=resolved.lr, schedule="goyal", seed=0,
        max_steps=min(steps, resolved.num_steps),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, watch(model) as watched, blame(name):
        Run(replace(task, model=lambda: model), spec, Path(folder)).run()
    return _together(at_rest, watched)


def _together(at_rest: Sequence[Finding], watched: Watched) -> Audit:
    """Findings at rest and in steps; of a code that both have, what the steps showed."""
    found = {finding.code: [finding] for finding in watched.findings}
    for finding in at_rest:
        if finding.code not in {seen.code for seen in watched.findings}:
            found.setdefault(finding.code, []).append(finding)
    findings = sort_findings(finding for those in found.values() for finding in those)
    return Audit(findings=findings, num_steps=watched.num_steps, unread=watched.unread)


def _has_setup(path: Path) -> bool:
    """Whether a file has a `setup` and no `task`; what is no Python is left to who loads tasks to refuse."""
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return False
    names = {name for node in body for name in _defined(node)}
    if not names & {"setup", "task"}:
        raise ConfigError(
            f"{path} defines neither `setup` nor `task`. Define `def setup():` that returns a dict with at least "
            "'model' and 'optimizer' (`largebatch audit --help` shows one), or `task = lb.Task(...)`."
        )
    return "task" not in names


def _defined(node: ast.stmt) -> list[str]:
    """Names that a statement at a file's top defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _call_setup(path: Path) -> Any:
    """Run the file and its `setup()`; its own folder is searched first by its imports."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    made: Callable[..., Any] = runpy.run_path(str(path), run_name=path.stem)["setup"]
    needed = [name for name, one in python_inspect.signature(made).parameters.items() if one.default is one.empty]
    if needed:
        raise ConfigError(f"`setup` in {path} takes no argument; it asks for {', '.join(needed)}.")
    return made()


def _parts(path: Path, given: Any) -> dict[str, Any]:
    """What `setup()` returned, by name."""
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in KNOWN]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), KNOWN, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"`setup` in {path} returns {unknown[0]!r}, which no audit knows.{meant} Known: {', '.join(KNOWN)}."
            )
        parts: dict[str, Any] = dict(given)
    else:
        parts = {name: getattr(given, name) for name in KNOWN if hasattr(given, name)}
    missing = [name for name in ("model", "optimizer") if parts.get(name) is None]
    if missing:
        raise ConfigError(
            f"`setup` in {path} returns no {' and no '.join(missing)}: return a dict (or an object) with at least "
            "'model' and 'optimizer'."
        )
    return {name: part for name, part in parts.items() if part is not None}


def _loop(path: Path, parts: Mapping[str, Any], steps: int) -> Callable[[], None] | None:
    """The steps to watch; None if there are none."""
    step, train, loader = parts.get("step"), parts.get("train"), parts.get("dataloader")
    for name, one in (("step", step), ("train", train)):
        if one is not None and not callable(one):
            raise ConfigError(f"{name!r} from `setup` in {path} is a function; got {type(one).__name__}.")
    if train is not None:
        return train
    if step is None:
        return None
    if loader is None:
        raise ConfigError(f"`setup` in {path} returns 'step' without 'dataloader', whose batches it is given.")

    def run() -> None:
        for _, batch in zip(range(steps), loader, strict=False):
            step(batch)

    return run


def _as_json(found: Audit) -> dict[str, Any]:
    rows = [{"code": finding.code, **asdict(finding.about), "seen": finding.seen} for finding in found.findings]
    return {"findings": rows, "num_steps": found.num_steps, "unread": list(found.unread)}


def _show(name: str, found: Audit) -> None:
    rows = [(one.code, one.about.severity, one.about.name) for one in found.findings]
    if rows:
        print_table(f"{name}: {len(rows)} finding(s)", ("code", "severity", "mistake"), rows)
    for one in found.findings:
        about = one.about
        said = f"\n{one.code} {about.name} ({about.severity})\n  seen: {one.seen}\n  why: {about.why}"
        said += f"\n  what to do: {about.fix}\n  wrong when: {about.wrong_when}"
        console.print(said, soft_wrap=True, markup=False)
    steps = f"over {found.num_steps} optimizer steps" if found.num_steps else "at rest only: no step was watched"
    console.print(f"{'' if rows else 'nothing found, '}audited {steps}.", soft_wrap=True, markup=False)
    for what in found.unread:
        console.print(f"note: by what the loss is divided could not be read: {what}.", soft_wrap=True, markup=False)
