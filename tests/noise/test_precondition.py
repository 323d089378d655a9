"""Are the moments in Adam's metric those of gradients multiplied by the root of P?"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from largebatch.errors import ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.noise.precondition import metric_of
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


def after_steps(make, num_steps=3, **options):
    """A weight, its optimizer after some steps, and the gradients that these took."""
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = make([w], **options)
    gradients = np.random.default_rng(0).normal(size=(num_steps, 3)) + 2
    for gradient in gradients:
        w.grad = torch.tensor(gradient)
        optimizer.step()
    return w, optimizer, gradients


def test_centered_rmsprop_divides_by_the_spread_about_its_mean():
    w, optimizer, gradients = after_steps(torch.optim.RMSprop, alpha=0.9, eps=1e-3, centered=True)
    square, mean = np.zeros(3), np.zeros(3)
    for gradient in gradients:
        square, mean = 0.9 * square + 0.1 * gradient**2, 0.9 * mean + 0.1 * gradient
    assert metric_of(optimizer)(w).numpy() == pytest.approx(1 / (np.sqrt(square - mean**2) + 1e-3), rel=1e-9)


def test_adadelta_multiplies_by_the_size_of_its_steps():
    # Zeiler 2012, algorithm 1, lr left out: a factor common to all coordinates.
    w, optimizer, gradients = after_steps(torch.optim.Adadelta, rho=0.9, eps=1e-3)
    square, steps = np.zeros(3), np.zeros(3)
    for gradient in gradients:
        square = 0.9 * square + 0.1 * gradient**2
        step = np.sqrt(steps + 1e-3) / np.sqrt(square + 1e-3) * gradient
        steps = 0.9 * steps + 0.1 * step**2
    expected = np.sqrt(steps + 1e-3) / np.sqrt(square + 1e-3)
    assert metric_of(optimizer)(w).numpy() == pytest.approx(expected, rel=1e-9)


def test_groups_are_those_of_the_optimizer_now():
    first, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.Adam([first], lr=0.1, eps=0.0)
    metric = metric_of(optimizer)
    metric(first)
    optimizer.add_param_group({"params": [late], "eps": 3.0, "betas": (0.5, 0.5)})
    first.grad = late.grad = torch.full((2,), 2.0)
    optimizer.step()
    assert metric(late).tolist() == pytest.approx([1 / (2 + 3)] * 2)
    # A checkpoint brings groups of its own.
    state = optimizer.state_dict()
    state["param_groups"][0]["eps"] = 8.0
    optimizer.load_state_dict(state)
    assert metric(first).tolist() == pytest.approx([1 / (2 + 8)] * 2)


def test_a_parameter_that_no_group_holds_is_refused():
    held, other = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    with pytest.raises(ConfigError, match=r"no group of the Adam holds a parameter of shape \(2, 3\)"):
        metric_of(torch.optim.Adam([held]))(other)


class Moves(TorchFunctionMode):
    """Counts what may take a tensor to another device."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and not isinstance(args[1], torch.dtype):
            self.num += 1
        return func(*args, **(kwargs or {}))


def test_adams_step_count_stays_on_the_host():
    # It is a CPU tensor beside weights elsewhere: copying it there would make the host wait, once a parameter.
    w, optimizer, _ = after_steps(torch.optim.Adam, lr=0.1)
    with Moves() as moves:
        metric_of(optimizer)(w)
    assert moves.num == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_on_cuda_the_metric_does_not_make_the_host_wait(options):
    w = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.Adam([w], eps=0.0, **options)
    w.grad = torch.full_like(w, 4.0)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = metric_of(optimizer)(w)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.tolist() == pytest.approx([0.25] * 3)
