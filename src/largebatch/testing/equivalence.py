"""Does a step do the same on one worker and on several, and if not, where and why does it part?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from largebatch.errors import ConfigError
from largebatch.testing.arguments import check_arguments, deals_for_itself
from largebatch.testing.compare import default_tolerance, fit_ratio, flat, spread, update_gaps
from largebatch.testing.diagnose import find_causes
from largebatch.testing.evidence import Evidence, Parts, weights_before
from largebatch.testing.observe import Job, Run, RunRecord, observe, read
from largebatch.testing.processes import StartMethod, WorkerFailedError, pick_start_method, run_workers
from largebatch.testing.quiet import SUSPECTS, Suspect
from largebatch.testing.report import Cause, Comparison, EquivalenceReport


def check_parallel_equivalence(
    make: Callable[[int, int], Any],
    batch: Any,
    world_sizes: Sequence[int] = (1, 2, 4),
    *,
    microbatch: int | None = None,
    uneven: bool = False,
    steps: int = 3,
    tolerance: float | None = None,
    timeout: float = 120.0,
    seed: int = 0,
    start_method: StartMethod | None = None,
) -> EquivalenceReport:
    """Run your own step on one worker and on several over the same examples, and say where the updates part, and why.

    The workers are processes of this machine that form one gloo job. All start from the same weights (those that `make`
    gives on one worker, sharded where the model is) and the same random numbers. Compared are the updates, parameter
    by parameter and step by step, since weights hide an update that is wrong. Where they part, small variations of
    the same step are run to find the cause: without clipping, with batch norm on running statistics, without draws, and
    on each worker's share by itself.

    Args:
        make: `make(rank, world_size)`, called in each worker, whose process group is already there, returns
            `(model, optimizer, step)` or an object with these attributes: the model as it is trained (plain, in
            DistributedDataParallel, under fully_shard), its torch optimizer, and `step(examples)`, which does forward,
            backward, clipping, `optimizer.step()` and all else that one step of your training does with this worker's
            examples. What `step` returns is taken as its loss.
        batch: a step's global batch: a tensor or array with a row an example, a dict or tuple of such columns, or a
            list of examples. Or a function: `batch(step)` gives the global batch of a step; `batch(step, rank,
            world_size)` gives a worker's share as your own sampler deals it, under random numbers of that worker's own.
        world_sizes: numbers of workers, >= 1. One worker is always run: it is what the others are compared with.
        microbatch: examples in a microbatch; `step` then gets a list of microbatches. One worker then accumulates
            over all of them, which holds n of batch norm fixed; without batch norm, one microbatch of the whole batch
            is compared too.
        uneven: also deal unequal shares (5+3 of 8).
        steps: number of steps, >= 1; momentum shows from the second, most schedules from the third.
        tolerance: relative difference of an update that counts as none, in (0, 1); by default the square root of the
            spacing of the coarsest parameter (3.5e-4 in float32). Give one for autocast.
        timeout: seconds that one layout may take.
        seed: of Python's, numpy's and torch's global generators, from 0 to 2^63 - 1.
        start_method: "fork" or "spawn" (`make` must then be picklable); by default fork where it is safe.

    Returns:
        The comparisons, and the causes with evidence and remedy.

    Raises:
        ConfigError: an argument cannot be used, or `make` or `batch` gives something that cannot.
        WorkerFailedError: a worker raised, died or hung; it says which, in which step. No process is left.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> def make(rank, world_size):
    ...     model = DistributedDataParallel(torch.nn.Linear(3, 1))
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ...     def step(examples):
    ...         optimizer.zero_grad()
    ...         loss = model(examples).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         return loss
    ...     return model, optimizer, step
    >>> report = check_parallel_equivalence(make, torch.randn(8, 3), (1, 2), start_method="fork")
    >>> report.equal
    True

    Source: Goyal 2017, sec. 2.3 and remarks 1 to 4.
    """
    sizes = check_arguments(make, batch, world_sizes, microbatch, uneven, steps, tolerance, timeout, seed)
    method = pick_start_method(start_method, make, batch)
    with tempfile.TemporaryDirectory(prefix="largebatch-") as folder:
        job = Job(
            make=make,
            batch=batch,
            one_by_one=deals_for_itself(batch),
            microbatched=microbatch is not None,
            seed=seed,
            folder=folder,
        )
        return _Check(job, timeout, method, steps, microbatch, tolerance).run(sizes, uneven)


@dataclass(frozen=True, slots=True)
class _Layout:
    world_size: int
    run: Run
    several: list[RunRecord]

    @property
    def shares(self) -> tuple[int, ...]:
        return tuple(worker.steps[0].num_examples for worker in self.several)

    @property
    def words(self) -> str:
        dealt = "+".join(str(share) for share in self.shares)
        if self.world_size == 1:
            return f"1 worker and one microbatch of {dealt}"
        in_parts = f", microbatches of {self.run.microbatch}" if self.run.microbatch else ""
        return f"{self.world_size} workers ({dealt}{in_parts})"

    @property
    def parts(self) -> Parts:
        found: list[tuple[tuple[int, int], ...]] = []
        start = 0
        for share in self.shares:
            size = self.run.microbatch or share
            found.append(
                tuple((begin, min(begin + size, start + share)) for begin in range(start, start + share, size))
            )
            start += share
        return tuple(found)


class _Check:
    """One check: its runs, and what they are compared with."""

    def __init__(
        self,
        job: Job,
        timeout: float,
        method: StartMethod,
        steps: int,
        microbatch: int | None,
        tolerance: float | None,
    ) -> None:
        self.job = job
        self.timeout = timeout
        self.method: StartMethod = method
        self.plain = Run(name="even", steps=steps, microbatch=microbatch, shares="own" if job.one_by_one else "even")
        self.one = _Layout(1, self.plain, self._do(1, [self.plain])[0])
        self.reference = self.one.several[0]
        self.tolerance = tolerance or default_tolerance(self.reference.steps[0].updates)
        self.notes: list[str] = []

    def _do(self, world_size: int, runs: Sequence[Run]) -> list[list[RunRecord]]:
        run_workers(world_size, observe, (self.job, tuple(runs)), timeout=self.timeout, start_method=self.method)
        found = [read(self.job, run, world_size) for run in runs]
        assert all(found), "a run that ended without an error wrote its records"
        return [records for records in found if records]

    def run(self, world_sizes: Sequence[int], uneven: bool) -> EquivalenceReport:
        runs: list[tuple[int, Run]] = []
        if self.plain.microbatch and not self.reference.has_batch_norm and len(self.one.parts[0]) > 1:
            runs.append((1, replace(self.plain, name="whole", microbatch=None)))
        total = self.one.shares[0]
        for world_size in world_sizes:
            if world_size > 1:
                if not uneven or total % world_size == 0:
                    runs.append((world_size, self.plain))
                if uneven:
                    runs.append((world_size, replace(self.plain, name="uneven", shares="uneven")))
        layouts = [_Layout(size, run, self._do(size, [run])[0]) for size, run in runs]
        comparisons = [self._compare(layout, step) for layout in layouts for step in range(self.plain.steps)]
        causes: dict[tuple[str, tuple[str, ...]], Cause] = {}
        diagnosed: set[str] = set()
        for layout in layouts:
            parted = [one for one in comparisons if one.layout == layout.words and self._parts(one)]
            if parted and layout.run.name not in diagnosed:
                diagnosed.add(layout.run.name)
                for found in find_causes(self._look_closer(layout, parted[0])):
                    causes.setdefault((found.name, found.codes), found)
            if not parted:
                self._hidden(layout)
        self._start(layouts)
        known = [found for found in causes.values() if found.name != "unknown"]
        return EquivalenceReport(
            tolerance=self.tolerance,
            comparisons=tuple(comparisons),
            causes=tuple(known or causes.values()),
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _parts(self, one: Comparison) -> bool:
        return max(one.update_gap, one.worker_gap) > self.tolerance

    def _compare(self, layout: _Layout, step: int) -> Comparison:
        one, others = self.reference.steps[step], [worker.steps[step] for worker in layout.several]
        weights = weights_before(self.reference, step)
        gradients = others[0].gradients
        gaps = update_gaps(others[0].updates, one.updates, gradients, one.gradients, weights)
        worst = max(gaps, key=lambda gap: gap.size)
        between = [
            gap.size
            for other in others[1:]
            for gap in update_gaps(other.updates, others[0].updates, gradients, gradients, weights)
        ]
        return Comparison(
            layout=layout.words,
            world_size=layout.world_size,
            shares=layout.shares,
            step=step,
            update_gap=worst.size,
            parameter=worst.parameter,
            parameters_that_differ=tuple(gap.parameter for gap in gaps if gap.size > self.tolerance),
            worker_gap=max(between, default=0.0),
            gradient_norm=float(flat(gradients).norm()),
            reference_gradient_norm=float(flat(one.gradients).norm()),
            losses=tuple(other.loss for other in others),
            reference_loss=one.loss,
            buffer_gap=spread(others[0].buffers, one.buffers),
        )

    def _look_closer(self, layout: _Layout, parted: Comparison) -> Evidence:
        base = replace(self.plain, steps=parted.step + 1)
        kinds: list[Suspect] = [
            suspect for suspect in SUSPECTS if suspect != "batch norm" or self.reference.has_batch_norm
        ]
        off = {"quiet": frozenset(kinds)} | {kind: frozenset(kinds) - {kind} for kind in kinds}
        again = {"same draws": replace(base, name="again"), "other draws": replace(base, name="redraw", draw=1)}
        on_one = {name: replace(base, name=f"one {name}", off=frozenset(out)) for name, out in off.items()}
        several = {
            name: replace(layout.run, name=f"{layout.run.name} {name}", steps=base.steps, off=frozenset(out))
            for name, out in off.items()
        }
        alone: dict[tuple[str, tuple[int, int]], Run] = {}
        if parted.step == 0 and not self.job.one_by_one:
            for part in sorted({part for worker in (*layout.parts, *self.one.parts) for part in worker}):
                for name in ("quiet", "batch norm"):
                    if name in on_one:
                        run = replace(on_one[name], name=f"{name} {part[0]}-{part[1]}", part=part, microbatch=None)
                        alone[name, part] = run
        self._try(1, [*again.values(), *on_one.values(), *alone.values()])
        self._try(layout.world_size, list(several.values()))
        found_again = {name: self._read_one(run) for name, run in again.items()}
        variants: dict[str, tuple[RunRecord, list[RunRecord]]] = {}
        for name in off:
            one, others = self._read_one(on_one[name]), read(self.job, several[name], layout.world_size)
            if one is not None and others is not None:
                variants[name] = (one, others)
        gradients = {key: self._read_one(run) for key, run in alone.items()}
        return Evidence(
            layout=layout.words,
            step=parted.step,
            tolerance=self.tolerance,
            worker_gap=parted.worker_gap,
            several=layout.several,
            one=self.reference,
            again={name: record for name, record in found_again.items() if record is not None},
            variants=variants,
            parts=layout.parts,
            parts_on_one=self.one.parts,
            alone={key: flat(record.steps[0].gradients) for key, record in gradients.items() if record is not None},
        )

    def _try(self, world_size: int, runs: Sequence[Run]) -> None:
        """Do runs that only a diagnosis needs: what fails there is noted, and what was finished is used."""
        try:
            run_workers(world_size, observe, (self.job, tuple(runs)), timeout=self.timeout, start_method=self.method)
        except (WorkerFailedError, ConfigError) as error:
            self.notes.append(f"a variation of the step that was to find the cause failed: {error}")

    def _read_one(self, run: Run) -> RunRecord | None:
        records = read(self.job, run, 1)
        return records[0] if records else None

    def _hidden(self, layout: _Layout) -> None:
        """What differs without parting the updates."""
        one, others = self.reference.steps[0], [worker.steps[0] for worker in layout.several]
        ratio, rest = fit_ratio(flat(others[0].gradients), flat(one.gradients))
        if math.isfinite(ratio) and (abs(ratio - 1) > 3 * self.tolerance or rest > 3 * self.tolerance):
            self.notes.append(
                f"with {layout.words}, gradients are {ratio:.6g} times those on one worker ({rest:.2g} left over), and "
                "the updates do not show it: the optimizer divides by the gradient's size. Clipping and a coupled "
                "weight decay would."
            )
        gap = max(spread(worker.steps[0].buffers, one.buffers) for worker in layout.several[:1])
        if gap > self.tolerance:
            self.notes.append(
                f"with {layout.words}, the first worker's buffers (running statistics) differ by {gap:.2g} after step "
                "0: recompute or average them before an evaluation (Goyal 2017, sec. 5.2)."
            )
        losses = [other.loss for other in others]
        if one.loss is not None and not _adds_up(one.loss, losses, layout.shares, self.tolerance):
            self.notes.append(
                f"with {layout.words}, step 0 returned the losses {losses}, and {one.loss:g} on one worker: neither "
                "their mean, nor their mean by share, nor their sum. What is logged depends on the number of workers."
            )

    def _start(self, layouts: Sequence[_Layout]) -> None:
        for layout in layouts:
            if len({worker.made for worker in layout.several}) > 1:
                self.notes.append(
                    f"with {layout.words}, make leaves the workers with different weights. This check gave all the "
                    "same; a real training must (the same seed, or weights sent from the first worker)."
                )
                return


def _adds_up(expected: float, losses: Sequence[float | None], shares: Sequence[int], tolerance: float) -> bool:
    values = [loss for loss in losses if loss is not None]
    if len(values) < len(losses):
        return True  # not every worker returns one
    total = sum(values)
    weighed = sum(value * share for value, share in zip(values, shares, strict=True)) / sum(shares)
    candidates = [total, total / len(values), weighed]
    return any(abs(value - expected) <= 3 * tolerance * max(abs(expected), abs(value)) for value in candidates)
