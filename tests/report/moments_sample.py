"""A made-up moments log whose noise scale grows from 100 to 400 examples, with three groups of parameters."""

from pathlib import Path

import numpy as np

from largebatch.noise.ledger import MeasuredStep
from largebatch.noise.moments import StepMoments, add_moments
from largebatch.records.moments_log import MomentsLog

SHARES = {"embedding": 0.5, "blocks": 0.4, "rest": 0.1}


def write_log(path: Path, num_steps: int = 640, *, seed: int = 0, noise: float = 0.3, **header: object) -> Path:
    """tr(Sigma) is 4, |G|^2 falls from 0.04 to 0.01; both are seen with errors of `noise` of themselves."""
    rng = np.random.default_rng(seed)
    settings = {"unit": "examples", "world_size": 2, "optimizer": "sgd"} | header
    with MomentsLog(path, **settings) as log:  # type: ignore[arg-type]
        for number in range(num_steps):
            grad = 0.04 * 4 ** -(number / num_steps)
            errors = 1 + noise * rng.normal(size=(len(SHARES), 2))
            groups = {
                name: StepMoments(
                    trace_cov=4 * share * errors[row, 0], grad_sq_norm=grad * share * errors[row, 1], batch=64,
                    num_microbatches=8, sq_norm_small=1.0, sq_norm_step=0.5, units_small=8.0, units_step=64.0,
                )
                for row, (name, share) in enumerate(SHARES.items())
            }  # fmt: skip
            total = add_moments(list(groups.values()))
            log(MeasuredStep(step=1 + 5 * number, moments=total, groups=groups, preconditioned=total))
    return path
