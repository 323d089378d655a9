"""Are the moments in Adam's metric those of gradients multiplied by the root of P?"""

import numpy as np
import pytest
import torch
from torch import nn

from largebatch.errors import ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor
from oracles import noise_moments as oracle


@pytest.mark.parametrize(
    ("make", "amsgrad"), [(torch.optim.Adam, False), (torch.optim.AdamW, True), (torch.optim.RMSprop, None)]
)
def test_moments_in_the_metric_are_those_of_gradients_times_the_root_of_p(make, amsgrad):
    """McCandlish et al. 2018, sec. 2.2: |P^(1/2) g|^2, v and its bias correction written out in numpy."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.zeros(3))
    model = nn.ParameterList([w])
    options = {} if amsgrad is None else {"amsgrad": amsgrad, "betas": (0.9, 0.99)}
    optimizer = make([w], lr=0.1, eps=1e-3, **options)
    draws = np.random.default_rng(0).normal(size=(6, 4, 3))
    v, peak, found = np.zeros(3), np.zeros(3), []
    with NoiseScaleMonitor(
        model, microbatch=1, every=1, precondition_by=optimizer, on_measured=[found.append], groups={"all": "*"}
    ) as monitor:
        for step, gradients in enumerate(draws):
            w.grad = None
            for gradient in gradients:
                (w @ torch.tensor(gradient, dtype=torch.float32) / 4).backward()
            monitor.step()
            if step == 0:
                assert found[0].preconditioned is None
            else:
                if amsgrad is None:
                    p = 1 / (np.sqrt(v) + 1e-3)
                else:
                    p = 1 / (np.sqrt((peak if amsgrad else v) / (1 - 0.99**step)) + 1e-3)
                wanted = oracle.of_microbatches(np.sqrt(p) * gradients, [1] * 4)
                got = found[-1].preconditioned
                assert (got.trace_cov, got.grad_sq_norm) == pytest.approx(wanted, rel=1e-4)
            mean = gradients.mean(0)
            v = 0.99 * v + 0.01 * mean**2
            peak = np.maximum(peak, v)
            optimizer.step()
    assert monitor.preconditioned_noise_scale.num_steps == 5


def test_an_optimizer_without_second_moments_has_no_metric():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with NoiseScaleMonitor(model, microbatch=1, every=1, precondition_by=optimizer) as monitor:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        monitor.step()
        optimizer.step()
        with pytest.raises(ConfigError, match="SGD keeps no second moment"):
            model(torch.ones(1, 2)).sum().backward()
