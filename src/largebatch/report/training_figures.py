"""Does training at a large batch end where the baseline ends? Curves, and error against batch."""

from __future__ import annotations

import math
from statistics import fmean

from largebatch.records.schema import LargeRun, StudyResult
from largebatch.report.description import Axis, Band, Figure, Note, Symbol, Trace, log_axis
from largebatch.report.verdicts import kept_caption, recommended_run, rule_name
from largebatch.report.words import Part, number

RULE_COLOURS = {"baseline": "ink", "linear": "second", "noise": "accent"}
_BATCH_SYMBOLS: tuple[Symbol, ...] = ("circle", "square", "triangle", "diamond", "pentagon")
_BATCH_DASHES = ("solid", "dash", "dot")


def curves_figure(result: StudyResult) -> Figure:
    """Mean held-out error after each epoch of every full run; the range over seeds where it is the point."""
    batches = sorted({run.batch for run in result.large if run.role != "baseline"})
    traces, bands, values, chosen = [], [], [], recommended_run(result)
    for run in result.large:
        rows = _by_epoch(run)
        if not rows:
            continue
        epochs = tuple(rows)
        place = batches.index(run.batch) if run.batch in batches else 0
        is_baseline = run.role == "baseline"
        colour = RULE_COLOURS.get(run.rule, "third")
        lost = sum(error is None for error in run.errors)
        name = f"batch {run.batch:,}, {rule_name(run)}" + (f" ({lost} of {len(run.errors)} diverged)" if lost else "")
        means = tuple(fmean(errors) for errors in rows.values())
        traces.append(
            Trace(
                name=name,
                x=epochs,
                y=means,
                colour=colour,
                line=True,
                dash="solid" if is_baseline else _BATCH_DASHES[place % 3],
                width=3 if is_baseline or run is chosen else 1.75,
                symbol=None if is_baseline else _BATCH_SYMBOLS[place % 5],
                size=6,
                hover=tuple(
                    f"{name}<br>epoch {number(epoch)}: {number(mean)} % "
                    f"({number(min(errors))} to {number(max(errors))})"
                    for (epoch, errors), mean in zip(rows.items(), means, strict=True)
                ),
            )
        )
        values += means
        if is_baseline or run is chosen:
            low, high = tuple(min(errors) for errors in rows.values()), tuple(max(errors) for errors in rows.values())
            bands.append(Band(x=epochs, low=low, high=high, colour=f"{colour}@0.15", group=name))
            values += [*low, *high]
    last = max((epoch for trace in traces for epoch in trace.x if epoch is not None), default=1.0)
    return Figure(
        name="curves",
        title="Training, small batch against large",
        caption=(
            Part("Line: mean over seeds; shaded: their range, for the baseline and the recommended batch. "),
            Part("Whether a curve that ends above the baseline's is shown to be worse, the verdicts below say."),
        ),
        alt="Line chart of held-out error after each epoch for the baseline and every large-batch run.",
        x=Axis(title="Epoch", log=False, low=0.5, high=last + 0.5),
        y=_error_axis(values),
        traces=tuple(traces),
        bands=tuple(bands),
    )


