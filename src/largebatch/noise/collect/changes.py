"""Are the gradients still what the backwards of this step have made them?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.noise.collect.norms import sq_norm

MARK = 2**16
"""Elements of the largest gradient whose norm is read twice, to see whether gradients were changed."""


def version_of(grad: Tensor | None) -> tuple[int, int]:
    """Where a gradient is, and how often it was changed in place."""
    return (0, 0) if grad is None else (grad.data_ptr(), grad._version)


class Gradients:
    """The gradients of one step: which have arrived, and the state each was left in."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, is_ddp: bool, mark: int = -1) -> None:
        """A step that nothing has arrived in.

        Args:
            parameters: what is watched; it may grow.
            is_ddp: whether DistributedDataParallel writes the gradients once more at the end of a backward.
            mark: the parameter whose norm was read at the last step.
        """
        self.arrived: set[int] = set()
        """Parameters, by their index, that a backward has given a gradient to."""
        self.versions: dict[int, tuple[int, int]] = {}
        """`version_of` each when it was last given one."""
        self.mark = mark
        """The parameter whose norm is read at a backward's end, -1 before the first."""
        self.sq_norm_mark: Tensor | None = None
        """That norm; None where it was not read."""
        self._parameters, self._is_ddp = parameters, is_ddp
        self._before: dict[int, tuple[int, int]] = {}

    def add(self, index: int) -> None:
        """A parameter has been given a gradient for the first time."""
        if not self.arrived and self._is_ddp:
            self._before = {i: version_of(p.grad) for i, p in enumerate(self._parameters) if i != index}
        self.arrived.add(index)

    def note(self, *, mark: bool) -> None:
        """At a backward's end: note how the gradients are now; `mark` reads the norm of one."""
        if not self.arrived:
            return
        # Only now: gradients that are views of one tensor (of a concatenation, of DDP's buckets) share one version.
        for index in self.arrived:
            self.versions[index] = version_of(self._parameters[index].grad)
        if not mark:
            self.sq_norm_mark = None
            return
        if self.mark not in self.arrived:
            sizes = {index: self._parameters[index].numel() for index in sorted(self.arrived)}
            small = [index for index, size in sizes.items() if size <= MARK]
            self.mark = max(small, key=sizes.__getitem__) if small else min(sizes, key=sizes.__getitem__)
        # Neither `.data` nor a gradient scaler on a CPU counts versions up: one gradient's norm shows them.
        self.sq_norm_mark = sq_norm(self._parameters[self.mark].grad)

    def marks(self) -> tuple[Tensor, Tensor]:
        """`sq_norm_mark` and the same norm now; the same twice where it was not read."""
        if self.sq_norm_mark is None:
            return torch.zeros(()), torch.zeros(())
        return self.sq_norm_mark, sq_norm(self._parameters[self.mark].grad)

    def given_up(self) -> set[int]:
        """Gradients that had arrived and were set to None or to 0 since: the step was given up and begins again.

        To be asked at a backward's start: in DDP's bucket views all gradients of a bucket share one version.
        """
        gone: set[int] = set()
        for index in self.arrived:
            held = self._parameters[index].grad
            if held is None:
                gone.add(index)
                continue
            address, version = self.versions[index]
            if self._is_ddp and held.data_ptr() != address:
                continue  # DDP has rebuilt its buckets and moved the gradient
            if held._version != version:
                gone.add(index)
                if torch.count_nonzero(held.detach()):
                    raise ConfigError(
                        "gradients were changed between two backwards of one step: clip and scale after step()."
                    )
        return gone

    def of_step(self) -> dict[int, Tensor]:
        """The gradients that have arrived; raises ConfigError if one is gone."""
        held = {index: self._parameters[index].grad for index in sorted(self.arrived)}
        found = {index: grad for index, grad in held.items() if grad is not None}
        if len(found) < len(held):
            raise ConfigError(
                "gradients are gone: call step() after the last backward and before zero_grad(); an optimizer that "
                "steps inside the backward cannot be measured."
            )
        return found

    def are_changed(self) -> bool:
        """Whether one of those that arrived was changed since, as far as versions tell."""
        return any(version_of(self._parameters[index].grad) != self.versions[index] for index in self.arrived)

    def given_by_others(self) -> dict[int, Tensor]:
        """Gradients of parameters that only other workers used in this step: DDP has written them."""
        return {
            index: parameter.grad
            for index, parameter in enumerate(self._parameters)
            if index not in self.arrived
            and parameter.grad is not None
            and version_of(parameter.grad) != self._before.get(index)
        }
