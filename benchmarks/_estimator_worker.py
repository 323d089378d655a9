"""What does each estimator say of one problem with a known noise scale? One process of estimator_error.py.

It runs in the peers' environment. All estimators watch the same backwards of one model; two that would see each
other's probes have a copy of it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from _harness import ROOT
from _overhead_worker import gradient_noise_scale_of_k_diffusion

sys.path.insert(0, str(ROOT / "src"))

from largebatch.noise.monitor import NoiseScaleMonitor

MICROBATCH, ACCUMULATION = 4, 4
BATCH = MICROBATCH * ACCUMULATION


class Adp:
    """What adaptdl's estimator asks of its wrapper."""

    require_backward_grad_sync = False


def losses(model: nn.Linear, inputs: Tensor, targets: Tensor) -> Tensor:
    """(w.x - y)^2 / 2 of each example."""
    return (model(inputs).squeeze(1) - targets).square() / 2


def run(delta: Tensor, sigma: float, lengths: list[int], seed: int) -> list[dict[str, Any]]:
    """What each estimator says after so many steps at fixed weights; NaN where it says nothing that is a number."""
    import adaptdl.torch.gradient_noise_scale as adaptdl
    from fairscale.optim import AdaScale
    from gns_pytorch import compute_gns

    torch.manual_seed(seed)
    model, copy = nn.Linear(len(delta), 1, bias=False), nn.Linear(len(delta), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(delta)
        copy.weight.copy_(delta)
    scaled = AdaScale(torch.optim.SGD(model.parameters(), lr=0.0), num_gradients_to_accumulate=ACCUMULATION)
    adp = Adp()
    pollux = adaptdl.GradientNoiseScale(
        adp, torch.optim.SGD(model.parameters(), lr=0.0), num_replicas=1, accum_scale=1.0
    )
    monitor = NoiseScaleMonitor(model, microbatch=MICROBATCH, every=1)  # after the peers' hooks
    ema = gradient_noise_scale_of_k_diffusion().GradientNoiseScale()
    ratios: list[float] = []
    found: list[dict[str, Any]] = []
    gc.freeze()  # compute_gns collects garbage at every call
    for step in range(1, max(lengths) + 1):
        pollux.reset_accumulation()
        inputs = torch.randn(ACCUMULATION, MICROBATCH, len(delta))
        targets = sigma * torch.randn(ACCUMULATION, MICROBATCH)
        for k in range(ACCUMULATION):
            adp.require_backward_grad_sync = k == ACCUMULATION - 1
            (losses(model, inputs[k], targets[k]).mean() / ACCUMULATION).backward()
        moments = monitor.step()
        assert moments is not None
        ema.update(moments.sq_norm_small, moments.sq_norm_step, MICROBATCH, BATCH)
        if step % 8 == 1:  # it takes longer than all else together
            ratios.append(compute_gns(losses(copy, inputs.flatten(0, 1), targets.flatten()), copy, 1.0, 1.0))
        if step in lengths:
            scale = monitor.noise_scale
            low, high = scale.interval
            found.append(
                {
                    "largebatch": scale.b_simple if scale.b_simple is not None else math.nan,
                    version("fairscale"): ratio(MICROBATCH * scaled._grad_var_avg(), scaled._grad_sqr_avg()),
                    version("adaptdl"): ratio(MICROBATCH * pollux.var_avg(), pollux.sqr_avg()),
                    version("k-diffusion"): ema.get_gns(),
                    version("gns-pytorch"): sum(ratios) / len(ratios),
                    "interval": [low, high],
                    "resolved": scale.resolved,
                }
            )
    return found


def version(name: str) -> str:
    """Name and release."""
    return f"{name} {importlib.metadata.version(name)}"


def ratio(trace: float, signal: float) -> float:
    """NaN where the signal is 0."""
    return trace / signal if signal > 0 else math.nan


def main() -> None:
    """Print one JSON line: by seed, by length, what each estimator says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=float, required=True)
    parser.add_argument("--sigma", type=float, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs=2, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    delta = torch.full((8,), options.size / math.sqrt(8))
    print(json.dumps([run(delta, options.sigma, options.lengths, seed) for seed in range(*options.seeds)]))


if __name__ == "__main__":
    main()
