"""`largebatch simulate`: would the network feed so many GPUs?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from largebatch.cli.output import console, print_table, write_stdout
from largebatch.errors import ConfigError, StorageError
from largebatch.parallel.cost import LinkCost
from largebatch.parallel.known_models import KNOWN_MODELS, known_profile
from largebatch.parallel.simulate import (
    GOYAL_2017,
    NVLINK,
    PCIE,
    Change,
    Cluster,
    Point,
    Workload,
    best_point,
    reach,
    trace_events,
)
from largebatch.parallel.simulate import quantities as read
from largebatch.parallel.simulate.cluster import BETWEEN_HOSTS
from largebatch.parallel.simulate.goyal import BACKWARD_SECONDS
from largebatch.parallel.simulate.point import BUCKET_BYTES, MEBIBYTE

HELP = f"""Say how long a step takes on a cluster that nobody has rented: nothing is run, nothing is trained.

Each layer's gradients travel as soon as the backward has made them: inside a host, between hosts, inside again. You get
the time of a step, what of the communication it does not hide, the efficiency beside the smallest number of GPUs, and
the best algorithm and bucket size at each. The last worker of a step is waited for; how uneven workers are (--jitter)
is the one constant that was fitted, to 90 % at 256 GPUs of Goyal 2017. It has not been compared with NCCL.

Models: {", ".join(KNOWN_MODELS)}. Another one: largebatch.parallel.profile, in Python.

Example: largebatch simulate --model resnet50 --gpus 8,64,256,1024 --network 50gbit --backward 120ms

