"""`largebatch train`: train a task at a batch size by Goyal's rules, the noise scale measured along the way."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import typer

from largebatch.cli.output import StudyProgress, console, print_table, say_stopped, write_stdout
from largebatch.cli.recipe import describe, known_task, print_description
from largebatch.errors import ConfigError, DivergedError, LargebatchError
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.resolved import ResolvedRecipe
from largebatch.records.files import read_json, write_json
from largebatch.records.schema import RunRecord, RunSpec
from largebatch.study.identity import claim_folder, identity_of, locked
from largebatch.study.launch import blame
from largebatch.study.plan import Protocol, microbatch_for
from largebatch.tasks.catalog import load_task
from largebatch.tasks.task import Task
from largebatch.train.loop import Run, StoppedError
from largebatch.train.progress import Progress, Waiting
from largebatch.train.spread import Execution, Parallel, Precision
from largebatch.train.workers import WorkerLostError, Workers, already_said, is_already_said, joined

HELP = """Train TASK once: the recipe resolved for the batch, every number printed with its rule.

The learning rate follows the linear rule from the task's reference batch, with gradual warmup, unless --lr is given.
Stop it at any moment; the same command goes on from the last checkpoint.

On several workers start it by torchrun. The batch is that of all workers together: each takes its share of the same
batches, so another number of workers goes on where the last one stopped. At the end it says how much each does in a
second, and on CPUs the efficiency: the share of their time in which they do not wait for each other's gradients.

Example: largebatch train digits --batch 128

