"""How do some of the ranks run an algorithm among themselves? By a transport that knows them alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from largebatch.errors import ConfigError
from largebatch.parallel.transport import Pending, Transport


class Subset:
    """Some of the ranks of another transport, numbered from 0 in the order given.

    Args:
        transport: between all ranks.
        ranks: those that take part, this one among them.
        phase: said before each phase of what runs here, such as "between hosts".

    Raises:
        ConfigError: this rank is not among them, or one is named twice.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], phase: str) -> None:
        if len(set(ranks)) != len(ranks) or transport.rank not in ranks:
            raise ConfigError(f"rank {transport.rank} needs distinct ranks with itself among them; got {list(ranks)}.")
        self._transport, self._ranks, self._phase = transport, tuple(ranks), phase
        self.rank, self.world_size = self._ranks.index(transport.rank), len(ranks)

    def send(self, values: Tensor, to: int, phase: str) -> Pending:
        """Start to send to one of the ranks, by its number here."""
        return self._transport.send(values, self._ranks[to], f"{self._phase}: {phase}")

    def receive(self, values: Tensor, source: int, phase: str) -> Pending:
        """Start to receive from one of the ranks, by its number here."""
        return self._transport.receive(values, self._ranks[source], f"{self._phase}: {phase}")
