"""Experiment: B_simple, B_noise and the line search's B_noise side by side along one Fashion-MNIST training.

Fetch the data first: scripts/fetch_data.sh fashion-mnist. The network of the study, at its tuned rate, batch 64 and
Nesterov momentum 0.9; at each checkpoint both moments on the same examples (without replacement from the 60,000), and a
line search whose gradients come from the training data and whose loss is that of 4,000 held-out pictures.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from _result import record_result

from largebatch.noise.curvature.line_search import fit_line_search, measure_line_search
from largebatch.noise.curvature.products import b_noise, measure_curvature
from largebatch.noise.curvature.temperature import temperature
from largebatch.recipe.loss import normalise
from largebatch.recipe.optimizer import build_sgd
from largebatch.recipe.sampler import ShuffledStream
from largebatch.tasks import fashion_mnist

SEED, BATCH, LR = 0, 64, 0.0336
CHECKPOINTS = (20, 100, 400)
MICROBATCH = 256
BLOCKS = {"gradient_microbatches": 3, "hessian_microbatches": 1}  # blocks of 1,792 examples each
NUM_BLOCKS = 32
SEARCH_FACTORS = (0.25, 1, 4, 16)
"""Batches of the line search, as multiples of B_noise rounded to a power of 2."""
NUM_DRAWS = 24
NUM_EVALUATED = 4_000
LENGTHS = 2.0 ** np.arange(-5, 2)
"""Step lengths of the line search, as multiples of eps_max."""


def main() -> None:
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    task = fashion_mnist.load()
    num_examples = len(task.train)
    model = task.model()
    recipe = task.recipe
    optimizer = build_sgd(
        model, lr=LR, momentum=recipe.momentum, nesterov=recipe.nesterov, weight_decay=recipe.weight_decay
    )
    stream = ShuffledStream(num_examples, SEED)
    held_out = [task.held_out.fetch(part) for part in torch.arange(NUM_EVALUATED).split(2000)]
    rng = np.random.default_rng(SEED)

    def fetch(indices: np.ndarray) -> list[Any]:
        return [task.train.fetch(part) for part in torch.from_numpy(indices).split(2048)]

    rows = []
    for step in range(max(CHECKPOINTS)):
        if step in CHECKPOINTS:
            rows.append(measure(task, model, step, num_examples, fetch, held_out, rng))
        batch = task.train.fetch(torch.from_numpy(stream.indices(step * BATCH, BATCH)))
        optimizer.zero_grad(set_to_none=True)
        normalise(task.loss(model, batch), BATCH).backward()
        optimizer.step()
    rows.append(measure(task, model, max(CHECKPOINTS), num_examples, fetch, held_out, rng))
    settings = {"batch": BATCH, "lr": LR, "momentum": recipe.momentum, "microbatch": MICROBATCH, **BLOCKS,
                "num_blocks": NUM_BLOCKS, "num_draws": NUM_DRAWS,
                "num_evaluated": NUM_EVALUATED}  # fmt: skip
    result = {
        "schema_version": 1,
        "seed": SEED,
        "task": task.name,
        "unit": task.unit,
        "settings": settings,
        "rows": rows,
    }
    record_result("noise_scales_fashion_mnist", result, started=started)


def measure(task, model, step, num_examples, fetch, held_out, rng) -> dict[str, Any]:
    """All three at the weights of one step."""

    def blocks_of_examples():
        size = MICROBATCH * (2 * BLOCKS["gradient_microbatches"] + BLOCKS["hessian_microbatches"])
        for _ in range(NUM_BLOCKS):
            drawn = torch.from_numpy(rng.choice(num_examples, size, replace=False))
            yield from (task.train.fetch(part) for part in drawn.split(MICROBATCH))

    clock = time.perf_counter()
    blocks = measure_curvature(model, task.loss, blocks_of_examples(), dataset_size=num_examples, **BLOCKS)
    scale = b_noise(blocks, unit=task.unit)
    seconds = time.perf_counter() - clock
    told = temperature(blocks, lr=LR, batch=BATCH, momentum=task.recipe.momentum, unit=task.unit)
    length = scale.lr_max or LR / (1 - task.recipe.momentum)
    centre = 2 ** round(np.log2(scale.b_noise or BATCH))
    search_batches = [max(1, int(centre * factor)) for factor in SEARCH_FACTORS]
    clock = time.perf_counter()
    decreases = measure_line_search(
        model, task.loss, lambda units: fetch(rng.choice(num_examples, units, replace=False)), held_out,
        batches=search_batches, lrs=(length * LENGTHS).tolist(), num_draws=NUM_DRAWS,
    )  # fmt: skip
    search = fit_line_search(
        decreases, batches=search_batches, lrs=(length * LENGTHS).tolist(), unit=task.unit, dataset_size=num_examples
    )
    search_seconds = time.perf_counter() - clock
    with torch.no_grad():
        loss = sum(float(task.loss(model, batch)) for batch in held_out) / NUM_EVALUATED
    print(f"step {step}, held-out loss {loss:.3f}; {seconds:.0f} s and {search_seconds:.0f} s", scale.b_simple, scale,
          f"{search} (form: p = {search.form_p_value})", told, sep="\n  ")  # fmt: skip
    print(f"  eps_max {scale.lr_max} {scale.lr_max_interval}, line search {search.lr_max}")
    print(f"  dL_max {scale.loss_decrease_max}, line search {search.loss_decrease_max}", flush=True)
    for point in search.points:
        print("   ", point, flush=True)
    return {
        "step": step, "held_out_loss": loss, "b_simple": asdict(scale.b_simple), "curvature": asdict(scale),
        "line_search": asdict(search), "temperature": {**asdict(told), "sentence": str(told)},
    }  # fmt: skip


if __name__ == "__main__":
    main()
