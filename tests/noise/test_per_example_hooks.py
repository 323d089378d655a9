"""Do the hooks of per-example norms cost, keep alive and confuse nothing, and is what float32 cannot square no norm?"""

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from largebatch.noise.per_example import calls, collector
from largebatch.noise.per_example import forms as forms_module
from largebatch.noise.per_example.collector import PerExampleCollector
from largebatch.noise.per_example.hooks import Clock


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make_model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def num_hooks(model):
    """Hooks on modules and parameters."""
    modules = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return modules + sum(
        len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
        for parameter in model.parameters()
    )


@pytest.mark.parametrize("fast", [False, True])
def test_the_seconds_are_those_of_the_hooks_and_of_one_step(fast, monkeypatch):
    linear = nn.Linear(2, 3)
    meter = PerExampleCollector(linear, fast=fast)
    assert meter.seconds == 0.0
    x = torch.randn(4, 9, 2)
    slow = forms_module.row_dots

    def sleep_and_dot(*tensors):
        time.sleep(0.02)
        return slow(*tensors)

    monkeypatch.setattr(forms_module, "row_dots", sleep_and_dot)
    output = linear(x)
    before = meter.seconds
    assert before > 0, "the forward's hooks"
    started = time.perf_counter()
    output.sum().backward()
    took = time.perf_counter() - started
    assert before + 0.04 <= meter.seconds <= before + took, "a weight and a bias, 0.02 s each"
    meter.take()
    assert meter.seconds == 0.0
    linear(x).sum().backward()
    assert meter.seconds > 0.04
    meter.discard()
    assert meter.seconds == 0.0


def test_a_hook_inside_a_hook_counts_once(monkeypatch):
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr("largebatch.noise.per_example.hooks.perf_counter", lambda: now[0])
    clock = Clock()
    clock.timed(clock.timed(wait, 4.0))()
    clock.timed(wait, 1.0)()
    assert clock.seconds == 5.0


@pytest.mark.parametrize("fast", [False, True])
def test_a_dropped_model_is_freed_with_its_collector(fast):
    model = make_model()
    meter = PerExampleCollector(model, fast=fast)
    model(torch.randn(5, 3)).sum().backward()
    meter.take()
    model(torch.randn(5, 3)).sum().backward()  # not taken
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, meter
    gc.collect()
    assert [ref() for ref in parameters] == [None] * 4


@pytest.mark.parametrize("fast", [False, True])
def test_a_dropped_collector_leaves_the_model_as_it_was(fast):
    model, x = make_model(), torch.randn(5, 7, 3)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    meter = PerExampleCollector(model, fast=fast)
    under_way = model(x).sum()
    gone = weakref.ref(meter)
    del meter
    gc.collect()
    if not fast:  # a graph whose gradients it makes keeps it
        assert gone() is None
    under_way.backward()
    del under_way
    gc.collect()
    assert gone() is None
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    output = model(x)
    assert not output._backward_hooks, "a call was watched"


@pytest.mark.parametrize("fast", [False, True])
def test_a_step_that_is_not_measured_has_no_hooks(fast):
    model, x = make_model(), torch.randn(5, 3)
    meter = PerExampleCollector(model, fast=fast)
    model(x).sum().backward()
    (expected,) = meter.take()
    on = num_hooks(model)
    for _ in range(2):
        meter.enabled = False
        assert not meter.enabled and num_hooks(model) == 0
        model(x).sum().backward()
        meter.enabled = True
        assert num_hooks(model) == on
        assert meter.take() == []
        model.zero_grad()
        model(x).sum().backward()
        assert torch.equal(meter.take()[0], expected)
    meter.close()
    meter.enabled = True
    assert num_hooks(model) == 0


def test_hooks_that_come_back_still_see_a_layer_before_the_hooks_of_others():
    model, x = make_model(), torch.randn(5, 3)
    meter = PerExampleCollector(model)
    model[2].register_forward_hook(lambda module, args, output: output * 2)
    model(x).sum().backward()
    (expected,) = meter.take()
    assert expected.isfinite().all()
    meter.enabled = False
    meter.enabled = True
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(meter.take()[0], expected)


def test_a_parameter_frozen_while_nothing_is_measured_is_measured_again():
    model, x = make_model(), torch.randn(5, 3)
    meter = PerExampleCollector(model)
    model(x).sum().backward()
    (expected,) = meter.take()
    meter.enabled = False
    model[0].requires_grad_(False)
    meter.enabled = True
    assert not model[0].weight.requires_grad
    model[0].requires_grad_(True)
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(meter.take()[0], expected)