def error_figure(result: StudyResult) -> Figure:
    """Final error against batch, mean and standard deviation per rule, after Goyal 2017, Figure 1."""
    batches = sorted({run.batch for run in result.large})
    x = log_axis(f"Batch ({result.unit})", batches, pad=1.6, ticks=[float(batch) for batch in batches])
    seeds = [error for run in result.large for error in run.errors if error is not None and math.isfinite(error)]
    tops = [run.mean + run.std for run in result.large if run.mean is not None and run.std is not None]
    y = _error_axis([*seeds, *tops], room=1.25)
    traces, bands, notes = [], [], []
    for rule in dict.fromkeys(run.rule for run in result.large):
        runs = [run for run in result.large if run.rule == rule]
        colour, shift = RULE_COLOURS.get(rule, "third"), {"linear": 0.95, "noise": 1.05}.get(rule, 1.0)
        traces += _rule_traces(runs, colour, shift, rule_name(runs[0]))
    baseline = next((run for run in result.large if run.role == "baseline"), None)
    if baseline is not None and baseline.mean is not None:
        level, spread = (baseline.mean,) * 2, baseline.std or 0.0
        traces.append(
            Trace(name="baseline mean", x=(x.low, x.high), y=level, colour="ink", line=True, dash="dot", width=1.5)
        )
        low, high = (max(level[0] - spread, y.low),) * 2, (level[0] + spread,) * 2
        bands.append(Band(x=(x.low, x.high), low=low, high=high, colour="ink@0.08"))
    diverged = [run for run in result.large if run.verdict == "diverged" or run.mean is None]
    if diverged:
        top = y.high / 1.06 if y.log else y.low + 0.96 * (y.high - y.low)
        traces.append(
            Trace(
                name="diverged",
                x=tuple(run.batch * {"linear": 0.95, "noise": 1.05}.get(run.rule, 1.0) for run in diverged),
                y=(top,) * len(diverged),
                colour="danger",
                symbol="x",
                size=13,
                hover=tuple(
                    f"batch {run.batch:,}, {rule_name(run)}: "
                    f"{sum(error is None for error in run.errors)} of {len(run.errors)} seeds diverged"
                    for run in diverged
                ),
            )
        )
        notes.append(
            Note(x=min(run.batch for run in diverged) * 0.86, y=top, text="diverged", colour="danger", anchor="right")
        )
    return Figure(
        name="error",
        title="Error against batch",
        caption=kept_caption(result),
        alt="Chart of final held-out error against the batch, a series a rule; diverged runs at the top.",
        x=x,
        y=y,
        traces=tuple(traces),
        bands=tuple(bands),
        notes=tuple(notes),
    )


def _rule_traces(runs: list[LargeRun], colour: str, shift: float, name: str) -> list[Trace]:
    whole = [run for run in runs if run.mean is not None]
    seeds = [(run, error) for run in runs for error in run.errors if error is not None]
    traces = [
        Trace(
            name=f"{name}, single seeds",
            x=tuple(run.batch * shift for run, _ in seeds),
            y=tuple(error for _, error in seeds),
            colour=f"{colour}@0.35",
            symbol="circle",
            size=5,
            legend=False,
            group=f"{name} (mean ± std)",
        )
    ]
    if whole:
        traces.append(
            Trace(
                name=f"{name} (mean ± std)",
                x=tuple(run.batch * shift for run in whole),
                y=tuple(run.mean for run in whole),
                colour=colour,
                line=len(whole) > 1,
                symbol="diamond" if whole[0].role == "baseline" else "circle",
                size=10,
                spread=tuple(run.std or 0.0 for run in whole),
                hover=tuple(
                    f"batch {run.batch:,}, {name}, lr {number(run.lr)}<br>"
                    f"{number(run.mean or 0.0)} ± {number(run.std or 0.0, 2)} %"
                    for run in whole
                ),
            )
        )
    return traces


def _by_epoch(run: LargeRun) -> dict[float, list[float]]:
    """Finite held-out errors in per cent by epoch, over the seeds that got there."""
    rows: dict[float, list[float]] = {}
    for curve in run.curves:
        for row in curve:
            error = row.get("error", math.nan)
            if math.isfinite(error):
                rows.setdefault(row["epoch"], []).append(100 * error)
    return dict(sorted(rows.items()))


def _error_axis(values: list[float], room: float = 1.15) -> Axis:
    """Logarithmic when the errors span more than a factor 4 and none is 0."""
    title, top = "Held-out error (%)", max(values, default=1.0) or 1.0
    if min(values, default=0.0) > 0 and top > 4 * min(values):
        axis = log_axis(title, values, pad=1.15)
        return Axis(title=title, log=True, low=axis.low, high=max(values) * room, ticks=axis.ticks)
    return Axis(title=title, log=False, low=max(0.0, min(values, default=0.0) - 0.15 * top), high=top * room)
