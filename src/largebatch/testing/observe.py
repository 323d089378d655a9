"""What did a user's own step do to its model, seen from outside?

Runs in a worker: makes the set-up, gives it the starting weights, deals it its examples and writes down, for every
step, the gradients as the optimizer found them, the update, the buffers, the loss and the optimizer's own numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from largebatch.errors import ConfigError
from largebatch.groups import is_spread
from largebatch.testing.deal import microbatches, num_examples, share_of, share_sizes, take
from largebatch.testing.processes import Say, seed_all
from largebatch.testing.quiet import Suspect, batch_norms, without
from largebatch.testing.weights import Named, buffers, dense, hash_of, load_whole, local, parameters, state, whole

Shares = Literal["even", "uneven", "own"]
_SETTINGS = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "betas", "eps", "alpha")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of the user's step: how many workers, what they get, and what is taken out."""

    name: str
    """File name of what it writes down."""
    steps: int
    """Number of steps."""
    shares: Shares = "even"
    """How the global batch is dealt: equal shares, unequal ones, or by the caller's own function."""
    microbatch: int | None = None
    """Examples a microbatch; None hands the share over whole."""
    part: tuple[int, int] | None = None
    """Only these positions of the global batch."""
    off: frozenset[Suspect] = frozenset()
    """What is taken out of the step."""
    draw: int = 0
    """Which random numbers the steps see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all runs of one check share."""

    make: Callable[[int, int], Any]
    """The user's: (rank, world size) to a set-up."""
    batch: Any
    """Examples; or a function of the step; or one of the step, the rank and the world size."""
    one_by_one: bool
    """`batch` is a function that deals for itself."""
    microbatched: bool
    """The step takes a list of microbatches."""
    seed: int
    """Of the global generators, before `make`."""
    folder: str
    """Where runs write."""


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """What one step did, on one worker."""

    gradients: Named
    """As the optimizer found them; empty on workers but the first."""
    updates: Named
    """Weights after the step less those before it."""
    buffers: Named
    """After the step; empty on workers but the first."""
    loss: float | None
    """What the step returned."""
    settings: list[dict[str, Any]]
    """The optimizer's numbers when it stepped, a dict a parameter group."""
    optimizer_steps: int
    """Times that it stepped."""
    rows: list[int]
    """A hash of every row that entered the model."""
    num_examples: int
    """The worker's share."""


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """What one run did, on one worker."""

    start: Named
    """The weights and buffers at the start of the steps; on the first worker."""
    made: int
    """A hash of the weights as `make` left them; 0 where they are sharded."""
    has_batch_norm: bool
    """A layer keeps running statistics."""
    steps: list[StepRecord]
    """One a step."""


def observe(rank: int, world_size: int, say: Say, job: Job, runs: tuple[Run, ...]) -> None:
    """Do these runs one after the other, and write each worker's record of each to the job's folder."""
    for run in runs:
        record = _observe_one(rank, world_size, say, job, run)
        path = Path(job.folder) / f"{run.name}.{world_size}.{rank}"
        torch.save(record, path.with_suffix(f"{path.suffix}.part"))
        path.with_suffix(f"{path.suffix}.part").rename(path)


def read(job: Job, run: Run, world_size: int) -> list[RunRecord] | None:
    """Every worker's record of a run; None when one of them did not finish it."""
    paths = [Path(job.folder) / f"{run.name}.{world_size}.{rank}" for rank in range(world_size)]
    if not all(path.exists() for path in paths):
        return None
    return [torch.load(path, weights_only=False) for path in paths]


