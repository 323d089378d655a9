"""How does what a monitor measures reach a tracker of experiments (W&B, MLflow, any function of metrics and step)?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from largebatch.noise.estimate import NoiseScale
from largebatch.noise.ledger import MeasuredStep


class LogMetrics(Protocol):
    """What takes metrics and a step: `wandb.log`, `mlflow.log_metrics`, `accelerator.log`."""

    def __call__(self, metrics: dict[str, float], /, *, step: int) -> object: ...  # noqa: D102


def as_metrics(measured: MeasuredStep, noise_scale: NoiseScale | None = None) -> dict[str, float]:
    """One step's raw moments by name and, where it is given, the running noise scale with its interval.

    A step's own ratio is never among them: averaged by a tracker it would be wrong at any length. The names of the
    noise scale carry its unit; while it is unresolved, only the ends of its interval that are known are there.

    Args:
        measured: what `on_measured` hands over.
        noise_scale: the monitor's estimate by then.

    Returns:
        Name -> number, all of them finite.

    >>> from largebatch.noise import solve_moments
    >>> measured = MeasuredStep(step=1, moments=solve_moments([1.0, 9.0], [4, 4], 4.0), groups={})
    >>> as_metrics(measured)["noise/trace_cov"]
    8.0
    """
    moments = measured.moments
    metrics = {
        "noise/trace_cov": moments.trace_cov,
        "noise/grad_sq_norm": moments.grad_sq_norm,
        "noise/sq_norm_small": moments.sq_norm_small,
        "noise/sq_norm_step": moments.sq_norm_step,
        "noise/batch": float(moments.batch),
    }
    for name, part in {} if list(measured.groups) == ["rest"] else measured.groups.items():
        metrics |= {f"noise/trace_cov/{name}": part.trace_cov, f"noise/grad_sq_norm/{name}": part.grad_sq_norm}
    if measured.preconditioned is not None:
        metrics["noise/preconditioned_trace_cov"] = measured.preconditioned.trace_cov
        metrics["noise/preconditioned_grad_sq_norm"] = measured.preconditioned.grad_sq_norm
    if noise_scale is not None:
        low, high = noise_scale.interval
        ends = {"": noise_scale.b_simple if noise_scale.resolved else None, "_low": low, "_high": high}
        name = f"noise/b_simple_{noise_scale.unit}"
        metrics |= {name + end: value for end, value in ends.items() if value is not None}
    return metrics


def metrics_sink(
    log: LogMetrics, *, noise_scale: Callable[[], NoiseScale] | None = None
) -> Callable[[MeasuredStep], None]:
    """Hand each measured step to a tracker: `on_measured=[metrics_sink(wandb.log)]`.

    Args:
        log: called as `log(metrics, step=step)` with the number of the optimizer step.
        noise_scale: gives the monitor's running estimate, as `lambda: monitor.noise_scale`.
    """

    def sink(measured: MeasuredStep) -> None:
        log(as_metrics(measured, None if noise_scale is None else noise_scale()), step=measured.step)

    return sink