def test_two_threads_of_one_backward_find_one_record(monkeypatch):
    layer = nn.Linear(3, 2)
    meter = PerExampleCollector(layer)
    make, ends = collector.Backward, []

    def slow(**arguments):
        time.sleep(0.1)  # so that the other thread comes meanwhile
        return make(**arguments)

    monkeypatch.setattr(collector, "Backward", slow)
    monkeypatch.setattr(collector, "at_end", ends.append)
    monkeypatch.setattr(collector, "backward_id", lambda: 7)
    scope = calls.Scope(owner=layer, num_examples=4, num_dims=2)
    own = [
        calls.Call(module=layer, name="", scope=scope, rule=None, names={index: "weight"}, open={index})
        for index in range(2)
    ]
    threads = [threading.Thread(target=meter._use_of, args=(call,)) for call in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 1
    assert len(meter._running.by_call) == 2, "what the first thread saw is lost"


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("positions", [(), (6,), (40,)])
@pytest.mark.parametrize("scale", [1e-25, 1e-22, 1e-20, 1e20, 1e25])
def test_what_float32_cannot_square_is_no_norm_and_float64_measures_it(scale, positions, fast):
    model, x = make_model(), torch.randn(5, *positions, 3)
    exact = model.double()
    meter = PerExampleCollector(exact)
    exact(x.double()).sum().backward()
    expected = meter.take()[0] * scale**2
    meter.close()
    model = model.float()
    model.zero_grad()
    meter = PerExampleCollector(model, fast=fast)
    for _ in range(2):  # a new use of each parameter, and a known one
        (model(x).sum() * scale).backward()
        (norms,) = meter.take()
        assert not norms.isfinite().all()
        meter.wide = True
        (model(x).sum() * scale).backward()
        (norms,) = meter.take()
        assert norms.dtype == torch.float64
        torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)  # the gradients are float32's
        meter.wide = False


def test_float64_measures_tied_weights_embeddings_and_layers_without_a_rule():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.norm, self.mix = nn.Embedding(5, 4), nn.LayerNorm(4), nn.PReLU(1)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids):
            return self.head(self.mix(self.norm(self.tokens(ids))))

    ids = torch.tensor([[0, 1, 1], [4, 2, 0], [3, 3, 3]])
    model = Tied()
    norms = []
    for wide, scale in ((False, 1.0), (True, 1e-22)):
        meter = PerExampleCollector(model)
        meter.wide = wide
        (model(ids).square().sum() * scale).backward()
        norms.append(meter.take()[0].double() / scale**2)
        meter.close()
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)


def test_one_group_below_float32_is_not_0_beside_another_that_is_not():
    model = make_model()
    meter = PerExampleCollector(model, group_of=lambda name: int(name.startswith("2")))
    model[2].weight.data.mul_(1e-25)  # what comes back to the first layer
    model(torch.randn(5, 3)).sum().backward()
    (norms,) = meter.take()
    assert norms[0].isnan().all() and norms[1].isfinite().all()


def test_gradients_of_exactly_0_are_0():
    model = make_model()
    meter = PerExampleCollector(model)
    (model(torch.randn(5, 3)).sum() * 0).backward()
    assert meter.take()[0].tolist() == [[0.0] * 5]


@pytest.mark.parametrize("then", ["forward", "close"])
def test_ctrl_c_inside_a_layer_leaves_no_weight_frozen(then):
    layer = nn.Conv1d(3, 3, 2)
    model = nn.Sequential(nn.Conv1d(3, 3, 2), layer, nn.Flatten())
    collector = PerExampleCollector(model, fast=True)

    def interrupt(*_):
        assert not layer.weight.requires_grad  # the layer is at work
        raise KeyboardInterrupt

    handle = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 3, 200))
    handle.remove()
    if then == "forward":
        model[0](torch.randn(4, 3, 200)).sum().backward()
    else:
        collector.close()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_after_ctrl_c_inside_a_forward_the_next_one_is_measured():
    """No hook is called on the way out, so that the interrupted forward would own all that came after it."""
    model = make_model()
    collector = PerExampleCollector(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 3))
    handle.remove()
    inputs = torch.randn(5, 3)
    model(inputs).square().sum().backward()
    (norms,) = collector.take()
    each = [torch.autograd.grad(model(x[None]).square().sum(), list(model.parameters())) for x in inputs]
    expected = torch.tensor([[sum(grad.double().square().sum() for grad in grads) for grads in each]])
    torch.testing.assert_close(norms.double(), expected.double(), rtol=1e-5, atol=0)
