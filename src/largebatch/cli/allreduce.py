"""`largebatch allreduce`: which all-reduce is the fastest on this cluster, for which size?"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from largebatch.cli.output import console, print_table, write_stdout
from largebatch.errors import ConfigError, StorageError
from largebatch.parallel.calibrate import calibrate as calibrated
from largebatch.parallel.choose import Choices, predict_seconds
from largebatch.parallel.topology import Topology
from largebatch.testing.processes import StartMethod, pick_start_method, run_workers
from largebatch.train.workers import Workers, is_already_said, joined, reporting_loss

HELP = """Measure the all-reduces on the cluster that this runs on, and print which is the fastest for each size.

Goyal 2017 (section 4): halving/doubling needs 2 log2 p messages where a ring needs 2 (p - 1), so it is faster for short
buffers; two levels help where ranks share a host. Which one is faster on your network is measured, with the backend's
own beside them, by every worker at once and in a few seconds. Predicted is what the cost model makes of single messages
alone: far from what was measured, something else than the wire (cores that are shared) is the limit.

Start it by torchrun on the hosts you train on; --workers starts processes on this machine instead. The file of --out
is read by largebatch.parallel.choose.Choices.from_record, and its choices drive pipelined_allreduce(algorithm=...).

Example: torchrun --nproc-per-node=2 -m largebatch allreduce --calibrate --out allreduce.json

Example: largebatch allreduce --calibrate --workers 4
"""


_MOST_SECONDS = 3600.0


def allreduce_command(
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure; there is nothing else to do yet.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=2, max=64, help="Start so many processes here. [default: torchrun's workers]")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="To spend on it, about.")] = 4.0,
    out: Annotated[Path | None, typer.Option(help="Write the table there, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON on standard output.")] = False,
) -> None:
    """Calibrate, and let worker 0 print the table."""
    if not calibrate:
        raise ConfigError("say what to do: largebatch allreduce --calibrate measures this cluster's all-reduces.")
    if seconds > _MOST_SECONDS:
        raise ConfigError(f"--seconds is {_MOST_SECONDS:g} at most, an hour; got {seconds:g}.")
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if workers is not None:
        if given:
            raise ConfigError("--workers starts processes of its own, and torchrun has started some. Leave it out.")
        _check_place(out)
        run_workers(workers, _on_worker, (seconds, out, as_json), timeout=60 + 10 * seconds, start_method=_method())
        return
    if not given:
        raise ConfigError(
            "one process alone has nothing to all-reduce. Start it by torchrun on your hosts (torchrun "
            "--nproc-per-node=2 -m largebatch allreduce --calibrate), or add --workers 4 to try it on this machine."
        )
    try:
        with joined("cpu") as job:
            _together(job, seconds, out, as_json)
    except (ConfigError, StorageError) as error:
        if is_already_said(error):
            raise typer.Exit(2) from None
        raise


def _together(job: Workers, seconds: float, out: Path | None, as_json: bool) -> None:
    if job.world_size < 2:
        raise ConfigError("one worker alone has nothing to all-reduce. Start two or more by torchrun.")
    job.agree(lambda: _check_place(out))
    with reporting_loss():
        choices = calibrated(job.group, seconds=seconds)
    job.agree(lambda: _say(choices, out, as_json))


def _on_worker(
    rank: int, world_size: int, say: Callable[[str], None], seconds: float, out: Path | None, as_json: bool
) -> None:
    say("calibration")
    choices = calibrated(topology=Topology((0,) * world_size), seconds=seconds)
    if rank == 0:
        _say(choices, out, as_json)


def _say(choices: Choices, out: Path | None, as_json: bool) -> None:
    text = json.dumps(choices.as_record())
    if out is not None:
        with _writing(out):
            out.write_text(text + "\n")
    if as_json:
        write_stdout(text)
    else:
        _print(choices)
        if out is not None:
            write_stdout(str(out))


def _print(choices: Choices) -> None:
    topology = Topology(choices.hosts)
    names = list(choices.timings[0].seconds)
    rows: list[list[str]] = []
    for row in choices.timings:
        cells: list[str] = []
        for name in names:
            predicted = predict_seconds(name, row.num_bytes, topology, choices.links)
            cells.append(f"{1e3 * row.seconds[name]:.3g} ({1e3 * predicted:.3g})")
        rows.append([size_of(row.num_bytes), *cells, choices(row.num_bytes)])
    hosts = f"{topology.num_hosts} host{'s' if topology.num_hosts > 1 else ''}"
    print_table(
        f"all-reduce over {topology.world_size} ranks on {hosts}: ms measured (predicted)",
        ("size", *names, "fastest"),
        rows,
    )
    spans = [f"from {size_of(start)}: {name}" if start else f"{name}" for start, name in choices.steps]
    console.print(f"choice: {'; '.join(spans)}", soft_wrap=True)
    wires = (("inside a host", choices.links.inside),) if topology.num_hosts == 1 else (
        ("inside a host", choices.links.inside), ("between hosts", choices.links.between)
    )  # fmt: skip
    for where, link in wires:
        rate = f"{8e-9 / link.seconds_per_byte:.3g} Gbit/s" if link.seconds_per_byte else "no limit seen"
        console.print(f"{where}: {1e6 * link.latency:.3g} us a message, {rate}, measured by pairs", soft_wrap=True)


def size_of(num_bytes: int) -> str:
    """A number of bytes as people say it.

    >>> size_of(1536), size_of(1 << 20)
    ('1.5 KB', '1 MB')
    """
    for bits, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if num_bytes >= 1 << bits:
            return f"{num_bytes / (1 << bits):.3g} {unit}"
    return f"{num_bytes} B"


def _check_place(out: Path | None) -> None:
    """Before anything is measured: can the file be written?"""
    if out is not None:
        with _writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            new = not out.exists()
            out.open("a").close()
            if new:  # who stops before the table is there finds no empty one
                out.unlink()


@contextlib.contextmanager
def _writing(out: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"the table could not be written to {out} ({error.strerror}). Give another --out.") from None


def _method() -> StartMethod:
    if not dist.is_gloo_available():
        raise ConfigError("this PyTorch has no gloo, which --workers needs.")
    torch.set_num_threads(1)  # before a fork: a child of a process that ran two threads hangs
    return pick_start_method(None)
