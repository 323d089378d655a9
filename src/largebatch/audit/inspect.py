"""What is wrong with this set-up, as far as can be seen before a step is taken?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from largebatch.audit import look_data, look_model, look_momentum, look_optimizer, look_schedule
from largebatch.audit.findings import Finding, sort_findings
from largebatch.audit.look_order import Order, is_loader, is_of_accelerate, order_of
from largebatch.audit.look_rates import Rates, constant_rates, evaluate, is_scheduler
from largebatch.audit.look_setup import Setup
from largebatch.errors import ConfigError
from largebatch.groups import num_workers
from largebatch.recipe.recipe import Recipe

_LOOKS = (look_optimizer.look, look_schedule.look, look_momentum.look, look_model.look, look_data.look)


def inspect(
    model: nn.Module,
    optimizer: Any,
    dataloader: Any = None,
    scheduler: Any = None,
    *,
    reference_batch: int | None = None,
    reference_lr: float | None = None,
    recipe: Recipe | None = None,
    batch: int | None = None,
    accumulation: int = 1,
    world_size: int | None = None,
    rank: int | None = None,
    batchnorm_n: int | None = None,
    b_crit: float | None = None,
    epochs: int | None = None,
) -> list[Finding]:
    """The known mistakes in a training that has not begun, or stands still.

    Nothing is run, changed or drawn: a scheduler is evaluated on a copy of it, an optimizer's momentum on a stand-in.
    What cannot be known from what was given is not guessed, so that a mistake may go unseen: what steps the scheduler,
    what clips and what the loss is divided by show only in steps.

    Args:
        model: the model as it is trained, in DistributedDataParallel or not.
        optimizer: its optimizer, torch's or of torch's kind; of accelerate and Lightning too, and what
            `configure_optimizers` returns for one optimizer (its scheduler is taken if none is given).
        dataloader: the training data's DataLoader of this worker; timm's and accelerate's too.
        scheduler: the learning rate's scheduler, torch's, timm's or accelerate's; None is a constant rate, unless the
            optimizer bears the mark of a scheduler.
        reference_batch: units in an optimizer step of the baseline.
        reference_lr: learning rate that the baseline was tuned with at `reference_batch`.
        recipe: in place of these two and `batchnorm_n`, with its own rule for the learning rate.
        batch: units in an optimizer step, over all workers and accumulations, in the unit of `reference_batch`; None
            is the loader's batch times `accumulation` times `world_size`, in examples, or what a ShuffledLoader says.
        accumulation: batches of the loader in an optimizer step, on each worker.
        world_size: workers; None is what the loader's sampler deals to, else torch.distributed's, else 1.
        rank: this worker; None is not known.
        batchnorm_n: examples that the baseline's batch norm was taken over.
        b_crit: measured critical batch size, in the unit of `batch`.
        epochs: passes over the data; with a loader of known length the scheduler is looked at for no longer.

    Returns:
        What was found, errors first; empty if nothing was.

    Raises:
        ConfigError: an argument is not of its kind, or two contradict each other.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.LayerNorm(3))
    >>> for finding in inspect(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)):
    ...     print(finding.code, finding.about.name, finding.about.severity)
    ...     print(finding.seen)
    LB101 decay-on-norms warning
    2 parameters of LayerNorm have weight decay 0.0001: 1.weight, 1.bias.

    Source: Goyal 2017, sec. 2 and 3; McCandlish 2018, sec. 2.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a torch.nn.Module; got {_kind(model)}. Hand over the module that is trained.")
    optimizer, its_scheduler = _one_optimizer(optimizer)
    scheduler = _one_scheduler(its_scheduler if scheduler is None else scheduler, optimizer)
    order = _order(dataloader)
    for name, count in (
        ("reference_batch", reference_batch), ("accumulation", accumulation), ("world_size", world_size),
        ("batchnorm_n", batchnorm_n), ("epochs", epochs), ("batch", batch),
    ):  # fmt: skip
        _check(name, count, whole=True)
    for name, value in (("reference_lr", reference_lr), ("b_crit", b_crit)):
        _check(name, value, whole=False)
    if recipe is not None:
        reference_batch, reference_lr, batchnorm_n = _of_recipe(recipe, reference_batch, reference_lr, batchnorm_n)
    known_world_size = world_size
    if known_world_size is None:
        known_world_size = (order.num_workers if order else None) or (num_workers() if num_workers() > 1 else None)
    workers = known_world_size or 1
    if rank is not None and not (isinstance(rank, int) and 0 <= rank < workers):
        raise ConfigError(f"rank is 0 to world_size - 1 = {workers - 1}; got {rank!r}. Give world_size too.")
    if batch is None and order is not None:
        batch = order.batch or (order.local_batch * accumulation * workers if order.local_batch else None)
    local_batch = _local_batch(order, batch, accumulation, known_world_size)
    setup = Setup(
        model=_bare(model),
        split_by_torch=isinstance(model, DataParallel),
        optimizer=optimizer,
        rates=_rates(scheduler, optimizer, model, dataloader, _num_steps(dataloader, epochs, accumulation)),
        scheduled=scheduler is not None,
        order=order,
        resharded=_is_lightning(model) or (dataloader is not None and is_of_accelerate(dataloader)),
        recipe=recipe,
        reference_batch=reference_batch,
        reference_lr=reference_lr,
        batch=batch,
        local_batch=local_batch,
        accumulation=accumulation,
        world_size=workers,
        rank=rank,
        batchnorm_n=batchnorm_n,
        b_crit=b_crit,
    )
    return sort_findings(finding for look in _LOOKS for finding in look(setup))


