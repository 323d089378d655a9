"""Are the norms those of each microbatch and of their sum, and what cannot be one refused?"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from largebatch.errors import ConfigError
from largebatch.groups import share_out
from largebatch.noise.collect import collector as collect_module
from largebatch.noise.collect.collector import GradientCollector
from largebatch.noise.collect.norms import SMALL, sq_norm_dots
from largebatch.noise.monitor import NoiseScaleMonitor
from oracles import noise_moments as oracle


def parameter(*values):
    return nn.Parameter(torch.tensor(values))


def collect(*parameters, **options):
    """A collector of these parameters, of one unit a backward."""
    return GradientCollector(nn.ParameterList(parameters), **{"default_units": 1} | options)


def take(collector):
    """What a step came to, as plain numbers."""
    norms = collector.take()
    return SimpleNamespace(
        units=norms.units, sq_norms=tuple(norms.sq_norms[0].tolist()), sq_norm_step=norms.sq_norm_step[0].item(),
        exact=not norms.skip, skip=norms.skip, stale=norms.sq_norm_stale.item(),
    )  # fmt: skip


def test_norms_are_of_each_backward_and_of_their_sum():
    w = parameter(1.0, 1.0)
    collector = collect(w, default_units=4)
    (w @ torch.tensor([3.0, 4.0])).backward()
    (w @ torch.tensor([0.0, 2.0])).backward()
    collected = take(collector)
    assert collected.units == (4, 4)
    assert collected.sq_norms == (25.0, 4.0)
    assert collected.sq_norm_step == 9.0 + 36.0
    assert collected.exact


def test_a_probe_leaves_no_trace():
    w = parameter(1.0, 1.0)
    collector = collect(w)

    def loss(factor):
        return factor * w.square().sum()

    torch.autograd.grad(loss(5.0), w)
    loss(1.0).backward()
    torch.autograd.grad(loss(7.0), w)
    loss(2.0).backward()
    (gradient,) = torch.autograd.grad(loss(3.0), w, create_graph=True)
    torch.autograd.grad(gradient.sum(), w)
    with collector.microbatch(2):
        torch.autograd.grad(loss(5.0), w)
        loss(3.0).backward()
        torch.autograd.grad(loss(5.0), w)
    collected = take(collector)
    assert collected.sq_norms == (8.0, 32.0, 72.0)
    assert collected.units == (1, 1, 2)
    assert collected.exact


def test_a_probe_before_an_unmeasured_step_leaves_no_trace_in_the_next():
    w = parameter(1.0)
    collector = collect(w)
    for measured in (True, False, True):
        collector.enabled = measured
        w.grad = torch.zeros(1)
        for _ in range(2):
            w.sum().backward()
        if measured:
            assert take(collector).units == (1, 1)
            torch.autograd.grad(w.sum(), w)


def test_two_backwards_in_a_context_are_one_microbatch_with_the_norm_of_their_sum():
    w = parameter(1.0, 1.0)
    collector = collect(w)

    def step():
        w.grad = None
        for scale in (1.0, 10.0):
            with collector.microbatch(3):
                (scale * w @ torch.tensor([1.0, 2.0])).backward()
                (scale * w @ torch.tensor([1.0, -1.0])).backward()
        return take(collector)

    assert not step().exact  # the first time nobody could know
    for _ in range(2):
        collected = step()
        assert collected.exact
        assert collected.units == (3, 3)
        assert collected.sq_norms == (5.0, 500.0)  # |(2, 1)|^2, not 5 + 2
        assert collected.sq_norm_step == 22.0**2 + 11.0**2


def test_backwards_of_disjoint_parameters_in_a_context_need_no_buffer():
    v, w = parameter(1.0), parameter(1.0)
    collector = collect(v, w)
    for _ in range(2):
        with collector.microbatch(2):
            (3 * v).sum().backward()
            (4 * w).sum().backward()
    collected = take(collector)
    assert collected.exact
    assert collected.sq_norms == (25.0, 25.0)
    assert not collector.buffering


def test_nothing_but_scalars_is_kept():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    collector = GradientCollector(model, default_units=1)
    collector.buffering = True
    model(torch.randn(4, 8)).sum().backward()
    with collector.microbatch(1):
        model(torch.randn(4, 8)).sum().backward()
    kept = [dot for microbatch in collector._microbatches for _, dots in microbatch.parts for dot in dots]
    assert len(kept) == 1 + 4  # small gradients outside a context are read together
    assert all(dot.untyped_storage().nbytes() <= 8 for dot in kept)
    assert not any(microbatch.sums for microbatch in collector._microbatches)
    assert not collector._under_way
    assert not collector._arrivals.seen


def test_setting_gradients_to_none_starts_the_step_again():
    v, w = parameter(1.0), parameter(1.0)
    collector = collect(v, w)
    (5 * v + 5 * w).sum().backward()
    v.grad = w.grad = None
    (3 * v + 4 * w).sum().backward()
    with collector.microbatch(2):
        w.sum().backward()
    collected = take(collector)
    assert collected.units == (1, 2)
    assert collected.sq_norms == (25.0, 1.0)


def test_gradients_that_were_not_zeroed_are_told():
    w = parameter(1.0)
    collector = collect(w)
    for _ in range(2):
        w.sum().backward()
    take(collector)
    for _ in range(2):
        w.sum().backward()
    assert take(collector).stale == 4.0
    w.grad.zero_()  # zeros, as zero_grad(set_to_none=False) leaves them, are fine
    for _ in range(2):
        w.sum().backward()
    assert take(collector).sq_norm_step == 4.0


def test_gradients_that_are_gone_are_refused():
    w = parameter(1.0)
    collector = collect(w)
    w.sum().backward()
    w.grad = None
    with pytest.raises(ConfigError, match="before zero_grad"):
        take(collector)


def test_a_step_without_backward_is_refused():
    with pytest.raises(ConfigError, match="no backward"):
        collect(parameter(1.0)).take()


class Reentrant(torch.autograd.Function):
    """A segment whose backward runs it again and calls backward itself, as reentrant checkpointing does."""

    @staticmethod
    def forward(ctx, hidden, layer):
        ctx.layer = layer
        ctx.save_for_backward(hidden)
        return layer(hidden)

    @staticmethod
    def backward(ctx, gradient):
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(hidden).backward(gradient)
        return hidden.grad, None


def test_a_backward_inside_another_is_refused_and_a_context_mends_it():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    collector = GradientCollector(model, default_units=1)

    def backward():
        hidden = torch.randn(3, 2, requires_grad=True)
        for layer in model:
            hidden = Reentrant.apply(hidden, layer)
        hidden.sum().backward()

    for _ in range(2):
        backward()
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        take(collector)
    model.zero_grad()
    for _ in range(2):
        with collector.microbatch(3):
            backward()
    assert take(collector).units == (3, 3)


def test_contexts_refuse_what_they_cannot_count():
    w = parameter(1.0)
    collector = collect(w)
    for units in (0, 2.5):
        with pytest.raises(ConfigError, match="at least 1"), collector.microbatch(units):
            pass
    with pytest.raises(ConfigError, match="no backward reached"), collector.microbatch(2):
        pass
    with pytest.raises(ConfigError, match="already open"), collector.microbatch(2), collector.microbatch(2):
        pass
    with pytest.raises(ConfigError, match="inside a microbatch context"), collector.microbatch(2):
        w.sum().backward()
        take(collector)


def test_a_microbatch_that_failed_half_way_gives_the_step_up():
    w = parameter(1.0)
    collector = collect(w)
    with pytest.raises(RuntimeError, match="out of memory"), collector.microbatch(2):
        w.sum().backward()
        raise RuntimeError("out of memory")
    for _ in range(2):
        w.sum().backward()
    assert not take(collector).exact


def test_mixed_precisions_come_home_in_one_stack():
    v, w = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    collector = collect(v, w)
    for _ in range(2):
        (v.sum() + w.float().sum()).backward()
    assert take(collector).sq_norms == (4.0, 4.0)


def test_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="nothing to measure"):
        GradientCollector(nn.ReLU(), default_units=1)


@pytest.mark.parametrize("size", [1e-24, 1e-22, 1e-12, 1.0, 1e15, 1e21])
def test_gradients_of_any_length_are_measured_from_the_second_step_on(size, caplog):
    model = nn.Linear(4, 1, bias=False)
    draws = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0)) + 1
    with NoiseScaleMonitor(model, microbatch=1, every=1) as monitor:
        found = []
        for step in draws:
            model.zero_grad()
            for part in step:
                (model(part * size) / 2).sum().backward()
            found.append(monitor.step())
        for moments, step in zip(found[1:], draws[1:].double().numpy() * size, strict=True):
            trace, signal = oracle.of_microbatches(step, [1, 1])
            assert moments.trace_cov == pytest.approx(trace, rel=1e-4)
            assert moments.grad_sq_norm == pytest.approx(signal, rel=1e-4, abs=1e-4 * trace)
    ordinary = 1e-15 < size < 1e18
    assert (found[0] is not None) == ordinary
    assert monitor.num_skipped == (0 if ordinary else 1)
    assert ("float32" in caplog.text) != ordinary


def test_measuring_returns_to_float32_after_a_gradient_that_is_not_finite():
    w = parameter(1.0)
    with NoiseScaleMonitor(nn.ParameterList([w]), microbatch=1, every=1) as monitor:
        seen = []
        for factor in (1.0, float("inf"), 1.0, 1.0):
            w.grad = None
            for _ in range(2):
                (factor * w).sum().backward()
            seen.append((monitor.step() is not None, monitor._meter.collector.wide))
    assert seen == [(True, False), (False, True), (True, False), (True, False)]


def test_a_step_without_hooks_leaves_the_parameters_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    collector = GradientCollector(model, default_units=1)

    def num_hooks():
        return sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())

    assert num_hooks() == 4
    for _ in range(2):
        collector.enabled = False
        assert num_hooks() == 0
        collector.enabled = True
        assert num_hooks() == 4
        model(torch.ones(1, 4)).sum().backward()
        assert num_hooks() == 4 + 1  # the first gradient's tells a backward from a probe
    collector.close()
    collector.enabled = False
    collector.enabled = True
    assert num_hooks() == 0


@pytest.mark.parametrize("counts", [(2, 2, 2), (3, 3, 5), (4, 4, 2), (2, 1, 3)])
def test_the_sum_is_right_however_many_microbatches_a_step_has(counts):
    v, w = parameter(1.0, 1.0), parameter(1.0)
    collector = collect(v, w)
    for count in counts:
        v.grad = w.grad = None
        for k in range(count):
            loss = (v @ torch.tensor([3.0, 4.0 + k])).sum()
            # The last backward of a longer step does not reach w, whose sum was read before.
            (loss if k == 4 else loss + 5 * w.sum()).backward()
        assert take(collector).sq_norm_step == v.grad.square().sum().item() + w.grad.square().sum().item()


def test_no_large_gradient_is_read_twice(monkeypatch):
    w = nn.Parameter(torch.ones(SMALL + 1))
    collector = collect(w)

    def take_step():
        for k in range(2):
            (w * (1.0 + k)).sum().backward()

    take_step()
    take(collector)
    reads = []
    plain = sq_norm_dots
    monkeypatch.setattr(collect_module, "sq_norm_dots", lambda *a, **k: reads.append(a[0][0].item()) or plain(*a, **k))
    w.grad = None
    take_step()
    take(collector)
    assert reads == [1.0, 2.0, 3.0]


def test_small_gradients_read_together_are_those_read_one_by_one_and_not_moved(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    inputs = torch.randn(4, 8)
    kept = []
    collector = GradientCollector(model, default_units=1)
    plain = collect_module.sq_norm_dots_of
    monkeypatch.setattr(collect_module, "sq_norm_dots_of", lambda grads: kept.append([*grads]) or plain(grads))
    model(inputs).square().sum().backward()
    (grads,) = kept
    assert len(grads) == 6
    held = {parameter.grad.data_ptr() for parameter in model.parameters()}
    assert not held & {grad.data_ptr() for grad in grads}  # a kept gradient that a parameter shares could be written to
    model(inputs).sin().sum().backward()
    expected = torch.autograd.grad(model(inputs).sin().sum(), list(model.parameters()))
    collected = take(collector)
    assert collected.sq_norms[1] == pytest.approx(sum(g.double().square().sum().item() for g in expected), rel=1e-6)


def test_a_small_gradient_that_another_node_writes_to_is_not_read_as_it_became():
    """Autograd gives one tensor to a leaf and to an in-place hook of another node; `.grad` is the value before."""
    place = parameter(*[0.5] * 8)
    weight = nn.Parameter(torch.linspace(1, 2, 8))
    collector = collect(place, weight)

    def step(seed):
        torch.manual_seed(seed)
        hidden = weight * 2
        hidden.register_hook(lambda grad: grad.clamp_(-0.05, 0.05))
        (hidden + place).square().mul(torch.randn(8)).sum().backward()

    step(0)
    step(1)
    assert "changed in place" in take(collector).skip
    place.grad = weight.grad = None
    grads = []
    for seed in (2, 3):
        before = [torch.zeros(8) if p.grad is None else p.grad.clone() for p in (place, weight)]
        step(seed)
        now = (p.grad - held for p, held in zip((place, weight), before, strict=True))
        grads.append(sum(grad.square().sum().item() for grad in now))
    collected = take(collector)
    assert not collected.skip
    assert collected.sq_norms == pytest.approx(grads, rel=1e-5)


@pytest.mark.parametrize("every", [1, 3])
def test_a_compiled_model_measures_what_the_plain_one_does(every):
    def run(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        called = torch.compile(model, backend="aot_eager") if compiled else model
        found = []
        with NoiseScaleMonitor(called, microbatch=2, every=every) as monitor:
            for _ in range(7):
                model.zero_grad()
                for part in torch.randn(3, 2, 4):
                    (called(part).square().mean() / 3).backward()
                found.append(monitor.step())
        return [(m.trace_cov, m.grad_sq_norm) for m in found if m is not None]

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):  # hooks that come and go are no reason to
        compiled = run(True)
    assert len(compiled) == len(range(0, 7, every))
    assert compiled == [pytest.approx(moments, rel=1e-5) for moments in run(False)]


def test_gradients_are_shared_out_evenly_by_size():
    sizes = [1_000_000, 10, 600_000, 500_000, 10, 10, 300_000]
    for world_size in (1, 2, 3):
        shares = share_out(sizes, world_size)
        loads = [sum(size for size, rank in zip(sizes, shares, strict=True) if rank == r) for r in range(world_size)]
        assert max(loads) - min(loads) <= 300_000 or max(loads) == 1_000_000
