"""`largebatch train`: train a task at a batch size by Goyal's rules, the noise scale measured along the way."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from largebatch.cli.output import StudyProgress, console, print_table, write_stdout
from largebatch.errors import ConfigError, DivergedError
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.records.files import read_json, write_json
from largebatch.records.schema import RunSpec
from largebatch.study.identity import claim_folder, identity_of, locked
from largebatch.study.launch import blame
from largebatch.study.plan import Protocol, microbatch_for
from largebatch.tasks.catalog import load_task
from largebatch.train.loop import Progress, Run

HELP = """Train TASK once: the recipe resolved for the batch, every number printed with its rule.

The learning rate follows the linear rule from the task's reference batch, with gradual warmup, unless --lr is given.
Stop it at any moment; the same command goes on from the last checkpoint.

Example: largebatch train digits --batch 128
"""


def train_command(
    task: Annotated[str, typer.Argument(help="A task's name, or a Python file that defines one.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Units in a step. [default: the reference batch]")] = None,
    microbatch: Annotated[
        int | None, typer.Option(min=1, help="Units in a forward/backward. [default: an eighth of the batch]")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. [default: the linear rule]")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data files.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. [default: largebatch-out/TASK-bB-seedN]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Every draw follows from it.")] = 0,
) -> None:
    """Train, print the resolved recipe, the errors and the noise scale."""
    loaded = load_task(task, data)
    size = batch or loaded.recipe.reference_batch
    resolved = loaded.recipe.resolve(size, len(loaded.train), lr=lr, rule="--lr" if lr else None)
    print_table(
        f"{loaded.name} at batch {size}", ("number", "value", "rule", "source"),
        [(number.name, f"{number.value:g}" if isinstance(number.value, float) else number.value, number.rule,
          number.source) for number in resolved.numbers],
    )  # fmt: skip
    for warning in resolved.warnings:
        console.print(f"note: {warning}", soft_wrap=True, markup=False)
    part = microbatch or microbatch_for(size, Protocol(), loaded.max_microbatch)
    if part >= size:
        raise ConfigError(
            f"noise scale needs two batch sizes; got microbatch={part} and batch={size}. "
            + (f"Use --microbatch {size // 2} or smaller." if size > 1 else "Use --batch 2 or more.")
        )
    spec = RunSpec(
        task=loaded.name, role="train", batch=size, microbatch=part, lr=resolved.lr, schedule="goyal", seed=seed,
        max_steps=resolved.num_steps, monitor=True, evaluate_epochs=True,
    )  # fmt: skip
    folder = out or Path("largebatch-out") / f"{Path(task).stem}-b{size}-seed{seed}"
    torch.set_num_threads(1)  # the bits of a run do not depend on how many cores there are
    with locked(folder), StudyProgress() as progress:
        with blame(task):
            identity = identity_of("train", task, loaded, run=asdict(spec))
        claim_folder(folder, identity)
        progress.on_phase("train", f"{resolved.num_steps} steps, learning rate up to {resolved.lr:.4g}")

        def on_step(where: Progress, loss: float, monitor: NoiseScaleMonitor | None) -> None:
            progress.on_step(where, loss, monitor, resolved.num_steps)
            if monitor is not None and where.step == resolved.num_steps:
                write_json(folder / "noise_scale.json", {"noise_scale": str(monitor.noise_scale)})

        with blame(task):
            record = Run(loaded, spec, folder, on_step=on_step, keep_model=True).run()
    if record.status == "diverged":
        raise DivergedError(
            f"training diverged at step {record.steps} of {resolved.num_steps} (batch {size}, learning rate "
            f"{resolved.lr:.4g}). Lower --lr or --batch; `largebatch study {task}` finds how large a batch it bears."
        )
    rows = [
        (int(row["epoch"]), f"{row['train_loss']:.4f}", f"{100 * row['error']:.2f} %", f"{row['held_out_loss']:.4f}")
        for row in record.epochs
    ]
    print_table("", ("epoch", "train loss", "held-out error", "held-out loss"), rows)
    if (folder / "noise_scale.json").exists():
        console.print(read_json(folder / "noise_scale.json")["noise_scale"], soft_wrap=True, markup=False)
    write_stdout(str(folder / "run.json"))
