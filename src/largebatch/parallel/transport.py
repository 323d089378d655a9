"""What does an all-reduce need to know of the wire? Who am I, send, receive."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from largebatch.errors import LargebatchError


class PeerLostError(LargebatchError, RuntimeError):
    """Another rank ended, hangs or cannot be reached; the message names it and the phase it was lost in."""

    def __init__(self, rank: int, phase: str, said: str) -> None:
        super().__init__(
            f"rank {rank} was lost in phase {phase!r} of an all-reduce ({said}). Its own message says why; start the "
            "job again from its last checkpoint."
        )
        self.rank = rank
        """The rank that was lost, in the numbering of the whole job."""
        self.phase = phase
        """What was under way, such as "reduce-scatter, distance 2"."""

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self)._again, (self.rank, self.phase, str(self)))

    @classmethod
    def _again(cls, rank: int, phase: str, message: str) -> PeerLostError:
        error = cls(rank, phase, "")
        error.args = (message,)
        return error


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Block until the buffer may be used again (sent) or holds the message (received).

        Raises:
            PeerLostError: the other side is gone, or did not answer within the transport's timeout.
        """
        ...


class Transport(Protocol):
    """Ranks that pass messages: over torch.distributed, or N of them in one process.

    Messages from one rank to another arrive in the order they were sent. A transfer never blocks where it starts.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 to world_size - 1."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks that take part."""
        ...

    def send(self, values: Tensor, to: int, phase: str) -> Pending:
        """Start to send a contiguous 1-D tensor; it may not be changed before `wait` returns."""
        ...

    def receive(self, values: Tensor, source: int, phase: str) -> Pending:
        """Start to receive into a contiguous 1-D tensor of the length and dtype that `source` sends."""
        ...
