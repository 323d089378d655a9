"""`largebatch recipe`: what would TASK be trained with on so many GPUs, and what is to be expected of it?"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from largebatch.cli.output import console, print_table, write_stdout
from largebatch.errors import ConfigError
from largebatch.recipe.resolved import ResolvedRecipe
from largebatch.tasks.catalog import load_task
from largebatch.tasks.published import PUBLISHED, Published, of_task, published

HELP = """Print what TASK would be trained with on so many GPUs; nothing is trained.

Every number with its rule and source, how batch norm keeps its n, how fast the input must be, what was published at
this batch, and the command that starts it. The full-size tasks need no data for it.

Example: largebatch recipe imagenet --gpus 64 --local-batch 128
"""

_MOST_PER_NODE = 8
_RATES = (1e-6, 1e12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A run that has not begun."""

    task: str
    """As on the command line."""
    resolved: ResolvedRecipe
    """Every number with its rule and source."""
    epochs: int
    """Passes over the data."""
    batch_norm: str
    """How batch norm's n, or the forward that the loss is defined over, is kept."""
    examples_per_second: float | None
    """Of one GPU, which its loader must keep up with; None where nothing is known."""
    loading: str
    """The same in words, with where it comes from."""
    curve: tuple[str, ...]
    """What was published at this batch, a sentence each; empty where nothing was."""
    command: str
    """What starts the run."""

    def to_json(self) -> dict[str, Any]:
        """What another program reads."""
        resolved = self.resolved
        return {
            "task": self.task, "batch": resolved.batch, "gpus": resolved.world_size,
            "local_batch": resolved.local_batch, "microbatch": resolved.microbatch, "epochs": self.epochs,
            "num_steps": resolved.num_steps, "lr": resolved.lr, "batch_norm": self.batch_norm,
            "examples_per_second_per_gpu": self.examples_per_second, "loading": self.loading,
            "curve": list(self.curve), "warnings": list(resolved.warnings), "command": self.command,
            "numbers": [asdict(number) for number in resolved.numbers],
        }  # fmt: skip


def known_task(task: str, data: Path | None = None) -> Published:
    """What is known of a task: of a full-size one without its data, of another from its data."""
    return published(task) if data is None and task in PUBLISHED else of_task(load_task(task, data))


