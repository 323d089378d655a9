"""Does a loop with Accelerate measure what a plain loop over the same batches does, in one process and in two?"""

from __future__ import annotations

import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from integrations.plain_loop import assert_same, plain_loop
from largebatch.integrations.accelerate import make_monitor
from workers import on_workers

pytestmark = pytest.mark.xdist_group("transformers")

LR, CLIP, ACCUMULATION = 0.3, 0.1, 3


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model, rows):
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


def begin(**settings):
    for state in (PartialState, AcceleratorState, GradientState):
        state._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, **settings)


def train(accelerator, num=30, epochs=1, scaler=None, folder=None, resume=None):
    model, data = make_model(), torch.randn(num, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(data), batch_size=4), schedule
    )
    accelerator.scaler = scaler
    measured, seen, num_steps = [], [[]], 0
    monitor = make_monitor(accelerator, model, microbatch=4, every=1)
    if resume is not None:
        accelerator.load_state(resume)
    for _ in range(epochs):
        for (rows,) in loader:
            with accelerator.accumulate(model):
                seen[-1].append(rows.tolist())
                with monitor.microbatch(len(rows)):
                    accelerator.backward(loss_of(model, rows))
                if accelerator.sync_gradients:
                    measured.append(monitor.step())
                    if scaler is not None:
                        scaler.unscale_(optimizer.optimizer)
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    seen.append([])
                    num_steps += 1
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if scaler is not None and accelerator.sync_gradients:
                    scaler.update()
    if folder is not None:
        accelerator.save_state(folder)
    return seen[:-1], measured, monitor.num_steps, num_steps, monitor.state_dict()


def expected(steps, world_size):
    tensors = [[torch.tensor(part) for part in step] for step in steps]
    return plain_loop(
        make_model(), tensors, loss_of=loss_of, size_of=len,
        weight_of=lambda part, step: 1 / (ACCUMULATION * world_size), lr=LR, clip=CLIP,
    )  # fmt: skip


@pytest.mark.parametrize("scaled", [False, True], ids=["float32", "with a GradScaler"])
def test_moments_are_the_plain_loop_s_for_uneven_batches_and_a_short_last_step(scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    seen, measured, counted, num_steps, _ = train(begin(), scaler=scaler)
    assert [list(map(len, step)) for step in seen] == [[4, 4, 4], [4, 4, 4], [4, 2]]
    assert_same(measured, expected(seen, 1))
    assert counted == num_steps == 3


def worker(rank):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for, not used: the group is there already
    return train(begin(), num=40)[:4]


def test_two_processes_measure_one_step_together_and_count_it_once():
    first, second = on_workers(2, worker)
    steps = [one + two for one, two in zip(first[0], second[0], strict=True)]
    assert [len(step) for step in steps] == [6, 4]  # each process has 5 batches
    assert_same(first[1], expected(steps, 2))
    assert first[1] == second[1]
    assert first[2:] == second[2:] == (2, 2)


def test_an_epoch_s_last_step_with_one_microbatch_is_skipped():
    seen, measured, counted, num_steps, _ = train(begin(), num=16)
    assert [len(step) for step in seen] == [3, 1]
    assert [moments is None for moments in measured] == [False, True]
    assert counted == num_steps == 2


def test_the_state_is_in_what_accelerate_saves(tmp_path):
    train(begin(), folder=tmp_path / "state")
    resumed = train(begin(), resume=tmp_path / "state")
    whole = train(begin(), epochs=2)
    assert resumed[2] == 6
    assert resumed[4] == whole[4]


def test_examples_of_their_own_need_no_microbatch():
    accelerator = begin()
    model = accelerator.prepare(make_model())
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    monitor = make_monitor(accelerator, model, per_example=True)
    for part in rows.split(4):
        accelerator.backward(loss_of(model, part))
    found = plain_loop(
        make_model(),
        [rows.split(1)],
        loss_of=loss_of,
        size_of=len,
        weight_of=lambda row, step: 1 / 12,
        lr=LR,
        clip=CLIP,
    )
    assert_same([monitor.step()], found)