def _observe_one(rank: int, world_size: int, say: Say, job: Job, run: Run) -> RunRecord:
    say("make")
    seed_all(job.seed)
    model, optimizer, step = _unpack(job.make(rank, world_size))
    sharded = any(is_spread(tensor) for tensor in model.parameters())
    made = 0 if sharded else hash_of(b"".join(hash_of(local(p)).to_bytes(8, "big") for p in model.parameters()))
    start = Path(job.folder) / "start"
    if start.exists():
        load_whole(model, torch.load(start), world_size)
    first = rank == 0
    begun = whole(state(model), keep=True)
    if not start.exists() and world_size == 1:
        torch.save(begun, start)
    weights = whole(dict(parameters(model)), keep=True)
    steps: list[StepRecord] = []
    for index in range(run.steps):
        say(f"step {index}")
        share, count = _share(job, run, rank, world_size, index)
        seed_all(job.seed + 1 + index + 7919 * run.draw)
        with _Watch(model, optimizer) as watch, without(run.off, model):
            loss = step(share)
        after = whole(dict(parameters(model)), keep=True)
        gradients = whole(watch.gradients, keep=first)
        steps.append(
            StepRecord(
                gradients=gradients,
                updates={name: after[name] - weights[name] for name in after},
                buffers=whole(dict(buffers(model)), keep=first),
                loss=_number(loss),
                settings=watch.settings,
                optimizer_steps=watch.optimizer_steps,
                rows=watch.rows,
                num_examples=count,
            )
        )
        weights = after
    if not any(record.optimizer_steps for record in steps):
        raise ConfigError(
            f"step was called {run.steps} times on worker {rank} of {world_size} and never called optimizer.step() of "
            "the optimizer that make returned. A step does forward, backward and the update."
        )
    return RunRecord(start=begun if first else {}, made=made, has_batch_norm=bool(batch_norms(model)), steps=steps)


def _share(job: Job, run: Run, rank: int, world_size: int, index: int) -> tuple[Any, int]:
    if job.one_by_one:
        seed_all(job.seed + 1 + index + 104729 * (rank + 1))  # nothing keeps real workers' draws equal
        share = job.batch(index, rank, world_size)
    else:
        seed_all(job.seed + 1 + index)
        batch = job.batch(index) if callable(job.batch) else job.batch
        if run.part is not None:
            batch = take(batch, *run.part)
        sizes = share_sizes(num_examples(batch), world_size, run.shares == "uneven")
        share = share_of(batch, sizes, rank)
    count = num_examples(share)
    if job.microbatched:
        return microbatches(share, run.microbatch or count), count
    return share, count


def _unpack(made: Any) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Any], Any]]:
    parts: tuple[Any, ...]
    if isinstance(made, tuple):
        parts = made
    else:
        parts = tuple(getattr(made, name) for name in ("model", "optimizer", "step") if hasattr(made, name))
    if len(parts) != 3:
        raise ConfigError(
            f"make(rank, world_size) returns (model, optimizer, step), or an object with these three attributes; got "
            f"{type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple) else "") + "."
        )
    model, optimizer, step = parts
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # what a library wrapped around it
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"make's second part is a torch.optim.Optimizer; got {type(optimizer).__name__}.")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"make's first part is the model, a torch.nn.Module; got {type(model).__name__}.")
    if not callable(step):
        raise ConfigError(f"make's third part is step, a function of a share of the batch; got {type(step).__name__}.")
    return model, optimizer, step


class _Watch:
    """What happens to a model and its optimizer while one step runs."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.gradients: Named = {}
        self.settings: list[dict[str, Any]] = []
        self.optimizer_steps = 0
        self.rows: list[int] = []
        self.handles = [
            model.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True),
            optimizer.register_step_pre_hook(self._step),
        ]

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
        if tensors:
            rows = local(tensors[0]).contiguous()
            self.rows += [hash_of(row) for row in rows.reshape(len(rows), -1)] if rows.numel() else []

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizer_steps += 1
        self.settings = [
            {key: _plain(group[key]) for key in _SETTINGS if key in group} for group in optimizer.param_groups
        ]
        self.gradients = {
            name: torch.zeros_like(weight) if weight.grad is None else dense(weight.grad).detach().clone()
            for name, weight in parameters(self.model)
        }


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return tuple(_plain(item) for item in value) if isinstance(value, tuple | list) else value


def _number(loss: Any) -> float | None:
    if is_spread(loss):
        loss = loss.full_tensor()
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.detach())
    return float(loss) if isinstance(loss, int | float) else None
