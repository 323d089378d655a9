"""To which group does each parameter belong?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from largebatch.errors import ConfigError

Groups = Mapping[str, str | Sequence[str]] | Literal["modules"] | None
"""Group -> pattern or patterns of parameter names (as in the shell: *, ?, [...]), the first that fits wins; "modules"
makes one group of each direct child of the model."""
REST = "rest"
"""The group of what no pattern fits."""


class Partition:
    """Divides parameters, by name, into groups whose moments add up to the total.

    >>> partition = Partition({"norms": "*norm*"}, ["norm1.weight", "fc.weight", "fc.bias"])
    >>> partition.names, partition.row_of("norm1.weight"), partition.row_of("fc.bias")
    (('norms', 'rest'), 0, 1)
    """

    def __init__(self, groups: Groups, parameters: Sequence[str]) -> None:
        """Divide `parameters`; raises ConfigError if a pattern fits none of them."""
        if groups is not None and groups != "modules" and not isinstance(groups, Mapping):
            raise ConfigError(f"groups is 'modules' or maps a group's name to patterns; got {groups!r}.")
        self._patterns: dict[str, tuple[str, ...]] = {}
        if groups == "modules":
            children = dict.fromkeys(name.split(".")[0] for name in parameters)
            self._patterns = {child: (child, f"{child}.*") for child in children}
        elif groups:
            self._patterns = {name: _patterns_of(name, given) for name, given in groups.items()}
        names = list(self._patterns)
        for name, patterns in self._patterns.items():
            if not any(fnmatchcase(parameter, pattern) for parameter in parameters for pattern in patterns):
                raise ConfigError(
                    f"group {name!r} ({', '.join(patterns)}) fits no trained parameter, such as {parameters[0]!r}."
                )
        # Parameters may join later, so there is always a place for what fits nowhere.
        self.names: tuple[str, ...] = (*(name for name in names if name != REST), REST)
        """The groups in the order of their rows; the last is `REST`."""
        self.is_whole = bool(names) and not any(self.row_of(name) == len(self.names) - 1 for name in parameters)
        """Whether the patterns fit all parameters, so that `REST` is empty."""

    def row_of(self, parameter: str) -> int:
        """The row of a parameter's group."""
        for row, name in enumerate(self.names):
            if any(fnmatchcase(parameter, pattern) for pattern in self._patterns.get(name, ())):
                return row
        return len(self.names) - 1


def _patterns_of(name: Any, given: Any) -> tuple[str, ...]:
    patterns = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(text, str) for text in (name, *patterns)):
        raise ConfigError(f"groups maps a name to a pattern or patterns, all text; got {name!r} -> {given!r}.")
    return patterns