Example: torchrun --nproc-per-node=2 -m largebatch train digits --batch 128
"""


def train_command(
    task: Annotated[str, typer.Argument(help="A task's name, or a Python file that defines one.")],
    batch: Annotated[
        int | None, typer.Option(min=1, help="Units in a step, over all workers. [default: the reference batch]")
    ] = None,
    microbatch: Annotated[
        int | None,
        typer.Option(min=1, help="Units in one worker's forward/backward, at most. [default: an eighth of the batch]"),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. [default: the linear rule]")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the run in full, as `largebatch recipe` does, and train nothing.")
    ] = False,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over the data; warmup and decays move with it. [default: the task's]"),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="End after so many steps, the schedule being that of the whole run.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data files.")] = None,
    backbone: Annotated[
        Path | None,
        typer.Option(help="Start from a classification run's weights, its model.pt: for detection and stamps."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. [default: largebatch-out/TASK-bB-seedN]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Every draw follows from it.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. [default: a GPU for each worker where there is one]")
    ] = None,
    parallel: Annotated[
        str, typer.Option(help="On several workers: ddp keeps the whole model on each, fsdp a share of it.")
    ] = "ddp",
    precision: Annotated[
        str, typer.Option(help="float32, or bf16 for forwards and backwards (weights stay float32).")
    ] = "float32",
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Pictures lie in memory by pixel: faster convolutions on GPUs.")
    ] = False,
    compile_model: Annotated[
        bool, typer.Option("--compile", help="Let torch.compile translate the model: minutes at first, then faster.")
    ] = False,
    loaders: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that fetch ahead, for each worker. [default: the task's]"),
    ] = None,
    checkpoint_seconds: Annotated[
        float | None, typer.Option(min=0, help="Time between checkpoints: what a kill may cost. [default: 20]")
    ] = None,
    monitor_every: Annotated[
        str | None,
        typer.Option(
            help="Measure the noise scale every so many steps; auto keeps its cost under 1 %. [default: 1, and auto on "
            "several workers or a GPU]"
        ),
    ] = None,
) -> None:
    """Train, print the resolved recipe, the errors and the noise scale."""
    with _said_once(), joined(device) as workers, _in_one_voice(workers):
        if dry_run:
            workers.agree(lambda: _describe(task, data, batch, workers))
            return
        torch.set_num_threads(1)  # the bits of a run do not depend on how many cores there are
        loaded = workers.all_or_none(lambda: _loaded(task, data, backbone, epochs))
        size = batch or loaded.recipe.reference_batch
        execution = workers.all_or_none(
            lambda: Execution(
                parallel=cast(Parallel, parallel), precision=cast(Precision, precision), channels_last=channels_last,
                compile=compile_model,
            )
        )  # fmt: skip
        resolved, spec = workers.agree(lambda: _resolved(loaded, size, microbatch, lr, max_steps, seed, workers))
        folder = out or Path("largebatch-out") / f"{Path(task).stem}-b{size}-seed{seed}"
        options: dict[str, Any] = {"workers": workers, "execution": execution, "loaders": loaders, "keep_model": True}
        options["monitor_every"] = workers.all_or_none(lambda: _cadence(monitor_every, workers))
        if checkpoint_seconds is not None:
            options["checkpoint_seconds"] = checkpoint_seconds
        with contextlib.ExitStack() as stack:
            run = workers.all_or_none(lambda: Run(loaded, spec, folder, **options))

            def claim() -> None:
                stack.enter_context(locked(folder))
                with blame(task):
                    identity = identity_of(
                        "train", task, loaded, run=asdict(spec), execution=_numbers(execution),
                        backbone_sha256=None if backbone is None else sha256(backbone.read_bytes()).hexdigest(),
                    )  # fmt: skip
                claim_folder(folder, identity)

            workers.agree(claim)
            record = _train(run, stack, task, resolved)
        if record.status == "diverged":
            lr_now = run.schedule(max(record.steps - 1, 0))
            raise DivergedError(
                f"training diverged at step {record.steps} of {spec.max_steps}: its loss is not finite (batch {size}, "
                f"learning rate {lr_now:.4g} there, {resolved.lr:.4g} at the peak). Lower --lr or --batch; "
                f"`largebatch study {task}` finds how large a batch it bears."
            )
        if workers.is_first:
            _report(record, folder)


def _describe(task: str, data: Path | None, batch: int | None, workers: Workers) -> None:
    known = known_task(task, data)
    size = batch or known.recipe.reference_batch
    typed = task if task.endswith(".py") else None
    print_description(describe(known, batch=size, gpus=workers.world_size, given=typed))


def _loaded(task: str, data: Path | None, backbone: Path | None, epochs: int | None) -> Task:
    loaded = load_task(task, data, backbone)
    return loaded if epochs is None else replace(loaded, recipe=_shrunk(loaded.recipe, epochs))


def _shrunk(recipe: Recipe, epochs: int) -> Recipe:
    """The same shape of schedule over another number of epochs."""
    factor = epochs / recipe.epochs
    return replace(
        recipe, epochs=epochs, warmup_epochs=recipe.warmup_epochs * factor,
        decay_epochs=tuple(epoch * factor for epoch in recipe.decay_epochs),
    )  # fmt: skip


def _resolved(
    task: Task, size: int, microbatch: int | None, lr: float | None, max_steps: int | None, seed: int, workers: Workers
) -> tuple[ResolvedRecipe, RunSpec]:
    """Resolve the recipe, print it, and say the run in full; on worker 0."""
    resolved = task.recipe.resolve(size, len(task.train), lr=lr, rule="--lr" if lr else None)
    print_table(
        f"{task.name} at batch {size}", ("number", "value", "rule", "source"),
        [(number.name, f"{number.value:g}" if isinstance(number.value, float) else number.value, number.rule,
          number.source) for number in resolved.numbers],
    )  # fmt: skip
    for warning in resolved.warnings:
        console.print(f"note: {warning}", soft_wrap=True, markup=False)
    part = microbatch or microbatch_for(size, Protocol(), task)
    local_batch = size // workers.world_size
    if task.microbatch is not None and (part != task.microbatch or local_batch % part):
        console.print(
            f"note: the loss of task {task.name!r} is defined over {task.microbatch} {task.unit} in a forward, and "
            f"here forwards of a worker's {local_batch} hold {min(part, local_batch)} at most. A multiple of "
            f"{task.microbatch * workers.world_size} as batch, without --microbatch, keeps it.",
            soft_wrap=True, markup=False,
        )  # fmt: skip
    measures = part < size or workers.world_size > 1
    if not measures and part == task.microbatch:
        console.print("note: one forward holds the whole batch, so the noise scale is not measured.")
    elif part >= size:
        raise ConfigError(
            f"noise scale needs two batch sizes; got microbatch={part} and batch={size}. "
            + (f"Use --microbatch {size // 2} or smaller." if size > 1 else "Use --batch 2 or more.")
        )
    spec = RunSpec(
        task=task.name, role="train", batch=size, microbatch=part, lr=resolved.lr, schedule="goyal", seed=seed,
        max_steps=min(resolved.num_steps, max_steps or resolved.num_steps), monitor=measures, evaluate_epochs=True,
    )  # fmt: skip
    return resolved, spec


def _numbers(execution: Execution) -> dict[str, Any]:
    """What of it changes numbers by more than the order of sums, which another number of workers changes too."""
    return {name: value for name, value in asdict(execution).items() if name != "parallel"}


def _cadence(given: str | None, workers: Workers) -> int | Literal["auto"]:
    if given is None:
        return "auto" if workers.world_size > 1 or workers.device.type == "cuda" else 1
    if given == "auto":
        return "auto"
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"--monitor-every is a whole number of steps, at least 1, or auto; got {given!r}.")
    return int(given)


def _train(run: Run, stack: contextlib.ExitStack, task: str, resolved: ResolvedRecipe) -> RunRecord:
    workers, folder, spec = run.workers, run.folder, run.spec
    run.wants_stop = stack.enter_context(_asked_to_stop(alone=workers.world_size == 1))
    waiting, rate = Waiting(), ""
    if workers.world_size > 1 and workers.device.type == "cpu":
        make = run.task.model
        run.task = replace(run.task, model=lambda: waiting.watch(make()))
    progress = stack.enter_context(StudyProgress()) if workers.is_first else None
    if progress is not None:
        layout = f", {workers.world_size} workers" if workers.world_size > 1 else ""
        progress.on_phase("train", f"{spec.max_steps} steps, learning rate up to {resolved.lr:.4g}{layout}")
        began: list[tuple[float, int]] = []

        def on_step(where: Progress, loss: float, monitor: NoiseScaleMonitor | None) -> None:
            nonlocal rate
            if not began:  # the first step of this call is slow for other reasons
                began.append((time.monotonic(), where.units))
            seconds, units = time.monotonic() - began[0][0], where.units - began[0][1]
            rate = f"{units / seconds / workers.world_size:,.0f} {run.task.unit}/s" if units and seconds else ""
            rate += " per worker" if rate and workers.world_size > 1 else ""
            progress.on_step(where, loss, monitor, spec.max_steps, rate)
            if where.step == spec.max_steps and monitor is not None:
                write_json(folder / "noise_scale.json", {"noise_scale": str(monitor.noise_scale)})

        run.on_step = on_step
    with blame(task), waiting:
        record = run.run()
    shares = [share for share in workers.gather(waiting.share) if share is not None]
    if progress is not None and rate and record.status == "exhausted":
        efficiency = f", efficiency {100 * (1 - sum(shares) / len(shares)):.0f} %" if shares else ""
        progress.on_phase("done", rate + efficiency)
    return record


def _report(record: RunRecord, folder: Path) -> None:
    rows = [
        (int(row["epoch"]), f"{row['train_loss']:.4f}", f"{100 * row['error']:.2f} %", f"{row['held_out_loss']:.4f}")
        for row in record.epochs
    ]
    print_table("", ("epoch", "train loss", "held-out error", "held-out loss"), rows)
    if (folder / "skipped.json").exists():
        skipped = read_json(folder / "skipped.json")
        console.print(
            f"note: {len(skipped)} examples could not be read and were left out: {', '.join(list(skipped)[:5])} "
            f"({folder / 'skipped.json'} names all).", soft_wrap=True, markup=False,
        )  # fmt: skip
    if (folder / "measures.json").exists():
        for name, value in read_json(folder / "measures.json").items():
            console.print(f"{name.replace('_', ' ')}: {100 * value:.1f} %", highlight=False)
    if (folder / "noise_scale.json").exists():
        console.print(read_json(folder / "noise_scale.json")["noise_scale"], soft_wrap=True, markup=False)
    write_stdout(str(folder / "run.json"))


@contextlib.contextmanager
def _said_once() -> Generator[None]:
    """End a worker whose error another one says."""
    try:
        yield
    except LargebatchError as error:
        if is_already_said(error):
            raise typer.Exit(2) from None
        raise


@contextlib.contextmanager
def _in_one_voice(workers: Workers) -> Generator[None]:
    """Let worker 0 say what all of them see."""
    if not workers.is_first:  # feeds name what they alone had to leave out
        logging.getLogger("largebatch").setLevel(logging.ERROR)
        logging.getLogger("largebatch.train.feed").setLevel(logging.WARNING)
    try:
        yield
    except StoppedError as why:
        if workers.is_first:
            console.print(f"note: {why}", soft_wrap=True, markup=False)
            say_stopped()
        raise typer.Exit(130) from None
    except (WorkerLostError, DivergedError) as error:
        if not workers.is_first:  # of a lost worker torchrun speaks too, so that its end is never unsaid
            already_said(error)
        raise


@contextlib.contextmanager
def _asked_to_stop(*, alone: bool) -> Generator[Callable[[], bool]]:
    """Take Ctrl-C and SIGTERM for a wish that the loop grants after a step; a second Ctrl-C of one worker ends it."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        before = handlers[signal.SIGINT]
        if alone and number == signal.SIGINT and asked and callable(before):
            before(number, frame)
        asked.append(number)

    handlers = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
