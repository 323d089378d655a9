"""How is a function of somebody else's wrapped for a while, and put back whatever happens?

Only what has no hook of its own is wrapped: gradient scalers, schedulers, samplers' iterators, and autograd's entrance.
A warning that such a function gives names the line that called it, as it does unwrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

Function = Callable[..., Any]


@contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[[Function], Function]) -> Generator[None]:
    """Have `owner.name` be `wrap(what it was)` while the context is open; `owner` is a class or a module.

    Who replaced it too in the meantime, and has not put it back, keeps what he set.
    """
    original: Function = vars(owner)[name]
    ours = functools.wraps(original)(_passed_over(wrap(original)))
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if vars(owner).get(name) is ours:
            setattr(owner, name, original)


@contextmanager
def wrapped_in_family(parent: type, name: str, wrap: Callable[[Function], Function]) -> Generator[None]:
    """Do so in a class and in all its subclasses that have a `name` of their own."""
    with ExitStack() as stack:
        for kind in _family(parent):
            if name in vars(kind):
                stack.enter_context(wrapped(kind, name, wrap))
        yield


def _passed_over(function: Function) -> Function:
    """A function whose frame a warning's stacklevel does not count.

    `warnings.warn` passes over frames of Python's own import machinery, which it knows by these words in their file's
    name; to catch the warnings and give them again would reset which of them were given before.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__
    function.__code__ = code.replace(co_filename=f"{code.co_filename} (passed over as importlib._bootstrap is)")
    return function


def _family(parent: type) -> list[type]:
    """A class and all its subclasses, each once."""
    found = {parent: None}
    for child in parent.__subclasses__():
        found |= dict.fromkeys(_family(child))
    return list(found)
