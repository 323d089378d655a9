"""The digits task with Nesterov momentum 0.9 and a baseline of 16 at 0.05: the first recipe that was tried."""

from dataclasses import replace

import largebatch as lb
from largebatch.tasks.digits import load

task = replace(
    load(),
    name="digits-momentum",
    recipe=lb.Recipe(reference_batch=16, reference_lr=0.05, epochs=10, warmup_epochs=5.0, decay_epochs=(6, 8)),
)
