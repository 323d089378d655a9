"""Are several losses of one step told from several microbatches, whose losses are to be divided?"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from largebatch.audit.watch import watch

ROWS = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))


class Heads(nn.Module):
    """A trunk with two heads."""

    def __init__(self):
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs):
        hidden = self.trunk(inputs).relu()
        return self.first(hidden), self.second(hidden)


def codes(watched):
    return [finding.code for finding in watched.findings]


def make(kind):
    torch.manual_seed(0)
    model = kind()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def two_heads(model, rows, share=1.0, *, apart=False, kept=slice(None)):
    """A backward for each head; `kept` are the rows that the second one has labels for."""
    if apart:  # the heads are called on their own
        hidden = model.trunk(rows).relu()
        (share * model.first(hidden).square().mean()).backward(retain_graph=True)
        (share * model.second(hidden)[kept].square().mean()).backward()
        return
    first, second = model(rows)
    (share * first.square().mean()).backward(retain_graph=True)
    (share * second[kept].square().mean()).backward()


@pytest.mark.parametrize("kept", [slice(None), slice(2)], ids=["all labelled", "some labelled"])
@pytest.mark.parametrize("apart", [False, True], ids=["one forward", "heads called apart"])
def test_two_losses_of_one_forward_are_one_microbatch(apart, kept):
    model, optimizer = make(Heads)
    with watch(model, optimizer) as watched:
        for rows in ROWS.split(8):
            optimizer.zero_grad()
            two_heads(model, rows, apart=apart, kept=kept)
            optimizer.step()
    assert codes(watched) == [] and watched.unread == ()


@pytest.mark.parametrize("fault", ["", "LB403", "LB405"])
def test_two_microbatches_of_two_losses_each_are_two(fault):
    model, optimizer = make(Heads)
    with watch(model, optimizer, accumulation=2) as watched:
        for first, second in zip(ROWS[:24].split(8), ROWS[24:].split(8), strict=True):
            optimizer.zero_grad()
            for rows in (first, second[:5] if fault == "LB403" else second):
                two_heads(model, rows, 1.0 if fault == "LB405" else 0.5)
            optimizer.step()
    assert codes(watched) == ([fault] if fault else [])


def criticise(model, rows, label, share=1.0):
    labels = torch.full((len(rows), 1), label)
    (share * F.binary_cross_entropy_with_logits(model(rows), labels)).backward()


@pytest.mark.parametrize("num_fake", [8, 6])
@pytest.mark.parametrize("loaded", [False, True], ids=["no loader", "a loader"])
def test_a_discriminator_s_real_and_fake_batch_are_no_microbatches(loaded, num_fake):
    # Goodfellow 2014, algorithm 1: the discriminator ascends the sum of the two means.
    model, optimizer = make(lambda: nn.Linear(3, 1))
    loader = DataLoader(TensorDataset(ROWS), batch_sampler=_Batches(), num_workers=0)
    with watch(model, optimizer, loader if loaded else None) as watched:
        for (real,) in loader:
            optimizer.zero_grad()
            criticise(model, real, 1.0)
            criticise(model, torch.randn(num_fake, 3), 0.0)
            optimizer.step()
    assert codes(watched) == []
    assert loaded or "accumulation=" in watched.unread[0]


class _Batches:
    """Batches of 8 in a random order."""

    def __iter__(self):
        order = list(RandomSampler(ROWS))
        return iter([order[start : start + 8] for start in range(0, 48, 8)])

    def __len__(self):
        return 6


@pytest.mark.parametrize("fault", ["", "LB403", "LB405"])
def test_a_discriminator_that_accumulates_is_judged_by_draws(fault):
    model, optimizer = make(lambda: nn.Linear(3, 1))
    loader = DataLoader(TensorDataset(ROWS), batch_sampler=_Batches())
    with watch(model, optimizer, loader, accumulation=2) as watched:
        for number, (real,) in enumerate(loader):
            share = 1.0 if fault == "LB405" else 0.5
            criticise(model, real[:5] if fault == "LB403" and number % 2 else real, 1.0, share)
            criticise(model, torch.randn(6, 3), 0.0, share)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert codes(watched) == ([fault] if fault else [])


@pytest.mark.parametrize("retain", [False, True])
def test_draws_tell_microbatches_though_no_accumulation_is_given(retain):
    model, optimizer = make(lambda: nn.Linear(3, 1))
    loader = DataLoader(TensorDataset(ROWS), batch_sampler=_Batches())
    with watch(model, optimizer, loader) as watched:
        for number, (rows,) in enumerate(loader):
            model(rows).square().mean().backward(retain_graph=retain)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert codes(watched) == ["LB405"]


@pytest.mark.parametrize("swapped", [False, True], ids=["in order", "last first"])
@pytest.mark.parametrize("fault", ["", "LB403", "LB405"])
def test_microbatches_whose_forwards_all_come_first_are_as_many(fault, swapped):
    # forward, forward, backward, backward
    model, optimizer = make(Heads)
    with watch(model, optimizer, accumulation=2) as watched:
        for first, second in zip(ROWS[:24].split(8), ROWS[24:].split(8), strict=True):
            optimizer.zero_grad()
            parts = (first, second[:5] if fault == "LB403" else second)
            losses = [model(rows)[0].square().mean() for rows in parts]
            for loss in reversed(losses) if swapped else losses:
                (loss if fault == "LB405" else loss / 2).backward()
            optimizer.step()
    assert codes(watched) == ([fault] if fault else []) and watched.num_backwards == 6


@pytest.mark.parametrize("loaded", [False, True], ids=["no loader", "a loader"])
def test_a_discriminator_s_forwards_may_both_come_first(loaded):
    model, optimizer = make(lambda: nn.Linear(3, 1))
    loader = DataLoader(TensorDataset(ROWS), batch_sampler=_Batches())
    with watch(model, optimizer, loader if loaded else None) as watched:
        for (real,) in loader:
            optimizer.zero_grad()
            losses = [model(real).sigmoid().log().mean().neg(), model(torch.randn(6, 3)).mean()]
            for loss in losses:
                loss.backward()
            optimizer.step()
    assert codes(watched) == []
    assert loaded == (watched.unread == ())


def test_forwards_that_share_a_cast_of_autocast_are_several():
    # One autocast around all: the cast of a weight is made once, and is in the graph of every forward.
    model, optimizer = make(lambda: nn.Linear(3, 1))
    with watch(model, optimizer, accumulation=2) as watched:
        for rows in ROWS.split(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                for part in rows.split(4):
                    model(part).float().square().mean().backward()
            optimizer.step()
    assert codes(watched) == ["LB405"]


def test_a_loss_over_two_forwards_makes_them_one_microbatch():
    # As a contrastive loss between two views, beside a loss of each.
    model, optimizer = make(lambda: nn.Linear(3, 1))
    with watch(model, optimizer) as watched:
        for rows in ROWS.split(8):
            optimizer.zero_grad()
            first, second = model(rows), model(rows + 0.1)
            first.square().mean().backward(retain_graph=True)
            second[:4].square().mean().backward(retain_graph=True)
            (first - second).square().mean().backward()
            optimizer.step()
    assert codes(watched) == [] and watched.unread == ()


def test_an_optimizer_that_steps_after_every_microbatch_of_two_losses_is_found():
    model, optimizer = make(Heads)
    with watch(model, optimizer, accumulation=2) as watched:
        for rows in ROWS.split(8):
            optimizer.zero_grad()
            two_heads(model, rows, 0.5)
            optimizer.step()
    assert codes(watched) == ["LB407"]


def test_a_model_whose_forwards_are_not_seen_has_one_for_each_backward():
    model, optimizer = make(lambda: nn.Linear(3, 1))
    with watch(model, optimizer, accumulation=2) as watched:
        for rows in ROWS.split(8):
            for part in rows.split(4):
                F.linear(part, model.weight, model.bias).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert codes(watched) == ["LB405"]
