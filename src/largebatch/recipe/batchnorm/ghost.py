"""How does one device normalise over n when its local batch is larger?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.recipe.batchnorm.normalise import BatchNorm, check_input, normalise, update_running_statistics


class GhostBatchNorm(BatchNorm):
    """Batch norm for inputs of any dimension that normalises every run of n examples by the run's own statistics.

    Examples 0 to n - 1 of the local batch are the first run, n to 2n - 1 the second: what k workers of n hold, or k
    accumulated microbatches of n. Parameters, buffers and state_dict are those of `torch.nn.BatchNorm*`, and so is
    evaluation mode. The running statistics go where k updates, one a run, would bring them, so that their memory is
    counted in examples and does not depend on the layout; with momentum=None they are the same for any order of runs.

    Args:
        num_features: channels, the input's dimension 1.
        n: examples that are normalised together, >= 1.
        options: `eps`, `momentum`, `affine`, `track_running_stats`, `device`, `dtype`, as for `torch.nn.BatchNorm2d`.

    Raises:
        ConfigError: n is below 1; in training mode, n does not divide the local batch, or there is one value a channel.

    >>> import torch
    >>> layer = GhostBatchNorm(1, n=2)
    >>> layer(torch.tensor([[1.0], [3.0], [100.0], [300.0]])).flatten().round().tolist()
    [-1.0, 1.0, -1.0, 1.0]

    Source: Goyal 2017, eq. (5) to (7); ghost batch norm of Hoffer 2017, here with torch's running average.
    """

    def __init__(self, num_features: int, n: int, **options: Any) -> None:
        """Make the layer; see the class."""
        super().__init__(num_features, **options)
        self.n = check_n(n)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """The normalised input."""
        check_input(self, input)
        num_runs, rest = len(input) // self.n, len(input) % self.n  # no divmod: torch.compile knows none
        if not self.training or (num_runs == 1 and not rest):
            return super().forward(input)
        if rest or not num_runs:
            nearest = [str(runs * self.n) for runs in (num_runs, num_runs + 1) if runs]
            raise ConfigError(
                f"a local batch of {len(input)} cannot be cut into runs of n={self.n} examples. "
                f"The nearest that can: {' or '.join(nearest)}. (A data loader's last batch: drop_last=True.)"
            )
        if input.numel() == len(input) // self.n * self.num_features:
            raise ConfigError(
                f"a run of n={self.n} example of shape {tuple(input.shape[1:])} has one value a channel, and so no "
                f"variance. Use n >= 2."
            )
        output, mean, var, count = normalise(input, num_runs, self.weight, self.bias, self.eps)
        update_running_statistics(self, mean, var, count)
        return output

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        check_input(self, input)

    def extra_repr(self) -> str:
        """What is printed of the layer."""
        return f"{super().extra_repr()}, n={self.n}"


def check_n(n: int) -> int:
    """A usable n, or why it is not."""
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigError(f"n counts the examples that are normalised together and is at least 1; got {n!r}.")
    return n
