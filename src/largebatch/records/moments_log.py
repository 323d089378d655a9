"""How do the moments of a training reach the disk, step by step, and come back?

One JSON object a line. The first says what is counted and how; each other one holds a measured step's raw moments.
Nothing that is derived from them is written: a noise scale, its interval and a report are made again from the file.
"""

from __future__ import annotations

import json
import logging
import math
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from largebatch.errors import ConfigError, RecordError
from largebatch.records.files import JsonLines, read_lines, storage_error
from largebatch.units import check_unit

logger = logging.getLogger(__name__)

MOMENTS_LOG_VERSION = 1
_LONGEST = 65_536
"""Bytes of a first line at most."""
LARGEST = 1e150
"""Of a moment in a log: the square of what is larger leaves float64."""
_BEGINNING = b'{"kind":"moments"'
_SIZES = ("batch", "num_microbatches", "units_small", "units_step")
_NORMS = ("trace_cov", "grad_sq_norm", "sq_norm_small", "sq_norm_step")


class Moments(Protocol):
    """A step's moments: `largebatch.StepMoments`."""

    @property
    def trace_cov(self) -> float: ...  # noqa: D102
    @property
    def grad_sq_norm(self) -> float: ...  # noqa: D102


class Measured(Protocol):
    """A measured step: what a NoiseScaleMonitor hands to `on_measured`."""

    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def moments(self) -> Moments: ...  # noqa: D102
    @property
    def groups(self) -> Mapping[str, Moments]: ...  # noqa: D102
    @property
    def preconditioned(self) -> Moments | None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsHeader:
    """The first line of a moments log: what its numbers count."""

    kind: str = "moments"
    """Says that this is a moments log."""
    schema_version: int = MOMENTS_LOG_VERSION
    """Version of this layout."""
    unit: str
    """What every batch and noise scale counts."""
    world_size: int | None = None
    """Workers; null where it was not said."""
    optimizer: str | None = None
    """Either sgd or adam (or its kin); null where it was not said."""
    loss_scaling: str | None = None
    """The monitor's loss_scaling; null where it was not said."""
    dataset_size: int | None = None
    """Examples drawn from without replacement, as the monitor was told; null for none."""


