"""Where does the learning rate enter the momentum, and is it corrected there and only there?

An optimizer's form is not read off its name: a stand-in of it, over parameters of its own, takes one step with a
gradient and one without, the second at the first one's rate or at twice that. What the second step moves is history
alone. In form (9), and in form (10) with its correction, it doubles with the rate; in form (10) without it stays; with
a correction in form (9) it is four times as much.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.audit.findings import Finding
from largebatch.audit.look_setup import Setup

Form = Literal["as it should be", "uncorrected", "corrected twice"]
"""How the history of a momentum answers a change of the rate."""


def look(setup: Setup) -> Iterator[Finding]:
    """Find LB107, if the rate changes."""
    if setup.rates is None or not setup.rates.changes:
        return
    form = form_of(setup.optimizer)
    kind = type(setup.optimizer).__name__
    change = f"while its rate goes from {setup.rates.first:g} to {setup.rates.peak:g} and on"
    if form == "uncorrected":
        yield Finding(
            code="LB107",
            seen=f"{kind} keeps the learning rate inside its velocity and does not correct the velocity, {change}.",
        )
    elif form == "corrected twice":
        yield Finding(
            code="LB107",
            seen=f"{kind} keeps the learning rate outside its velocity and still multiplies the velocity by "
            f"new_lr / old_lr, {change}.",
        )
    elif form is not None and setup.rates.momentum_follows:
        yield Finding(
            code="LB107",
            seen=f"the scheduler multiplies the momentum of {kind} by new_lr / old_lr, which needs no correction, "
            f"{change}.",
        )


def form_of(optimizer: Optimizer) -> Form | None:
    """How the first group with a momentum answers a change of the rate; None where that cannot be tried.

    >>> form_of(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9))
    'as it should be'
    """
    chosen = [number for number, group in enumerate(optimizer.param_groups) if _momentum(group) > 0]
    if not chosen:
        return None
    try:
        first, same = _moves(optimizer, chosen[0], 0.1, 0.1)
        _, doubled = _moves(optimizer, chosen[0], 0.1, 0.2)
        first_doubled, _ = _moves(optimizer, chosen[0], 0.2, 0.2)
    except Exception:  # code of others: whatever goes wrong in it, its form is not known
        return None
    if not (first and same and math.isclose(first_doubled / first, 2.0, rel_tol=0.01)):
        return None  # the rate does not act as one, or there is no history
    for ratio, form in _FORMS.items():
        if math.isclose(doubled / same, ratio, rel_tol=0.01):
            return form
    return None


_FORMS: dict[float, Form] = {1.0: "uncorrected", 2.0: "as it should be", 4.0: "corrected twice"}


def _momentum(group: dict[str, Any]) -> float:
    value = group.get("momentum", 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def _moves(optimizer: Optimizer, number: int, lr: float, next_lr: float) -> tuple[float, float]:
    """How far a weight of that group moves by a gradient of 1 at `lr`, then by history alone at `next_lr`."""
    stand_in, weights = _stand_in(optimizer)
    # torch wraps step with the hooks that were registered for all optimizers, which are not to see this one.
    kind = type(stand_in)
    step = getattr(kind.step, "__wrapped__", kind.step)
    moved = list[float]()
    with torch.enable_grad(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        for rate, gradient in ((lr, 1.0), (next_lr, 0.0)):
            before = weights[number].detach().clone()
            for group, weight in zip(stand_in.param_groups, weights, strict=True):
                group["lr"] = rate
                weight.grad = torch.full_like(weight, gradient)
            step(stand_in)
            moved.append(float((before - weights[number].detach()).sum()))
    return moved[0], moved[1]


def _stand_in(optimizer: Optimizer) -> tuple[Optimizer, list[Tensor]]:
    """An optimizer of the same class and settings without history or hooks, with one weight a group."""
    weights = [torch.full((2, 2), 0.5, dtype=torch.float64, requires_grad=True) for _ in optimizer.param_groups]
    memo: dict[int, Any] = {}
    for group, weight in zip(optimizer.param_groups, weights, strict=True):
        memo.update((id(parameter), weight) for parameter in group["params"])
    memo[id(optimizer)] = stand_in = object.__new__(type(optimizer))
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]  # as timm's Lookahead has
    for each in (optimizer, *inner):
        memo[id(each.state)] = defaultdict[Any, dict[str, Any]](dict)
        memo.update((id(value), OrderedDict()) for name, value in vars(each).items() if "hook" in name)
    # Under the scheduler's mark, step is the original's own.
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(stand_in).update(copy.deepcopy(own, memo))
    for group, weight in zip(stand_in.param_groups, weights, strict=True):
        group["params"][:] = [weight]
        group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
        group.update({key: False for key in ("fused", "foreach", "capturable") if key in group})
    return stand_in, weights
