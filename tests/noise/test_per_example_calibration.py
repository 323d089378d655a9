"""Does the calibration of the norm layers give the ratio, and an interval that holds it as often as it says?"""

import numpy as np
import pytest
import torch
from torch import nn

from largebatch.errors import ConfigError
from largebatch.noise.moments import StepMoments, solve_per_example
from largebatch.noise.per_example.calibration import calibrate
from largebatch.noise.per_example.collector import PerExampleCollector


def moments(trace_cov, grad_sq_norm):
    return StepMoments(
        trace_cov=trace_cov, grad_sq_norm=grad_sq_norm, batch=8, num_microbatches=8, sq_norm_small=0.0,
        sq_norm_step=0.0, units_small=1.0, units_step=8.0,
    )  # fmt: skip


def steps(rng, num_steps, noise=0.3):
    """(norm layers, whole), true ratio 2: the errors of both moments are shared in part."""
    shared = noise * rng.standard_normal((num_steps, 2))
    own = 0.3 * noise * rng.standard_normal((num_steps, 4))
    small = [moments(3 * (1 + s[0] + o[0]), 1 + s[1] + o[1]) for s, o in zip(shared, own, strict=True)]
    whole = [moments(60 * (1 + s[0] + o[2]), 10 * (1 + s[1] + o[3])) for s, o in zip(shared, own, strict=True)]
    return small, whole


def test_the_interval_holds_the_ratio_in_95_of_100_runs():
    rng = np.random.default_rng(0)
    found = [calibrate(*steps(rng, 40)) for _ in range(1000)]
    assert all(calibration.resolved for calibration in found)
    held = np.mean([low <= 2.0 <= high for low, high in (calibration.interval for calibration in found)])
    # 1,000 runs tell 95 % with a standard error of 0.7 points.
    assert 0.93 <= held <= 0.97
    assert np.mean([calibration.ratio for calibration in found]) == pytest.approx(2.0, rel=0.01)


def test_shared_errors_cancel():
    rng = np.random.default_rng(1)
    small, whole = steps(rng, 40)
    paired = calibrate(small, whole)
    shuffled = calibrate([small[i] for i in rng.permutation(40)], whole)
    width = [np.log(c.interval[1] / c.interval[0]) for c in (paired, shuffled)]
    assert width[0] < 0.5 * width[1]


def test_what_is_unresolved_says_so():
    rng = np.random.default_rng(2)
    small, whole = steps(rng, 40)
    noisy = [moments(3.0, 0.01 * value) for value in rng.standard_normal(40)]
    assert "the norm layers" in calibrate(noisy, whole).reason
    assert calibrate(small, noisy).ratio is None
    assert "the whole model" in calibrate(small[:3], whole[:3]).reason
    with pytest.raises(ConfigError, match="got 40 of the norm layers and 3 of the whole model"):
        calibrate(small, whole[:3])


def test_norms_of_a_model_are_calibrated_by_groups():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double()
    is_norm = {"1.weight", "1.bias"}
    collector = PerExampleCollector(model, group_of=lambda name: int(name in is_norm))
    small, whole = [], []
    for _ in range(12):
        x = torch.randn(16, 4, dtype=torch.float64)
        model.zero_grad()
        (model(x) - x[:, :1] - 1).square().sum().backward()
        (norms,) = collector.take()
        steps = [sum(p.grad.square().sum().item() for n, p in model.named_parameters() if n in group) / 16**2
                 for group in (is_norm, dict(model.named_parameters()))]  # fmt: skip
        small.append(solve_per_example(norms[1].tolist(), steps[0]))
        whole.append(solve_per_example(norms.sum(0).tolist(), steps[1]))
    calibration = calibrate(small, whole)
    assert calibration.resolved and calibration.num_steps == 12
    low, high = calibration.interval
    assert low < calibration.ratio < high
