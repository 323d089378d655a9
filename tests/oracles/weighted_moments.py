"""Independent float64 numpy oracle: moments of a step whose microbatches weigh anything; imports nothing from src."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def of_weighted(means: Array, sizes: Sequence[int], weights: Sequence[float]) -> tuple[float, float]:
    """(tr(Sigma), |G|^2) of microbatch mean gradients g_i (K, d) over b_i units, in a step gradient ~ sum a_i g_i.

    With a_i made to sum to 1 and gbar = sum a_i g_i: E sum a_i |g_i - gbar|^2 = tr(Sigma) sum (a_i - a_i^2) / b_i,
    and E|gbar|^2 = |G|^2 + tr(Sigma) sum a_i^2 / b_i.
    """
    a, b = np.asarray(weights, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    a = a / a.sum()
    mean = a @ means
    trace = float(a @ ((means - mean) ** 2).sum(axis=1)) / float(((a - a * a) / b).sum())
    return trace, float(mean @ mean) - trace * float((a * a / b).sum())