Example: largebatch simulate --model resnet50 --gpus 8,256 --network 10gbit --backward 60ms --goal 0.97
"""


_MOST_TIMES = 1e6


def simulate_command(
    backward: Annotated[str, typer.Option(help="One GPU's backward of --per-gpu units, such as 120ms.")],
    model: Annotated[str, typer.Option(help="One of the models that are built in.")] = "resnet50",
    gpus: Annotated[str, typer.Option(help="How many, one or several; efficiency is beside the fewest.")] = "8,64,256",
    per_gpu: Annotated[int, typer.Option(min=1, help="Units of each GPU in a step.")] = 32,
    network: Annotated[str, typer.Option(help="Bandwidth of a host's link to the others.")] = "50gbit",
    latency: Annotated[str, typer.Option(help="Of one message between hosts.")] = "20us",
    intra: Annotated[str, typer.Option(help="Inside a host: nvlink, pcie or a bandwidth.")] = "nvlink",
    gpus_per_host: Annotated[int, typer.Option(min=1, help="GPUs of a full host.")] = 8,
    other: Annotated[
        str | None, typer.Option(help="Forward, loader and optimizer. [default: 71% of the backward, as in Goyal 2017]")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="All-reduces in flight.")] = 2,
    algorithm: Annotated[
        str | None, typer.Option(help="Between hosts: halving_doubling, ring or tree. [default: the best]")
    ] = None,
    bucket: Annotated[str | None, typer.Option(help="Bucket size, such as 25MB. [default: the best]")] = None,
    jitter: Annotated[
        str, typer.Option(help="Standard deviation of a worker's time, as a part of it; 0 for none.")
    ] = f"{GOYAL_2017.jitter:.3g}",
    straggler: Annotated[str, typer.Option(help="What one worker is late by in every step.")] = "0s",
    slow_link: Annotated[float, typer.Option(help="How many times slower one host's link is.")] = 1.0,
    goal: Annotated[
        float | None, typer.Option(help="An efficiency such as 0.97: what would it take at the most GPUs?")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the steps as a trace for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON on standard output.")] = False,
) -> None:
    """Simulate a step at each number of GPUs, print it, and look for what would reach a goal."""
    counts = read.counts(gpus, "--gpus")
    backward_seconds = read.seconds(backward, "--backward")
    ratio = GOYAL_2017.other_seconds / BACKWARD_SECONDS
    workload = Workload(
        profile=known_profile(model).scaled(backward_seconds), per_gpu=read.count(per_gpu, "--per-gpu"),
        other_seconds=ratio * backward_seconds if other is None else read.seconds(other, "--other"),
    )  # fmt: skip
    cluster = Cluster(
        network=LinkCost(read.seconds(latency, "--latency"), 1 / read.bytes_per_second(network, "--network")),
        intra=_intra(intra), gpus_per_host=gpus_per_host, jitter=read.share(jitter, "--jitter"),
        straggler_seconds=read.seconds(straggler, "--straggler"), slow_link=slow_link,
    )  # fmt: skip
    if algorithm is not None and algorithm not in BETWEEN_HOSTS:
        raise ConfigError(f"--algorithm is one of {', '.join(BETWEEN_HOSTS)}; got {algorithm!r}.")
    read.count(concurrency, "--concurrency")
    if slow_link > _MOST_TIMES:
        raise ConfigError(f"--slow-link is {_MOST_TIMES:g} times at most; got {slow_link:g}.")
    sizes = BUCKET_BYTES if bucket is None else (read.num_bytes(bucket, "--bucket"),)
    rows: list[tuple[Point, dict[str, Point]]] = []
    for count in counts:
        each = {
            name: best_point(workload, count, cluster, algorithms=(name,), bucket_bytes=sizes, concurrency=concurrency)
            for name in BETWEEN_HOSTS
        }
        taken = BETWEEN_HOSTS if algorithm is None else (algorithm,)
        best = best_point(workload, count, cluster, algorithms=taken, bucket_bytes=sizes, concurrency=concurrency)
        rows.append((best, each))
    points = [best for best, _ in rows]
    changes = None
    if goal is not None:
        changes = reach(goal, workload, counts[-1], counts[0], cluster, concurrency)
    if trace is not None:
        _write(trace, json.dumps(trace_events(workload, cluster, points)))
    if as_json:
        document: dict[str, Any] = {"model": model, "points": [_row(points[0], best, each) for best, each in rows]}
        if changes is not None:
            document["goal"] = {"efficiency": goal, "gpus": counts[-1], "changes": [_change(one) for one in changes]}
        write_stdout(json.dumps(document, indent=1))
        return
    _print_points(model, workload, rows)
    if changes is not None:
        _print_changes(goal or 0.0, counts, changes)
    if trace is not None:
        write_stdout(str(trace))


def _intra(text: str) -> LinkCost:
    named = {"nvlink": NVLINK, "pcie": PCIE}
    if text.lower() in named:
        return named[text.lower()]
    if not any(letter.isdigit() for letter in text):
        raise ConfigError(f"--intra is nvlink, pcie or a bandwidth such as 480gbit; got {text!r}.")
    return LinkCost(NVLINK.latency, 1 / read.bytes_per_second(text, "--intra"))


def _write(path: Path, text: str) -> None:
    into = path.resolve()
    whole = into.is_file() or not into.exists()  # a pipe or a device is written to, never replaced
    written = into.with_name(f".{into.name}.{os.getpid()}.tmp") if whole else into
    try:
        try:
            written.write_text(text)
            if whole:
                written.replace(into)
        except BaseException:
            if whole:
                written.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(f"the trace cannot be written to {path} ({error.strerror}); give another --trace.") from None


def _row(base: Point, point: Point, each: dict[str, Point]) -> dict[str, Any]:
    return {
        "gpus": point.gpus, "hosts": point.hosts, "iteration_ms": _ms(point.iteration_seconds),
        "efficiency": round(base.iteration_seconds / point.iteration_seconds, 5),
        "exposed_ms": _ms(point.exposed_seconds), "waiting_ms": _ms(point.latest_seconds),
        "busy_ms": _ms(point.busy_seconds), "algorithm": point.plan.algorithm if point.hosts > 1 else None,
        "bucket_mb": point.plan.bucket_bytes / MEBIBYTE, "concurrency": point.plan.concurrency,
        "units_per_second": round(point.units_per_second, 3),
        "algorithms_ms": {name: _ms(other.iteration_seconds) for name, other in each.items()},
    }  # fmt: skip


def _change(change: Change) -> dict[str, Any]:
    factor = change.factor if change.factor is None or change.factor < float("inf") else None
    return {
        "name": change.name, "reaches": change.reaches, "factor": factor, "said": _said(change),
        "efficiency": round(change.efficiency, 5),
    }  # fmt: skip


def _print_points(model: str, workload: Workload, rows: list[tuple[Point, dict[str, Point]]]) -> None:
    base = rows[0][0]
    print_table(
        f"{model}, {workload.per_gpu} a GPU",
        ("GPUs", "step ms", "efficiency", "exposed ms", "late ms", "best", "bucket"),
        [
            (
                f"{point.gpus:,}", f"{point.iteration_seconds * 1e3:.1f}",
                f"{base.iteration_seconds / point.iteration_seconds:.1%}", f"{point.exposed_seconds * 1e3:.1f}",
                f"{point.latest_seconds * 1e3:.1f}", point.plan.algorithm if point.hosts > 1 else "one host",
                f"{point.plan.bucket_bytes / MEBIBYTE:g} MB" if point.plan.bucket_bytes else "each layer",
            )
            for point, _ in rows
        ],
    )  # fmt: skip
    print_table(
        "the step in ms with each algorithm",
        ("GPUs", *BETWEEN_HOSTS, "link busy ms", "units/s"),
        [
            (
                f"{point.gpus:,}", *(f"{other.iteration_seconds * 1e3:.1f}" for other in each.values()),
                f"{point.busy_seconds * 1e3:.1f}", f"{point.units_per_second:,.0f}",
            )
            for point, each in rows
        ],
    )  # fmt: skip
    console.print(
        "exposed: communication after the backward. late: how much later than the mean worker the last one is.",
        soft_wrap=True,
    )


def _print_changes(goal: float, counts: list[int], changes: list[Change]) -> None:
    what = f"{goal:.1%} at {counts[-1]:,} GPUs beside {counts[0]:,}"
    if not changes:
        console.print(f"{what} is reached as it is.", soft_wrap=True)
        return
    title = f"{what}: any one of these reaches it, the cheapest first"
    if not changes[0].reaches:
        title = f"{what}: no single change reaches it"
    print_table(
        title, ("change", "to", "efficiency"),
        [(change.name, _said(change), f"{change.efficiency:.1%}") for change in changes],
    )  # fmt: skip


def _said(change: Change) -> str:
    value = change.value
    if value is None or change.factor is None:
        return "no value is enough; this is the best"
    if change.name == "concurrency":
        return f"{value:.0f} in flight"
    if change.name == "batch of a GPU":
        return f"{value:.0f} units, which needs a recipe for the batch"
    if change.name == "latency":
        return f"{value * 1e6:.3g} us"
    if change.name == "bandwidth":
        return f"{value * 8e-9:.3g} gbit, {change.factor:.2f} times as much"
    return f"{value:.2%} of a worker's time"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
