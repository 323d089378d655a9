"""By what is a loss divided, so that uneven parts add up?

By the total: each microbatch of each worker divides the SUM of its units' losses by the units of the whole step, kn.
Gradients are then added (over microbatches by autograd, over workers by a summing all-reduce) and the result is the
gradient of the mean loss, however unevenly the units were dealt. An average of averages is not.

DistributedDataParallel and fully_shard average gradients over workers instead of adding them, which divides by the
number of workers once more: there each part is multiplied by that number. `step_loss` finds out which it is.
"""

from __future__ import annotations

from torch import Tensor

from largebatch.errors import ConfigError


def normalise(loss_sum: Tensor, total_units: float, *, averaged_over: int = 1) -> Tensor:
    """The part that one microbatch contributes to the step's mean loss.

    Args:
        loss_sum: scalar, the sum (not the mean) of the losses of this microbatch's units.
        total_units: units in the whole optimizer step, over all microbatches and workers (Goyal's kn), > 0.
        averaged_over: workers over which gradients are averaged after `backward()`: the world size under
            DistributedDataParallel and fully_shard, 1 where they are added, and in a job of one worker.

    Returns:
        loss_sum * averaged_over / total_units, a scalar to call `backward()` on.

    Raises:
        ConfigError: `loss_sum` is not a scalar, `total_units` is not above 0, or `averaged_over` is below 1.

    >>> import torch
    >>> normalise(torch.tensor(6.0), 4)
    tensor(1.5000)
    >>> normalise(torch.tensor(6.0), 4, averaged_over=2)
    tensor(3.)

    Source: Goyal 2017, remark 3.
    """
    if loss_sum.ndim != 0:
        raise ConfigError(
            f"a microbatch's loss is one number, the sum over its units; got a tensor of shape "
            f"{tuple(loss_sum.shape)}. Use reduction='sum'."
        )
    if not total_units > 0:
        raise ConfigError(
            f"total_units counts the units of the whole optimizer step and is above 0; got {total_units!r}."
        )
    if averaged_over < 1:
        raise ConfigError(
            f"gradients are averaged over at least 1 worker; got averaged_over={averaged_over!r}. "
            "Use the number of workers, or 1 where gradients are added."
        )
    if averaged_over == 1:  # a multiplication more would change bits
        return loss_sum / total_units
    return loss_sum * (averaged_over / total_units)
