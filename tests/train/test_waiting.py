"""Is the share that a worker waits for gradients the one of a clock set by hand?"""

import types

import pytest
import torch
from torch import nn

from largebatch.train import progress
from largebatch.train.progress import Waiting


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands where the test puts it."""
    moments = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: moments.now))
    return moments


def make():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)  # bears no hook
    return model


def step(clock, model, optimizer, gradients_at, optimizer_at):
    """A microbatch for each moment in `gradients_at`, then the optimizer."""
    for moment in gradients_at:
        clock.now = moment
        model(torch.ones(1, 2)).sum().backward()
    clock.now = optimizer_at
    optimizer.step()


def test_the_share_is_from_the_last_gradient_to_the_optimizer_without_the_first_step(clock):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Waiting() as waiting:
        assert waiting.watch(model) is model
        step(clock, model, optimizer, [1.0], 5.0)  # opens connections
        assert waiting.share is None
        step(clock, model, optimizer, [6.0, 8.0], 9.0)  # two microbatches; waits 1 s
        step(clock, model, optimizer, [12.0], 15.0)  # waits 3 s
        clock.now = 20.0
        optimizer.step()  # of no new gradient
    assert waiting.share == (1 + 3) / (15 - 5)


def test_an_optimizer_whose_gradients_are_not_watched_says_nothing(clock):
    model, other = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Waiting() as waiting:
        waiting.watch(other)
        for second in range(3):
            step(clock, model, optimizer, [2.0 * second], 2.0 * second + 1)
    assert waiting.share is None


def test_after_the_run_no_optimizer_is_watched(clock):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Waiting() as waiting:
        waiting.watch(model)
        step(clock, model, optimizer, [1.0], 2.0)
    step(clock, model, optimizer, [3.0], 4.0)
    assert waiting.share is None
