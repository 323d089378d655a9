"""What does a step cost with and without a monitor? One process (or one of two workers) of monitor_overhead.py.

It runs in the peers' environment, on the same build of torch, so that all are timed in one process, step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from _harness import ROOT, paired_ratio
from _models import WORKS, Work

sys.path.insert(0, str(ROOT / "src"))

from largebatch.noise.cadence import MARGIN
from largebatch.noise.monitor import NoiseScaleMonitor

ACCUMULATION = 4
Step = Callable[[], object]


class Loop:
    """A training loop of one model, wrapped in DDP where there are two workers."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.work: Work = WORKS[name]()
        self.model = DistributedDataParallel(self.work.model) if dist.is_initialized() else self.work.model
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.on_last: Callable[[], object] = lambda: None
        """Before the last backward."""
        self.on_first: Callable[[], object] = lambda: None
        """Before the first backward."""
        self.on_end: Callable[[], object] = lambda: None
        """Before the optimizer's step."""

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.on_first()
        for k in range(ACCUMULATION):
            last = k == ACCUMULATION - 1
            if last:
                self.on_last()
            wait = dist.is_initialized() and not last
            with self.model.no_sync() if wait else contextlib.nullcontext():
                (self.work.loss(self.model) / ACCUMULATION).backward()
        self.on_end()
        self.optimizer.step()


def ours(name: str, every: Any) -> tuple[Step, NoiseScaleMonitor]:
    """largebatch; the overhead of 0.99 makes "auto" measure every step while it times itself."""
    loop = Loop(name)
    monitor = NoiseScaleMonitor(loop.model, microbatch=32, every=every, overhead=0.99)
    loop.on_end = monitor.step
    return loop, monitor


def unmeasured(name: str) -> Step:
    """largebatch between two measured steps."""
    loop, _ = ours(name, 10**9)
    loop()
    return loop


def fairscale(name: str) -> Step:
    from fairscale.optim import AdaScale

    loop = Loop(name)
    loop.optimizer = AdaScale(loop.optimizer, num_gradients_to_accumulate=ACCUMULATION)
    loop.on_end = loop.optimizer.gain
    return loop


def adaptdl(name: str) -> Step:
    """Its estimator, told which backward is the step's last in the way of its own wrapper."""
    import adaptdl.torch.gradient_noise_scale as module

    class Adp:
        require_backward_grad_sync = False

    loop = Loop(name)
    adp = Adp()
    replicas = dist.get_world_size() if dist.is_initialized() else 1
    gns = module.GradientNoiseScale(adp, loop.optimizer, num_replicas=replicas, accum_scale=replicas)

    def begin() -> None:
        gns.reset_accumulation()  # as its wrapper's zero_grad does
        adp.require_backward_grad_sync = False

    loop.on_first = begin
    loop.on_last = lambda: setattr(adp, "require_backward_grad_sync", True)
    return loop


def gns_pytorch(name: str) -> Step:
    """Once a step, with its default shares of parameters and examples."""
    from gns_pytorch import compute_gns

    loop = Loop(name)
    work = loop.work
    loop.on_first = lambda: compute_gns(work.losses(work.model(work.inputs), work.targets), work.model)
    return loop


def gradient_noise_scale_of_k_diffusion() -> Any:
    """Its module gns.py alone: importing the package would need some fifteen others."""
    path = next(str(file.locate()) for file in importlib.metadata.files("k-diffusion") or () if file.name == "gns.py")
    spec = importlib.util.spec_from_file_location("k_diffusion_gns", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def k_diffusion(name: str) -> Step:
    """Its DDP hook; read once a step, since it raises under no_sync()."""
    module = gradient_noise_scale_of_k_diffusion()
    loop = Loop(name)
    hook, scale = module.DDPGradientStatsHook(loop.model), module.GradientNoiseScale()
    loop.on_end = lambda: scale.update(*hook.get_stats(), 32, 64)
    return loop


PEERS = {"fairscale": fairscale, "adaptdl": adaptdl, "gns-pytorch": gns_pytorch, "k-diffusion": k_diffusion}


def compare(name: str, pairs: int, *, warmup: int = 3, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Ratios of step time on one work: measured steps, unmeasured ones, peers; and the cadence of "auto"."""
    plain = Loop(name)
    monitored, monitor = ours(name, "auto")
    found: dict[str, Any] = {
        "every step": paired_ratio(monitored, plain, pairs=pairs, warmup=warmup),
        "unmeasured": paired_ratio(unmeasured(name), plain, pairs=pairs, warmup=1),
    }
    for _ in range(12):  # in a row: between turns with another loop its time would count as this one's
        monitored()
    found["cadence"] = math.ceil(monitor._cadence.share() * MARGIN / 0.01) if monitor._cadence else None
    for peer, make in PEERS.items():
        if (peer == "k-diffusion") != dist.is_initialized() and peer in ("k-diffusion", "gns-pytorch"):
            continue
        if peer in skip:
            continue
        label = f"{peer} {importlib.metadata.version(peer)}"
        few = max(1, pairs // 8) if peer == "gns-pytorch" else pairs
        found[label] = paired_ratio(make(name), plain, pairs=few, warmup=0 if peer == "gns-pytorch" else 1)
    return found


def memory(name: str, on: bool, steps: int) -> dict[str, Any]:
    """Peak resident memory of this process after a few steps."""
    step = ours(name, 1)[0] if on else Loop(name)
    for _ in range(steps):
        step()
    return {"peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--pairs", type=int, nargs="+", required=True)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meet", default="")
    parser.add_argument("--memory", choices=["on", "off"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if options.meet:
        os.environ |= {"RANK": str(options.rank), "LOCAL_RANK": str(options.rank), "WORLD_SIZE": "2"}
        dist.init_process_group("gloo", init_method=f"file://{options.meet}", rank=options.rank, world_size=2)
    if options.memory:
        result = memory(options.names[0], options.memory == "on", options.pairs[0])
    else:
        result = {
            name: compare(name, pairs, warmup=options.warmup)
            for name, pairs in zip(options.names, options.pairs, strict=True)
        }
    if options.rank == 0:
        print(json.dumps(result), flush=True)
    if options.meet:
        dist.barrier()
        os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
