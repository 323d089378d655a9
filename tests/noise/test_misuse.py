"""Is what a loop does wrong seen, with nothing left behind and no worker left waiting?"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.errors import CheckpointError, ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor
from workers import WorkerError, on_workers


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(model, seed, parts=2):
    generator = torch.Generator().manual_seed(seed)
    (model(torch.randn(4, 6, generator=generator)).square().mean() / parts).backward()


def monitored(model, **options):
    return NoiseScaleMonitor(model, **{"microbatch": 4, "every": 1} | options)


def right(seeds, model=None):
    """What a monitor says of these microbatches where nothing goes wrong."""
    model = model or make_model()
    with monitored(model) as monitor:
        for seed in seeds:
            backward(model, seed, len(seeds))
        return monitor.step()


@pytest.mark.parametrize("first", [0, 1])
def test_a_scaler_that_has_unscaled_one_optimizer_of_two_is_refused(first):
    model = make_model()
    optimizers = [torch.optim.SGD(model[k].parameters(), lr=0.1) for k in (0, 2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with monitored(model, grad_scaler=scaler) as monitor:
        for _ in range(2):
            scaler.scale(model(torch.randn(4, 6)).square().mean() / 2).backward()
        scaler.unscale_(optimizers[first])
        with pytest.raises(ConfigError, match="gradients were changed"):
            monitor.step()


def test_a_gradient_hook_that_comes_after_the_monitors_is_refused():
    model = make_model()
    with monitored(model) as monitor:
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        for seed in (0, 1):
            backward(model, seed)
        with pytest.raises(ConfigError, match="make it last"):
            monitor.step()


def test_several_monitors_of_one_model_say_the_same():
    model = make_model()
    with monitored(model) as one, monitored(model) as two, monitored(model, microbatch=None, per_example=True) as three:
        for seed in (0, 1):
            backward(model, seed)
        assert one.step() == two.step() == right((0, 1))
        assert three.step().num_microbatches == 8


def test_a_weight_frozen_for_an_unmeasured_step_is_not_left_out_later():
    model = make_model()
    found = []
    with monitored(model, every=2) as monitor:
        for step in range(5):
            model[0].requires_grad_(step != 1)
            model.zero_grad()
            for seed in (0, 1):
                backward(model, seed)
            found.append(monitor.step())
    assert found[0] == right((0, 1))
    assert found[2] is None or found[2] == found[0]
    assert found[4] == found[0]


def test_gradients_zeroed_in_part_are_refused():
    model = make_model()
    with monitored(model) as monitor:
        backward(model, 0)
        model[0].zero_grad()
        for seed in (1, 2):
            backward(model, seed)
        with pytest.raises(ConfigError, match="others were not"):
            monitor.step()


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of memory")


def test_a_backward_that_broke_off_gives_its_step_up(caplog):
    model = make_model()
    with monitored(model) as monitor:
        backward(model, 0)
        hidden = Breaks.apply(model[1](model[0](torch.randn(4, 6))))
        with pytest.raises(RuntimeError, match="out of memory"):
            model[2](hidden).sum().backward()
        backward(model, 1)
        assert monitor.step() is None
        assert "ended in an error" in caplog.text
        model.zero_grad()
        for seed in (0, 1):
            backward(model, seed)
        assert monitor.step() == right((0, 1))


def test_a_dropped_monitor_lets_the_model_go():
    model = make_model()
    monitor = monitored(model)
    for seed in (0, 1):
        backward(model, seed)
    monitor.step()
    weight = weakref.ref(model[0].weight)
    del model, monitor
    gc.collect()
    assert weight() is None


def test_a_closed_monitor_says_so_and_closing_takes_the_hooks_off_even_if_a_step_was_wrong():
    model = make_model()
    monitor = monitored(model)
    monitor._meter.defer = True
    for seed in (0, 1):
        backward(model, seed)
    monitor.step()
    for seed in (0, 1):  # never zeroed
        backward(model, seed)
    with pytest.raises(ConfigError, match="zero_grad"):
        monitor.step()
        monitor.close()
    monitor.close()
    assert not any(p._backward_hooks for p in model.parameters())
    with pytest.raises(ConfigError, match="the monitor is closed"):
        monitor.step()


def test_an_error_inside_the_context_is_the_one_that_is_raised():
    model = make_model()
    with pytest.raises(KeyError, match="mine"), monitored(model) as monitor:
        monitor._meter.defer = True
        backward(model, 0)
        backward(model, 1)
        monitor.step()
        monitor._meter._layout = None  # what settling would trip over
        raise KeyError("mine")
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_state_that_is_loaded_forgets_what_was_under_way():
    model = make_model()
    with monitored(model) as monitor:
        monitor._meter.defer = True
        state = monitor.state_dict()
        for seed in (0, 1):
            backward(model, seed)
        monitor.step()
        monitor.load_state_dict(state)
        assert monitor.noise_scale.num_steps == 0


def test_giving_an_unmeasured_step_up_does_not_touch_the_next():
    model = make_model()
    with monitored(model, every=2) as monitor:
        for step in range(3):
            model.zero_grad()
            if step == 1:
                monitor.give_up("nothing to see")
            for seed in (0, 1):
                backward(model, seed)
            moments = monitor.step()
    assert moments is not None


@pytest.mark.parametrize("factor", [0, -1.0, float("inf"), "1", True])
def test_a_loss_factor_that_is_none_is_refused(factor):
    with monitored(make_model()) as monitor, pytest.raises(ConfigError, match="loss_factor is a positive number"):
        monitor.loss_factor = factor


def test_a_loss_factor_is_divided_out():
    model = make_model()
    with monitored(model, loss_scaling="microbatch_mean") as monitor:
        for seed in (0, 1):
            backward(model, seed, parts=5)
        monitor.loss_factor = 1 / 5
        moments = monitor.step()
    wanted = right((0, 1))
    assert (moments.trace_cov, moments.grad_sq_norm) == pytest.approx((wanted.trace_cov, wanted.grad_sq_norm), rel=1e-5)


def past_the_wrapper(rank):
    ddp = DistributedDataParallel(make_model())
    with monitored(ddp) as monitor:
        for seed in (0, 1):
            backward(ddp.module, seed + 2 * rank)
        monitor.step()


def test_a_forward_past_ddp_is_refused():
    with pytest.raises(WorkerError, match="call the wrapped model"):
        on_workers(2, past_the_wrapper)


def with_a_sink_that_raises(rank):
    def sink(_):
        raise OSError("disk full")

    ddp = DistributedDataParallel(make_model())
    found = []
    with monitored(ddp, every=3, on_measured=[sink]) as monitor:
        for step in range(7):
            ddp.zero_grad()
            backward(ddp, rank + 2 * step, parts=1)
            measuring = monitor.measuring
            try:
                monitor.step()
            except OSError:
                assert rank == 0
            found.append(measuring)
        return found, monitor.noise_scale


def test_a_sink_that_raises_on_rank_zero_does_not_part_the_workers():
    first, second = on_workers(2, with_a_sink_that_raises)
    assert first == second
    assert first[0] == [True, False, False, True, False, False, True]


def given_up_and_begun_again(rank):
    ddp = DistributedDataParallel(make_model())
    with monitored(ddp) as monitor:
        backward(ddp, 7, parts=1)
        ddp.zero_grad()
        for seed in (0, 1):
            backward(ddp, seed + 2 * rank)
        return monitor.step()


def test_a_ddp_step_that_begins_again_is_measured():
    wanted = right((0, 1, 2, 3))
    for moments in on_workers(2, given_up_and_begun_again):
        assert (moments.trace_cov, moments.grad_sq_norm) == pytest.approx(
            (wanted.trace_cov, wanted.grad_sq_norm), rel=1e-4
        )


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("every",), 0), (("num_steps",), -1), (("ledger", "total", "sum_w"), "abc"),
        (("ledger", "total", "sum_x"), [1.0]), (("ledger", "preconditioned", "differences"), float("nan")),
        (("ledger", "batches"), ["x"]), (("ledger", "total", "last"), None),
    ],
)  # fmt: skip
def test_a_broken_state_is_refused_and_nothing_of_it_is_taken(where, value):
    model = make_model()
    with monitored(model) as monitor:
        for seed in range(4):
            backward(model, seed)
            if seed % 2:
                monitor.step()
                model.zero_grad()
        kept = monitor.state_dict()
        broken = copy.deepcopy(kept)
        broken["ledger"]["total"]["sum_w2"] = 99.0
        *path, last = where
        part = broken
        for name in path:
            part = part[name]
        part[last] = value
        with pytest.raises(CheckpointError):
            monitor.load_state_dict(broken)
        assert monitor.state_dict() == kept
