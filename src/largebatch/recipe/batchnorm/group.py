"""How do several workers normalise over n when each holds fewer examples?"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.recipe.batchnorm.normalise import BatchNorm, check_input, normalise, update_running_statistics


class GroupBatchNorm(BatchNorm):
    """Batch norm for inputs of any dimension over all examples that the workers of a process group hold together.

    Unlike `torch.nn.SyncBatchNorm` it runs on CPUs too. Workers may hold different numbers of examples, none included;
    gradients are those of the sum of the workers' losses, so DDP's average is right. Parameters, buffers, state_dict
    and evaluation mode are those of `torch.nn.BatchNorm*`. In training mode every worker of the group runs the layer
    forward and backward the same number of times and in the same order: one all-reduce each. Fewer than two values a
    channel in the whole group leave the running statistics as they are. Under torch.compile the
    layer is left to eager mode.

    A deep copy keeps the group; a pickled layer comes back without and then serves in evaluation mode only.

    Args:
        num_features: channels, the input's dimension 1.
        group: the workers that together hold n examples. Give them a group of their own, as
            `largebatch.recipe.batchnorm.batchnorm_over` does, so that nothing else comes between their all-reduces.
        options: `eps`, `momentum`, `affine`, `track_running_stats`, `device`, `dtype`, as for `torch.nn.BatchNorm2d`.

    Raises:
        ConfigError: in training mode, without a group (after unpickling).

    Source: Goyal 2017, eq. (5): n belongs to the loss, and not to the hardware.
    """

    _is_eager = False

    def __init__(self, num_features: int, group: dist.ProcessGroup, **options: Any) -> None:
        """Make the layer; see the class."""
        super().__init__(num_features, **options)
        self.group: dist.ProcessGroup | None = group
        cls: Any = GroupBatchNorm
        if not cls._is_eager:  # only now, not at import: torch.compiler.disable imports the compiler, for seconds
            cls._over_workers, cls._is_eager = torch.compiler.disable(cls._over_workers), True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """The normalised input."""
        check_input(self, input)
        return self._over_workers(input) if self.training else super().forward(input)

    def _over_workers(self, values: Tensor) -> Tensor:
        if self.group is None:
            raise ConfigError(
                "this GroupBatchNorm was unpickled and has no process group to normalise over. Load a state_dict into "
                "a model from batchnorm_over instead, or use it in evaluation mode."
            )
        output, mean, var, count = normalise(values, 1, self.weight, self.bias, self.eps, self.group)
        update_running_statistics(self, mean, var, count)
        return output

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        check_input(self, input)

    def extra_repr(self) -> str:
        """What is printed of the layer."""
        workers = None if self.group is None else dist.get_process_group_ranks(self.group)
        return f"{super().extra_repr()}, workers={workers}"

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: all but the group, which no other process could use."""
        return {**self.__dict__, "group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupBatchNorm:
        """A copy in the same group, as averages of a model's weights make it."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self.group)] = self.group
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made
