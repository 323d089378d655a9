"""Does my training step do the same on one worker and on several?"""

from largebatch.testing.equivalence import check_parallel_equivalence
from largebatch.testing.processes import WorkerFailedError
from largebatch.testing.report import Cause, Comparison, EquivalenceReport, NotEquivalentError

__all__ = [
    "Cause",
    "Comparison",
    "EquivalenceReport",
    "NotEquivalentError",
    "WorkerFailedError",
    "check_parallel_equivalence",
]