def describe(
    known: Published, *, batch: int, gpus: int, images_per_second: float | None = None, given: str | None = None
) -> Description:
    """What a run of `batch` over `gpus` workers would be.

    Args:
        known: the task, from `published` or `of_task`.
        batch: units in one step, over all workers.
        gpus: workers that share it evenly, >= 1.
        images_per_second: units a second that one worker trains, > 0; None takes what was published.
        given: the task as typed, where that is a file; None is its name.

    Returns:
        The description; `print_description` prints it.

    Raises:
        ConfigError: the batch cannot be dealt out so (the sentence names the nearest that can), or a number is out of
            its range.

    Source: Goyal 2017, sec. 2.3 (batch norm), 5.1, 5.5.
    """
    if images_per_second is not None and not (images_per_second > 0 and math.isfinite(images_per_second)):
        raise ConfigError(f"--images-per-second is a number above 0; got {images_per_second!r}.")
    if images_per_second is not None and not _RATES[0] <= images_per_second <= _RATES[1]:
        raise ConfigError(
            f"--images-per-second is from {_RATES[0]:g} to {_RATES[1]:g}, what one GPU trains; got "
            f"{images_per_second!r}."
        )
    recipe, forward = known.recipe, known.microbatch
    resolved = recipe.resolve(batch, known.num_examples, world_size=gpus)
    local = resolved.local_batch
    if forward is not None and local % forward == 0:
        resolved = recipe.resolve(batch, known.num_examples, world_size=gpus, accumulation=local // forward)
    elif forward is not None and recipe.batchnorm_n is None:
        below, above = (gpus * forward * share for share in (local // forward, local // forward + 1))
        raise ConfigError(
            f"a worker's {local} cannot be gone through {forward} at a time, over which the loss of {known.name!r} is "
            f"defined. The nearest batches that can, on {gpus}: {f'{below} or ' if below else ''}{above}."
        )
    rate = images_per_second or known.rate
    return Description(
        task=known.name, resolved=resolved, epochs=recipe.epochs, batch_norm=_batch_norm(known, local),
        examples_per_second=rate, loading=_loading(known, rate, given=images_per_second is not None, gpus=gpus),
        curve=_curve(known, batch, local), command=_command(given or known.name, batch, gpus),
    )  # fmt: skip


def _batch_norm(known: Published, local: int) -> str:
    n, forward = known.recipe.batchnorm_n, known.microbatch
    if n is None:
        if forward is None:
            return f"the recipe names no n: a batch norm would take its statistics over each forward, {local} at most"
        return (
            f"the loss is defined over forwards of {forward}: {local // forward} for each worker's {local}. No batch "
            f"norm is trained: frozen, or group norm"
        )
    baseline = f"n = {n}, as in the baseline"
    if local == n:
        return f"{baseline}: a worker's {local} are one forward of plain batch norm"
    if local % n == 0:
        through = f"`train` goes through them {n} at a time" if forward == n else f"`train` needs --microbatch {n}"
        return f"{baseline}: a worker's {local} are {local // n} ghost batches of {n}; {through}"
    return (
        f"{baseline}: needs group batch norm over {n // local} workers of {local} (largebatch.batchnorm_over). `train` "
        f"alone would normalise over {local}, which is another loss; take --local-batch {n}"
    )


def _loading(known: Published, rate: float | None, *, given: bool, gpus: int) -> str:
    if rate is None:
        return f"not known: give --images-per-second, what one GPU trains of {known.name}"
    hours = known.recipe.epochs * known.num_examples / (rate * gpus) / 3600
    source = "as given" if given else f"{known.rate_source}; today's GPUs are faster, give --images-per-second"
    return (
        f"{rate:,.0f} {known.unit}/s for each GPU, {rate * gpus:,.0f} for all ({source}). At that rate the run takes "
        f"{hours:,.2f} hours"
    )


def _curve(known: Published, batch: int, local: int) -> tuple[str, ...]:
    said = [curve.expect(batch) for curve in known.curves]
    said += [f"of {known.curves[0].trained}"] if known.curves else []
    n = known.recipe.batchnorm_n
    if known.curves and n is not None and local < n:
        said.append(f"which holds for batch norm over {n}, not over {local}")
    return tuple(said)


def _command(task: str, batch: int, gpus: int) -> str:
    data = " --data DIR" if task in PUBLISHED else ""
    arguments = f"train {task}{data} --batch {batch}"
    if gpus == 1:
        return f"largebatch {arguments}"
    per_node = next(count for count in range(_MOST_PER_NODE, 0, -1) if gpus % count == 0)
    nodes = gpus // per_node
    where = "" if nodes == 1 else f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --rdzv-id=JOB "
    return f"torchrun {where}--nproc-per-node={per_node} -m largebatch {arguments}"


def print_description(description: Description) -> None:
    """Print it for people, on standard error; the command alone goes to standard output."""
    resolved = description.resolved
    print_table(
        f"{description.task} at batch {resolved.batch}: {resolved.world_size} x {resolved.local_batch}",
        ("number", "value", "rule", "source"),
        [(number.name, f"{number.value:g}" if isinstance(number.value, float) else number.value, number.rule,
          number.source) for number in resolved.numbers],
    )  # fmt: skip
    lines = [
        ("steps", f"{resolved.num_steps} over {description.epochs} epochs of {resolved.units_per_epoch:,}"),
        ("batch norm", description.batch_norm),
        ("loader", description.loading),
        *(("expect", line) for line in description.curve or ("nothing is published of it",)),
        *(("note", warning) for warning in resolved.warnings),
    ]
    for name, line in lines:
        console.print(f"{name}: {line}", soft_wrap=True, markup=False)
    write_stdout(description.command)


def recipe_command(
    task: Annotated[str, typer.Argument(help="A task's name, or a Python file that defines one.")],
    gpus: Annotated[int, typer.Option(min=1, help="Workers, one a GPU.")] = 1,
    local_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Units of each worker in a step. [default: the baseline's n, or its batch]"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Units in a step, over all workers, instead of --local-batch.")
    ] = None,
    images_per_second: Annotated[
        float | None, typer.Option(help="What one GPU trains. [default: what was published]")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the task's data files; counts what is there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON on standard output.")] = False,
) -> None:
    """Print the resolved recipe and the command."""
    known = known_task(task, data)
    recipe = known.recipe
    if batch is not None and local_batch is not None and batch != gpus * local_batch:
        raise ConfigError(
            f"--batch {batch} is not --gpus {gpus} times --local-batch {local_batch}, which is {gpus * local_batch}. "
            "Give one of --batch and --local-batch."
        )
    size = batch or gpus * (local_batch or recipe.batchnorm_n or known.microbatch or recipe.reference_batch)
    typed = task if task.endswith(".py") else None
    description = describe(known, batch=size, gpus=gpus, images_per_second=images_per_second, given=typed)
    if as_json:
        write_stdout(json.dumps(description.to_json(), indent=1))
    else:
        print_description(description)
