"""Does a watch see what is unusual in a loop: sparse gradients, huge data sets, schedulers of schedulers?"""

from __future__ import annotations

import contextlib
import warnings

import pytest
import timm.scheduler
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from largebatch.audit.watch import watch
from largebatch.errors import ConfigError


def codes(watched):
    return [finding.code for finding in watched.findings]


def make_scheduler(kind, optimizer):
    if kind == "sequence":
        inner = [lr_scheduler.LinearLR(optimizer), lr_scheduler.StepLR(optimizer, 3)]
        return lr_scheduler.SequentialLR(optimizer, inner, milestones=[2])
    if kind == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer)
    if kind == "chain":
        return lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(optimizer), lr_scheduler.StepLR(optimizer, 3)])
    if kind == "swa":
        return torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1)
    return timm.scheduler.CosineLRScheduler(optimizer, t_initial=9, t_in_epochs=False)


def test_a_model_without_values_is_refused():
    with pytest.raises(ConfigError, match="meta device"), watch(nn.Linear(2, 1, device="meta")):
        pass


def test_sparse_gradients_are_read_by_their_values():
    # Embedding(sparse=True): a gradient that has no storage of its own
    for fault in ("", "LB405", "LB407"):
        torch.manual_seed(0)
        model = nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer, accumulation=2) as watched:
            for rows in torch.arange(24).remainder(6).split(8):
                for part in rows.split(4):
                    (model(part).square().mean() / (1 if fault == "LB405" else 2)).backward()
                optimizer.step()
                if fault != "LB407":
                    optimizer.zero_grad()
        assert codes(watched) == ([fault] if fault else []) and watched.num_backwards == 6


class Numbered(TensorDataset):
    """As long as can be: nothing may walk through it."""

    def __len__(self):
        return 10**15

    def __getitem__(self, index):
        return self.tensors[0][index % 8]


class Indices:
    """The indices of a Subset, which are looked at one by one and only so far."""

    def __init__(self):
        self.num_looked_at = 0

    def __len__(self):
        return 10**15

    def __getitem__(self, index):
        self.num_looked_at += 1
        return index


def test_a_huge_data_set_is_not_walked_through():
    rows, indices = torch.randn(8, 3), Indices()
    for dataset in (Numbered(rows), torch.utils.data.Subset(Numbered(rows), indices)):
        model = nn.Linear(3, 1)
        loader = DataLoader(dataset, batch_size=2)
        with watch(model, dataloader=loader) as watched:
            for part, _ in zip(loader, range(3), strict=False):
                model(part).mean().backward()
        assert watched.num_backwards == 3
    assert indices.num_looked_at < 200


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["sequence", "plateau", "chain", "swa", "timm"])
def test_schedulers_of_schedulers_step_once(kind, given):
    for fault in (False, True):
        model = nn.Linear(3, 1)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        scheduler, num = make_scheduler(kind, optimizer), 0
        with watch(model, optimizer, None, scheduler if given else None, accumulation=2) as watched:
            for _ in range(4):
                for last in (False, True):
                    (model(torch.randn(4, 3)).mean() / 2).backward()
                    if last:
                        optimizer.step()
                        optimizer.zero_grad()
                    if not (last or fault):
                        continue
                    num += 1
                    if kind == "timm":
                        scheduler.step_update(num)
                        scheduler.step_update(num)  # told the same again: no step
                    else:
                        scheduler.step(*([1.0] if kind == "plateau" else []))
        is_seen = fault and (given or kind != "timm")  # timm's is of no kind of torch's: it is to be given
        assert codes(watched) == (["LB401"] if is_seen else [])


def test_a_warning_names_the_line_that_it_names_unwatched():
    # torch warns with stacklevel=2 of a schedule that steps first, and of step(epoch); one's own scheduler may too
    class Own(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch=None):
            if self.last_epoch >= 0:
                warnings.warn("mine", stacklevel=2)
            super().step(epoch)

    def given_by(watching, step):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3), Own(optimizer, 3)]
        open_watch = watch(nn.Linear(1, 1), optimizer) if watching else contextlib.nullcontext()
        with open_watch, warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            for scheduler in schedulers:
                step(scheduler)
        return [(str(one.message), one.filename, one.lineno) for one in given]

    for step in (lambda one: one.step(), lambda one: one.step(2)):
        given = given_by(True, step)
        assert given == given_by(False, step)
        assert any(filename == __file__ for _, filename, _ in given)


def test_a_backward_that_fails_leaves_the_next_one_to_be_seen():
    model = nn.Linear(2, 1)
    with watch(model) as watched:
        loss = model(torch.randn(3, 2)).mean()
        loss.backward()
        with pytest.raises(RuntimeError):
            loss.backward()
        model(torch.randn(3, 2)).mean().backward()
    assert watched.num_backwards == 2
