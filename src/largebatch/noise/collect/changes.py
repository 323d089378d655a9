"""Are the gradients still what the backwards of this step have made them?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from largebatch.errors import ConfigError
from largebatch.noise.collect.norms import sq_norm_dots

MARK = 2**16
"""Elements of the largest gradient whose norm is read twice, to see whether gradients were changed."""


def version_of(grad: Tensor | None) -> tuple[int, int]:
    """Where a gradient is, and how often it was changed in place."""
    return (0, 0) if grad is None else (grad.data_ptr(), grad._version)


class Gradients:
    """The gradients of one step: which have arrived, and the state each was left in."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        is_ddp: bool,
        marks: tuple[int, ...] = (),
        num_marks: int = 1,
    ) -> None:
        """A step that nothing has arrived in.

        Args:
            parameters: what is watched; it may grow.
            is_ddp: whether DistributedDataParallel writes the gradients once more at the end of a backward.
            marks: the parameters whose norms were read at the last step.
            num_marks: how many to read.
        """
        self.arrived: set[int] = set()
        """Parameters, by their index, that a backward has given a gradient to."""
        self.versions: dict[int, tuple[int, int]] = {}
        """`version_of` each when it was last given one."""
        self.marks = marks
        """The parameters whose norms are read at a backward's end."""
        self.problem = ""
        """What was done to the gradients that cannot be measured; empty if nothing."""
        self._dots: list[list[Tensor]] = []
        self._num_marks = num_marks
        self._parameters, self._is_ddp = parameters, is_ddp
        self._before: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        """At a backward's start, before it has written any gradient."""
        if not self.arrived and self._is_ddp:
            self._before = {i: version_of(p.grad) for i, p in enumerate(self._parameters)}

    def note(self, *, mark: bool, wide: bool) -> None:
        """At a backward's end: note how the gradients are now; `mark` reads the norms of the marks."""
        if not self.arrived:
            return
        # Only now: gradients that are views of one tensor (of a concatenation, of DDP's buckets) share one version.
        self.versions = self._find_versions()
        if not mark:
            self._dots = []
            return
        if not self.marks or not self.arrived.issuperset(self.marks):
            self.marks = self._choose()
        # Neither `.data` nor a gradient scaler on a CPU counts versions up: these norms show them.
        self._dots = [self._read(index, wide) for index in self.marks]

    def dots_of_marks(
        self, dots: dict[int, list[Tensor]], *, wide: bool
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Dots of the marks at the last backward's end and now; empty where they were not read.

        `dots` holds those of gradients that were read as they are now.
        """
        if not self._dots:
            return [], []
        return self._dots, [dots.get(index) or self._read(index, wide) for index in self.marks]

    def _choose(self) -> tuple[int, ...]:
        """The largest gradients that are small enough, or as many all over the model as are wanted."""
        sizes = {index: self._parameters[index].numel() for index in sorted(self.arrived)}
        small = [index for index, size in sizes.items() if size <= MARK] or [min(sizes, key=sizes.__getitem__)]
        if self._num_marks == 1:
            return (max(small, key=sizes.__getitem__),)
        return tuple(small[:: -(-len(small) // self._num_marks)])

    def _read(self, index: int, wide: bool) -> list[Tensor]:
        grad = self._parameters[index].grad
        return [] if grad is None else sq_norm_dots(grad, wide=wide)

    def given_up(self) -> set[int]:
        """Gradients that had arrived and were set to None or to 0 since: the step was given up and begins again.

        To be asked at a backward's start: in DDP's bucket views all gradients of a bucket share one version.
        """
        gone: set[int] = set()
        self.problem = ""
        if self._find_versions() == self.versions:
            return gone
        for index in self.arrived:
            held = self._parameters[index].grad
            if held is None:
                gone.add(index)
                continue
            address, version = self.versions.get(index, (0, 0))
            if self._is_ddp and held.data_ptr() != address:
                continue  # DDP has rebuilt its buckets and moved the gradient
            if held._version != version:
                if not torch.count_nonzero(held.detach()):
                    gone.add(index)
                else:
                    self.problem = (
                        "gradients were changed between two backwards of one step: clip and scale after step()."
                    )
        kept = [self._parameters[index].grad for index in self.arrived - gone] if gone else []
        if any(grad is not None and torch.count_nonzero(grad.detach()) for grad in kept):
            self.problem = "some gradients were set to None or 0 in the middle of a step and others were not."
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
        return self._find_versions() != self.versions

    def _find_versions(self) -> dict[int, tuple[int, int]]:
        """`version_of` of all that have arrived; without those that are gone."""
        held = ((index, self._parameters[index].grad) for index in self.arrived)
        return {index: (grad.data_ptr(), grad._version) for index, grad in held if grad is not None}

    def given_by_others(self) -> dict[int, Tensor]:
        """Gradients of parameters that only other workers used in this step: DDP has written them."""
        return {
            index: parameter.grad
            for index, parameter in enumerate(self._parameters)
            if index not in self.arrived
            and parameter.grad is not None
            and version_of(parameter.grad) != self._before.get(index)
        }
