"""Moments of a run whose noise scale grows like the root of its progress, and its exact S_min, E_min.

Independent of src. A run at fixed batch B advances by w = 1/(1 + Bn/B) full-batch steps a step, with
Bn(s) = factor sqrt(s): McCandlish 2018 (D.1), (D.7). Gradients are drawn in `dim` dimensions, each from a given
number of microbatches, and turned into moments by (A.2).
"""

import numpy as np


def sqrt_noise_run(min_steps, factor, batch):
    """Per step: the exact noise scale; and exact (steps to goal, S_min, E_min) by integrating ds over s."""
    # t(s) = integral (1 + factor sqrt(s)/B) ds = s + (2/3)(factor/B) s^1.5, inverted on a fine grid.
    s = np.linspace(0.0, min_steps, 200_001)
    t = s + 2 / 3 * factor / batch * s**1.5
    crossing = float(t[-1])
    middles = np.arange(int(np.ceil(crossing))) + 0.5
    noise = factor * np.sqrt(np.interp(np.minimum(middles, crossing), t, s))
    return noise, crossing, float(min_steps), float(2 / 3 * factor * min_steps**1.5)


def draw_moments(noise, batch, dim, microbatches, seed, trace=1.0):
    """Unbiased (tr(Sigma), |G|^2) of every step from `microbatches` mean gradients of batch/microbatches units."""
    rng = np.random.default_rng(seed)
    signal = np.zeros((len(noise), 1, dim))
    signal[:, 0, 0] = np.sqrt(trace / noise)
    spread = np.sqrt(trace / dim / (batch / microbatches))
    grads = signal + spread * rng.standard_normal((len(noise), microbatches, dim))
    small = (grads**2).sum(-1).mean(-1)
    big = (grads.mean(1) ** 2).sum(-1)
    b_small = batch / microbatches
    return (small - big) / (1 / b_small - 1 / batch), (batch * big - b_small * small) / (batch - b_small)