def _one_optimizer(optimizer: Any) -> tuple[Optimizer, Any]:
    """The optimizer under its wrappers, and the scheduler that came with it (what configure_optimizers returns)."""
    scheduler = None
    if isinstance(optimizer, Mapping):
        optimizer, scheduler = optimizer.get("optimizer"), optimizer.get("lr_scheduler")
    elif isinstance(optimizer, list | tuple):
        optimizers, *rest = optimizer if optimizer and isinstance(optimizer[0], list | tuple) else (optimizer,)
        schedulers = rest[0] if rest else []
        if len(optimizers) != 1 or len(schedulers) > 1:
            raise ConfigError(
                f"an audit takes one optimizer; got {len(optimizers)} with {len(schedulers)} schedulers. Call it for "
                f"each, with the part of the model that it trains."
            )
        optimizer, scheduler = optimizers[0], (schedulers[0] if schedulers else None)
    given = optimizer
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):  # accelerate's and Lightning's wrappers
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer is a torch.optim.Optimizer; got {_kind(given)}.")
    return optimizer, scheduler


def _one_scheduler(scheduler: Any, optimizer: Optimizer) -> Any:
    given = scheduler
    while True:
        if isinstance(scheduler, Mapping):  # Lightning's
            scheduler = scheduler.get("scheduler")
        elif not is_scheduler(scheduler) and hasattr(scheduler, "scheduler"):  # accelerate's, Lightning's
            scheduler = scheduler.scheduler
        else:
            break
    if scheduler is None:
        return None
    if not is_scheduler(scheduler):
        raise ConfigError(
            f"scheduler is a learning-rate scheduler of torch, timm, accelerate or Lightning; got {_kind(given)}."
        )
    driven = {id(parameter) for group in scheduler.optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in driven for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"the {type(scheduler).__name__} drives another optimizer than the {type(optimizer).__name__} that was "
            f"given: the two have no parameter in common. Make the scheduler from this optimizer."
        )
    return scheduler


def _order(dataloader: Any) -> Order | None:
    if dataloader is None:
        return None
    if not is_loader(dataloader):
        raise ConfigError(f"dataloader is a torch.utils.data.DataLoader; got {_kind(dataloader)}.")
    return order_of(dataloader)


def _of_recipe(
    recipe: Any, reference_batch: int | None, reference_lr: float | None, batchnorm_n: int | None
) -> tuple[int, float, int | None]:
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe is a largebatch.Recipe, not a resolved one; got {_kind(recipe)}.")
    for name, value, own in (
        ("reference_batch", reference_batch, recipe.reference_batch),
        ("reference_lr", reference_lr, recipe.reference_lr),
        ("batchnorm_n", batchnorm_n, recipe.batchnorm_n),
    ):
        if value is not None and own is not None and value != own:
            raise ConfigError(f"{name} is {value!r}, and {own!r} in the recipe: give one of the two.")
    return recipe.reference_batch, recipe.reference_lr, batchnorm_n or recipe.batchnorm_n


def _check(name: str, value: Any, *, whole: bool) -> None:
    if value is None and name != "accumulation":
        return
    if whole and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name} is a whole number of at least 1; got {value!r}.")
    if whole:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} is a finite number above 0; got {value!r}.")


def _local_batch(order: Order | None, batch: int | None, accumulation: int, world_size: int | None) -> float | None:
    if order is not None:
        return order.local_batch
    return batch / (accumulation * world_size) if batch and world_size else None


def _num_steps(dataloader: Any, epochs: int | None, accumulation: int) -> int | None:
    if dataloader is None or epochs is None:
        return None
    try:
        return max(2, epochs * math.ceil(len(dataloader) / accumulation))
    except (TypeError, NotImplementedError):  # no length: an endless stream
        return None


def _rates(
    scheduler: Any, optimizer: Optimizer, model: nn.Module, dataloader: Any, num_steps: int | None
) -> Rates | None:
    if scheduler is None:
        # A scheduler leaves its mark on the groups: one that was not given decides, and what it does is not known.
        return None if any("initial_lr" in group for group in optimizer.param_groups) else constant_rates(optimizer)
    kept = [model, optimizer, dataloader, getattr(dataloader, "dataset", None), *model.parameters()]
    return evaluate(scheduler, num_steps=num_steps, keep=[each for each in kept if each is not None])


def _bare(model: nn.Module) -> nn.Module:
    model = model.module if isinstance(model, DistributedDataParallel | DataParallel) else model
    return getattr(model, "_orig_mod", model)  # what torch.compile wraps


def _is_lightning(model: nn.Module) -> bool:
    """Whether Lightning is going to replace the loader's sampler by a distributed one."""
    return any(
        kind.__name__ == "LightningModule" and kind.__module__.startswith(("lightning.", "pytorch_lightning."))
        for kind in type(model).__mro__
    )


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
