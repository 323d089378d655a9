"""A study's sweep, simulated: learning-rate search, stopped runs, fresh seeds, on a planted front.

Independent of src: the search's rules are passed in as functions. Steps to the goal at batch B and learning
rate x lr_best(B) are S(B)/(2x - x^2) times log-normal run noise, because progress per step is proportional to
2x - x^2 (McCandlish 2018, (2.4)-(2.6)), and S(B) = S_min (1 + B_crit/B) (2.11). From x = 2 on runs diverge.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sweep:
    min_steps: float
    b_crit: float
    cells: tuple  # (batch, lr, steps, bounds, search)
    num_search_runs: int
    excess: tuple  # per cell: true log steps at the chosen rate above the optimum


def true_steps(min_steps, b_crit, batch):
    return min_steps * (1 + b_crit / batch)


def simulate_sweep(
    seed,
    next_lrs,
    best_lr,
    stop_bound,
    outcome,
    *,
    std=0.1,
    num_batches=8,
    num_seeds=3,
    span=11.0,
    start_wrong_by=2.0,
    censor=True,
    flatness=1.0,
):
    """One sweep of `num_batches` batches from B_crit/span to B_crit*span; the same seed gives the same sweep.

    With `censor`, one sweep in two has a step limit at its largest or smallest batch that falls near the true
    steps, so that about half of that cell's runs are stopped there; every fresh seed is stopped at 3 times the
    search's best. `flatness` scales how sharply steps depend on the learning rate (1 is the quadratic model).
    """
    rng = np.random.default_rng(seed)
    b_crit = float(np.exp(rng.uniform(np.log(200), np.log(2000))))
    min_steps = float(np.exp(rng.uniform(np.log(50), np.log(500))))
    lr_max = float(np.exp(rng.uniform(np.log(0.01), np.log(1.0))))
    batches = b_crit * np.geomspace(1 / span, span, num_batches)
    censored_cell = int(rng.choice([0, num_batches - 1])) if censor and rng.random() < 0.5 else -1
    cells, runs_used, excesses = [], 0, []
    for index, batch in enumerate(batches):
        batch = max(1, round(batch))
        optimum = true_steps(min_steps, b_crit, batch)
        lr_best = lr_max / (1 + b_crit / batch)  # (2.6)
        limit = optimum * math.exp(0.05) if index == censored_cell else math.inf

        def above_best(lr, lr_best=lr_best):
            x = lr / lr_best
            progress = 2 * x - x * x
            return None if progress <= 0.02 else -flatness * math.log(progress)

        def run(lr, bound, optimum=optimum, above_best=above_best):
            excess = above_best(lr)
            if excess is None:
                return outcome(None, math.inf)
            steps = optimum * math.exp(excess + std * rng.standard_normal())
            return outcome(steps, steps) if steps <= bound else outcome(None, bound)

        start = lr_best * start_wrong_by ** rng.uniform(-1, 1)
        tried = {}
        while lrs := next_lrs(tried, start):
            bound = min(limit, stop_bound([o.steps for o in tried.values()]))
            tried.update({lr: run(lr, bound) for lr in lrs})
        runs_used += len(tried)
        chosen = best_lr(tried)
        search = tuple((lr, o.steps, 1.0 if math.isinf(o.bound) else o.bound) for lr, o in sorted(tried.items()))
        steps, bounds = [], []
        if chosen is not None:
            seed_bound = min(limit, 3 * min(o.steps for o in tried.values() if o.steps is not None))
            for _ in range(num_seeds):
                result = run(chosen, seed_bound)
                if result.steps is not None:
                    steps.append(result.steps)
                else:
                    bounds.append(seed_bound if math.isinf(result.bound) else result.bound)
            excesses.append(above_best(chosen))
        cells.append((batch, chosen, tuple(steps), tuple(bounds), search))
    return Sweep(min_steps, b_crit, tuple(cells), runs_used, tuple(excesses))
