"""How does what a monitor measures become curves in TensorBoard?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from largebatch.errors import MissingExtraError
from largebatch.integrations.metrics import as_metrics
from largebatch.noise.estimate import NoiseScale
from largebatch.noise.ledger import MeasuredStep


class TensorBoardSink:
    """Writes each measured step as scalars: `on_measured=[TensorBoardSink("runs/noise")]`.

    The scalars are those of `as_metrics`: raw moments, and the running noise scale with its interval (a gap while it
    is unresolved). In a folder of its own a training that goes on from a checkpoint hides what was written from its
    first step on.
    """

    def __init__(self, where: Any, *, noise_scale: Callable[[], NoiseScale] | None = None) -> None:
        """Write nothing yet.

        Args:
            where: a folder, or a SummaryWriter that stays yours to close.
            noise_scale: gives the monitor's running estimate, as `lambda: monitor.noise_scale`.

        Raises:
            MissingExtraError: tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tensorboard", "TensorBoardSink") from error
        self._folder = where if isinstance(where, str | Path) else None
        self._writer: Any = None if self._folder is not None else where
        self._open = SummaryWriter
        self._noise_scale = noise_scale

    def __call__(self, measured: MeasuredStep) -> None:
        """Write one step."""
        if self._writer is None:
            self._writer = self._open(str(self._folder), purge_step=measured.step)
        estimate = None if self._noise_scale is None else self._noise_scale()
        for name, value in as_metrics(measured, estimate).items():
            self._writer.add_scalar(name, value, global_step=measured.step)

    def close(self) -> None:
        """Flush; close the writer if it was made here."""
        if self._folder is not None and self._writer is not None:
            self._writer.close()
            self._writer = None
        elif self._writer is not None:
            self._writer.flush()

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
