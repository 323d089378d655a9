"""Which backward runs now, and are several of them one microbatch?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch.autograd.variable import Variable

from largebatch.errors import ConfigError

backward_id: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore[reportPrivateUsage]
"""The graph task that runs now: one per backward, never used twice; -1 outside any.

The number is what `torch.autograd.graph` itself tells backwards apart by; it has no public name.
"""


def is_nested() -> bool:
    """Whether the backward that runs now was called from the backward of a `torch.autograd.Function`."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename.endswith("autograd/function.py"):
            return True
        frame = frame.f_back
    return False


def at_end(callback: Callable[[], None]) -> None:
    """Call at the end of the backward that runs now, after what was queued before."""
    Variable._execution_engine.queue_callback(callback)  # pyright: ignore


def weakly(method: Any, *args: Any) -> Callable[..., None]:
    """A bound method with its first arguments, for a hook that does not keep the method's object alive.

    The garbage collector does not see through hooks after accumulation: one that held a collector, which holds the
    parameters, would keep all of them for ever.
    """
    reference, function = ref(method.__self__), method.__func__

    def hook(*rest: Any) -> None:
        owner = reference()
        if owner is not None:
            function(owner, *args, *rest)

    return hook


def weakly_at(method: Any, index: int) -> Callable[[Any], None]:
    """The same for a hook on the hot path, which has one argument."""
    reference, function = ref(method.__self__), method.__func__

    def hook(grad: Any) -> None:
        owner = reference()
        if owner is not None:
            function(owner, index, grad)

    return hook


def check_units(units: Any, *, inside: bool) -> None:
    """Raise ConfigError unless a microbatch of `units` units can begin here, `inside` another one or not."""
    if isinstance(units, bool) or not isinstance(units, int) or units < 1:
        raise ConfigError(f"a microbatch has a whole number of units, at least 1; got units={units!r}.")
    if inside:
        raise ConfigError("a microbatch context is already open: one microbatch cannot hold another.")


def check_parts(nested: Iterable[bool], implicit: Sequence[set[int]]) -> None:
    """Raise ConfigError if backwards look like parts of fewer microbatches.

    Args:
        nested: of each microbatch, whether its backward ran inside another one.
        implicit: parameters that each backward outside a context reached.
    """
    if any(nested):
        raise ConfigError(
            "a backward ran inside another one, as reentrant activation checkpointing does, so one microbatch "
            "comes in parts. Use checkpoint(..., use_reentrant=False), or wrap each microbatch in `with "
            "monitor.microbatch(units=n):`."
        )
    if len(implicit) > 1 and not set.intersection(*implicit):
        raise ConfigError(
            f"{len(implicit)} backwards reached no parameter in common, so they are parts of fewer microbatches "
            "(several losses?). Wrap each microbatch in `with monitor.microbatch(units=n):`."
        )
