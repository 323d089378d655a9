"""Is this document a study's result, and what are its typed parts?"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from largebatch.errors import RecordError
from largebatch.records.files import plain, read_json
from largebatch.records.schema import SCHEMA_VERSION, StudyResult


def read_result(path: Path) -> dict[str, Any]:
    """Read result.json and check it against the schema.

    Args:
        path: The file that a study wrote.
    Returns:
        The parsed document.
    Raises:
        RecordError: The file is missing, is not JSON, or is not a result of this schema.
    """
    document = read_json(path)
    typed_result(document, source=str(path))
    return document


def typed_result(document: Mapping[str, Any], source: str = "result.json") -> StudyResult:
    """Turn the parsed result.json into its dataclasses; a number that was not finite (null on disk) becomes nan.

    Args:
        document: The parsed result.json.
        source: How an error names it.
    Returns:
        The result, checked key by key.
    Raises:
        RecordError: A key is missing or unknown, a value has the wrong type, or the schema is another one.
    """
    version = document.get("schema_version") if isinstance(document, Mapping) else None
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"{source} has schema version {version!r}; this largebatch reads version {SCHEMA_VERSION}. "
            "Run the study again with this version, or install the version that wrote it."
        )
    try:
        result = _decode(StudyResult, plain(document), "")
    except ValueError as error:
        raise RecordError(f"{source} is not a study's result: {error}. Delete it to have it made again.") from error
    if not result.fronts or not result.goals:
        raise RecordError(f"{source} holds no goal and no front, so there is nothing to draw. Run the study again.")
    return result


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Build `kind` from JSON. Raises ValueError that says where it did not fit."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(arguments, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} should be a list and is {value!r}")
        if arguments[-1] is Ellipsis:
            return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
        if len(value) != len(arguments):
            raise ValueError(f"{where} should have {len(arguments)} entries and has {len(value)}")
        return tuple(_decode(part, item, where) for part, item in zip(arguments, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} should be an object and is {value!r}")
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return _decode_plain(kind, value, where)


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where or 'the document'} should be an object and is {value!r}")
    hints = typing.get_type_hints(kind)
    prefix = f"{where}." if where else ""
    missing, unknown = sorted(hints.keys() - value.keys()), sorted(value.keys() - hints.keys())
    if missing:
        raise ValueError(f"it lacks {prefix}{missing[0]}")
    if unknown:
        raise ValueError(f"it has the unknown key {prefix}{unknown[0]}")
    return kind(**{name: _decode(hint, value[name], f"{prefix}{name}") for name, hint in hints.items()})


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is not type(None) and (kind is not float or value is not None):
            try:
                return _decode(kind, value, where)
            except ValueError:
                continue
    return _decode_plain(kinds[0], value, where)


def _decode_plain(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    if kind is float:
        if value is None:
            return math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{where} should be a {kind.__name__} and is {value!r}")