class MomentsLog:
    """Appends the raw moments of each measured step to a file of JSON lines; give it to a monitor's `on_measured`.

    The file is opened at the first step. A training that goes on from a checkpoint may name the same file: what was
    logged from its first step on is dropped (and said by a warning), so no step is there twice. One that starts over
    keeps no old step: the old file is moved aside, to moments.1.jsonl. A kill costs at most the line being written.

    >>> import tempfile
    >>> from largebatch.noise import MeasuredStep, solve_moments
    >>> path = Path(tempfile.mkdtemp()) / "moments.jsonl"
    >>> with MomentsLog(path, unit="examples", world_size=1, optimizer="sgd") as log:
    ...     log(MeasuredStep(step=1, moments=solve_moments([1.0, 9.0], [4, 4], 4.0), groups={}))
    >>> read_moments(path).trace_cov.tolist()
    [8.0]
    """

    def __init__(
        self,
        path: Path | str,
        *,
        unit: str,
        world_size: int | None = None,
        optimizer: str | None = None,
        loss_scaling: str | None = None,
        dataset_size: int | None = None,
    ) -> None:
        """Touch no file yet.

        Args:
            path: the file, by custom `moments.jsonl`; folders on the way are made.
            unit: what a batch counts, as the monitor was told.
            world_size: workers, for the report's advice; None is unknown.
            optimizer: "sgd" or "adam" (and its kin), for the report's advice; None is unknown.
            loss_scaling, dataset_size: as the monitor was told, for the record.

        Raises:
            ConfigError: a value that is none of these.
        """
        for name, value in (("world_size", world_size), ("dataset_size", dataset_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is a whole number of at least 1; got {value!r}.")
        if optimizer not in (None, "sgd", "adam"):
            raise ConfigError(f"optimizer {optimizer!r} is not known. Use 'sgd' or 'adam', or leave it out.")
        self.path = Path(path)
        self.header = MomentsHeader(
            unit=check_unit(unit), world_size=world_size, optimizer=optimizer, loss_scaling=loss_scaling,
            dataset_size=dataset_size,
        )  # fmt: skip
        self._lines: JsonLines | None = None

    def __call__(self, measured: Measured) -> None:
        """Append one step. Raises StorageError, and RecordError if the file is another unit's or no such log."""
        if self._lines is None:
            self._lines = self._open(measured.step)
        moments = measured.moments
        groups = {} if list(measured.groups) == ["rest"] else measured.groups
        line: dict[str, Any] = {"step": measured.step} | {name: getattr(moments, name) for name in (*_NORMS, *_SIZES)}
        line["groups"] = {name: _norms(part) for name, part in groups.items()}
        line["preconditioned"] = None if measured.preconditioned is None else _norms(measured.preconditioned)
        self._lines.append(line)

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def __enter__(self) -> MomentsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, first_step: int) -> JsonLines:
        """The file, holding its header and the steps before `first_step`."""
        keep, dropped = 0, 0
        if _is_begun(self.path):
            header = _header(next(_lines(self.path)), self.path)
            if header.unit != self.header.unit:
                raise RecordError(
                    f"{self.path} counts {header.unit}, this training {self.header.unit}. Log to another file."
                )
            lines = read_lines(self.path)
            with self.path.open("rb") as file:
                num_ended = sum(line.endswith(b"\n") for line in file)
            if num_ended > len(lines):  # a last line without an end is what a kill leaves; this is not
                after = num_ended - len(lines) - 1
                raise RecordError(
                    f"{self.path}: line {len(lines) + 1} is not JSON, and {after} line(s) follow it. "
                    "Mend it, or log to another file."
                )
            steps = [line.get("step", math.inf) for line in lines[1:]]
            dropped = sum(step >= first_step for step in steps)
            keep = 1 + len(steps) - dropped if steps else 0
            if steps and dropped == len(steps):  # another training, of which nothing is gone on with
                _move_aside(self.path)
                keep = dropped = 0
        if dropped:
            logger.warning(
                "%s: training goes on at step %d, so %d later line(s) are dropped.", self.path, first_step, dropped
            )
        log = JsonLines(self.path, keep=keep)
        if keep == 0:
            log.append(asdict(self.header))
        return log


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsColumns:
    """tr(Sigma) and |G|^2 of one group of parameters, step by step."""

    trace_cov: array[float]
    """Per step; NaN where the group was not measured."""
    grad_sq_norm: array[float]
    """The same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsTable:
    """A whole log: one entry a measured step."""

    header: MomentsHeader
    step: array[int]
    """Numbers of the steps, growing."""
    batch: array[int]
    """Units in each."""
    num_microbatches: array[int]
    """Microbatches in each, over all workers."""
    trace_cov: array[float]
    """tr(Sigma), per unit."""
    grad_sq_norm: array[float]
    """|G|^2."""
    groups: Mapping[str, MomentsColumns]
    """The same of each group of parameters."""
    preconditioned: MomentsColumns | None
    """The same in the optimizer's metric; None where no step has it."""


def read_moments(path: Path) -> MomentsTable:
    """Read a moments log, also while it is being written; a torn last line is left out.

    Raises:
        RecordError: it is missing, is no moments log, holds no step, or a line is broken (the line is named).
    """
    lines = _lines(path)
    header = _header(next(lines, None), path)
    numbers = {name: array("q") for name in ("step", "batch", "num_microbatches")}
    total, groups, preconditioned = _columns(0), dict[str, MomentsColumns](), _columns(0)
    for row, line in enumerate(lines):
        try:
            for name, column in numbers.items():
                column.append(line[name])
            _append(total, line)
            for name, part in line["groups"].items():
                if name not in groups:
                    groups[name] = _columns(row)
                _append(groups[name], part)
            _append(preconditioned, line["preconditioned"] or {"trace_cov": math.nan, "grad_sq_norm": math.nan})
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise RecordError(f"{path}, line {row + 2}: this is no measured step ({error!r}).") from error
        if min(column[row] for column in numbers.values()) < 1 or line["batch"] < line["num_microbatches"]:
            counts = ", ".join(f"{name}={column[row]}" for name, column in numbers.items())
            raise RecordError(f"{path}, line {row + 2}: this is no measured step, its counts cannot be: {counts}.")
        if not all(abs(values[row]) <= LARGEST for values in (total.trace_cov, total.grad_sq_norm)):
            raise RecordError(
                f"{path}, line {row + 2}: moments of {line['trace_cov']} and {line['grad_sq_norm']} "
                "are none that a training measures."
            )
        if row and numbers["step"][row] <= numbers["step"][row - 1]:
            raise RecordError(f"{path}, line {row + 2}: step {line['step']} comes after {numbers['step'][row - 1]}.")
        for column in groups.values():
            if len(column.trace_cov) <= row:
                _append(column, {"trace_cov": math.nan, "grad_sq_norm": math.nan})
    if not numbers["step"]:
        raise RecordError(f"{path} holds no measured step yet.")
    return MomentsTable(
        header=header, step=numbers["step"], batch=numbers["batch"], num_microbatches=numbers["num_microbatches"],
        trace_cov=total.trace_cov, grad_sq_norm=total.grad_sq_norm, groups=groups,
        preconditioned=None if all(map(math.isnan, preconditioned.trace_cov)) else preconditioned,
    )  # fmt: skip


def is_moments_log(path: Path) -> bool:
    """Whether a file's first line says that it is one, whatever the file is called."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline(_LONGEST))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and header.get("kind") == "moments"


def _move_aside(path: Path) -> None:
    """Rename to the next free number, and say so."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        path.rename(aside)
    except OSError as error:
        raise storage_error(aside, error) from error
    logger.warning("%s: training starts over, so the old log is moved to %s.", path, aside.name)


def _norms(moments: Moments) -> dict[str, float]:
    """Its own numbers; the sizes are the step's."""
    return {name: getattr(moments, name) for name in _NORMS}


def _columns(length: int) -> MomentsColumns:
    empty = array("d", [math.nan] * length)
    return MomentsColumns(trace_cov=empty, grad_sq_norm=array("d", empty))


def _append(columns: MomentsColumns, line: Mapping[str, float]) -> None:
    columns.trace_cov.append(line["trace_cov"])
    columns.grad_sq_norm.append(line["grad_sq_norm"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every line; only the last may be torn."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise RecordError(
                        f"{path}, line {number} is not JSON ({error}): cut the file before it."
                    ) from error
                if not isinstance(record, dict):
                    raise RecordError(f"{path}, line {number} holds a {type(record).__name__}: cut the file before it.")
                yield record
    except FileNotFoundError as error:
        raise RecordError(f"{path} does not exist.") from error
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}).") from error


def _is_begun(path: Path) -> bool:
    """Whether there is a file with a whole first line. Raises RecordError if what is there is not of our making."""
    try:
        with path.open("rb") as file:
            first = file.readline()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}).") from error
    if not first.startswith(_BEGINNING[: len(first)]):
        raise RecordError(f"{path} is no moments log, and is left as it is. Log to another file.")
    return first.endswith(b"\n")


def _header(line: Mapping[str, Any] | None, path: Path) -> MomentsHeader:
    if line is None or line.get("kind") != "moments":
        raise RecordError(f"{path} is no moments log: its first line does not say so. MomentsLog writes one.")
    if line.get("schema_version") != MOMENTS_LOG_VERSION:
        raise RecordError(
            f"{path} has schema version {line.get('schema_version')!r}; this largebatch reads {MOMENTS_LOG_VERSION}."
        )
    try:
        header = MomentsHeader(**line)
        check_unit(header.unit)
    except (TypeError, ConfigError) as error:
        raise RecordError(f"{path} has a header that cannot be read: {error}") from error
    return header
