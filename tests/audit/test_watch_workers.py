"""Do real workers, with DistributedDataParallel, show together what none of them can see alone?"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset, TensorDataset

from largebatch.audit.watch import watch
from workers import on_workers

ROWS = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


def make_loader(fault, rank, world_size):
    num = 63 if fault == "LB303" else 64
    data = TensorDataset(ROWS[:num], torch.arange(num))
    if fault == "LB302":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(rank))
    elif fault == "own parts":
        data = Subset(data, range(rank, 64, world_size))
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(rank))
    else:
        sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    return DataLoader(data, batch_size=4, sampler=sampler)


def loss_of(model, inputs, fault, rank, accumulation):
    if fault in ("LB404", "total"):
        inputs = inputs[: 4 - rank]
    loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True), reduction="sum" if fault == "total" else "mean")
    if fault == "total":  # Goyal 2017, remark 3: by the units of all workers, which DDP's average divides once more
        return loss / torch.tensor(accumulation * 7.0) * 2
    return loss / accumulation


def train(rank, fault, watched_too=True, accumulation=2):
    """Two epochs; the codes found, and the weights."""
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = make_loader(fault, rank, world_size)

    def loop():
        for epoch in range(2):
            if fault != "LB301" and isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            for index, (inputs, _) in enumerate(loader):
                last = index % accumulation == accumulation - 1
                model.require_backward_grad_sync = last  # what no_sync() sets
                loss_of(model, inputs, fault, rank, accumulation).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                    for _ in range(world_size if fault == "LB402" else 1):
                        scheduler.step()

    codes = []
    if watched_too:
        with watch(model, optimizer, loader, scheduler, accumulation=accumulation) as watched:
            loop()
        codes = [finding.code for finding in watched.findings]
    else:
        loop()
    return codes, [parameter.tolist() for parameter in model.parameters()], optimizer.param_groups[0]["lr"]


SANE = ("", "own parts", "total")
FAULTS = ("LB301", "LB302", "LB303", "LB402", "LB404")


def all_of_them(rank):
    return {fault: train(rank, fault) for fault in (*SANE, *FAULTS)}


@pytest.fixture(scope="module")
def two():
    return on_workers(2, all_of_them)


@pytest.mark.parametrize("fault", SANE)
def test_two_sane_workers_show_nothing(two, fault):
    assert [worker[fault][0] for worker in two] == [[], []]


@pytest.mark.parametrize("fault", FAULTS)
def test_two_workers_show_a_fault_and_none_other(two, fault):
    assert [worker[fault][0] for worker in two] == [[fault], [fault]]


def unwatched(rank):
    return {fault: train(rank, fault, watched_too=False) for fault in ("", "LB404")}


def test_watching_changes_no_bit_on_two_workers(two):
    for plain, watched in zip(on_workers(2, unwatched), two, strict=True):
        for fault in ("", "LB404"):
            assert plain[fault][1:] == watched[fault][1:]


def four_of_them(rank):
    return {fault: train(rank, fault, accumulation=1)[0] for fault in ("", "LB302", "LB303", "LB402")}


def test_four_workers_show_it_too():
    expected = {"": [], "LB302": ["LB302"], "LB303": ["LB303"], "LB402": ["LB402"]}
    assert on_workers(4, four_of_them) == [expected] * 4


def one_has_nothing(rank):
    # Worker 1 watches no step and draws nothing; both end, and agree that there is nothing between them.
    model = nn.Linear(4, 1)
    with watch(model) as watched:
        if rank == 0:
            model(ROWS[:4]).mean().backward()
    first = [finding.code for finding in watched.findings]
    with pytest.raises(ArithmeticError), watch(model):
        raise ArithmeticError
    return first


def test_a_worker_without_a_step_keeps_the_others_from_nothing():
    assert on_workers(2, one_has_nothing) == [[], []]


def with_accelerate(rank):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for, not used: the group is there already
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # what another test's Accelerator left in the process that was forked
    found = {}
    for prepared in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        loader = DataLoader(TensorDataset(ROWS), batch_size=4, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if prepared:
            scheduler = accelerator.prepare(scheduler)
        with watch(model, optimizer, loader, scheduler, accumulation=2) as watched:
            for _ in range(2):
                for (inputs,) in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(inputs).square().mean())
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        if prepared or accelerator.sync_gradients:
                            scheduler.step()
                        optimizer.zero_grad()
        found[prepared] = ([finding.code for finding in watched.findings], watched.num_steps, watched.unread)
    return found


def test_the_scheduler_that_accelerate_prepares_steps_once_a_process():
    for worker in on_workers(2, with_accelerate):
        assert worker == {False: ([], 8, ()), True: (["LB402"], 8, ())}


class LossInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(1, 1)

    def forward(self, inputs):
        outputs = self.used(inputs)
        return outputs, F.cross_entropy(outputs, torch.zeros(len(inputs), dtype=torch.long))


def with_the_loss_inside(rank):
    found = []
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        torch.manual_seed(0)
        model = DistributedDataParallel(LossInside(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer) as watched:
            for _ in range(3):
                model(ROWS[: 4 - rank])[1].backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(([finding.code for finding in watched.findings], watched.unread))
    return found


def test_a_loss_that_comes_out_of_a_wrapped_model_is_read():
    assert on_workers(2, with_the_loss_inside) == [[(["LB404"], ())] * 2] * 2
