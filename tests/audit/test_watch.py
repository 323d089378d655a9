"""Does a watched loop show what is wrong in it, and is it the same loop, bit for bit?"""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from largebatch.audit.watch import watch
from largebatch.errors import ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor

ACCUMULATION = 2


def data(num=32):
    rows = torch.randn(num, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(rows, (rows.sum(1) > 0).long())


class Loop:
    """A sane loop on real steps, and what can be wrong in it."""

    def __init__(self, fault="", *, num=32, scaler=None, compiled=False):
        torch.manual_seed(0)
        self.fault, self.scaler = fault, scaler
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
        self.model = torch.compile(net, backend="aot_eager") if compiled else net
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.monitor = NoiseScaleMonitor(self.model, microbatch=4, every=1, grad_scaler=scaler)
        self.sampler = DistributedSampler(data(num), num_replicas=1, rank=0)
        self.loader = DataLoader(data(num), batch_size=4, sampler=self.sampler)

    def loss(self, inputs, labels):
        if self.fault == "LB403":  # microbatches of 4 and 2, the mean of each
            keep = 2 if self.microbatch % 2 else 4
            inputs, labels = inputs[:keep], labels[:keep]
        loss = F.cross_entropy(self.model(inputs), labels)
        return loss if self.fault == "LB405" else loss / ACCUMULATION

    def evaluate(self):
        if self.fault != "LB203":
            self.model.eval()
        with torch.no_grad():
            self.model(data()[:8][0])
        self.model.train()

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    def run(self, epochs=2):
        for epoch in range(epochs):
            if self.fault != "LB301":
                self.sampler.set_epoch(epoch)
            for number, (inputs, labels) in enumerate(self.loader):
                self.microbatch = number
                loss = self.loss(inputs, labels)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                if self.microbatch % ACCUMULATION == ACCUMULATION - 1:
                    self.step()
                elif self.fault == "LB407":
                    self.optimizer.step()
                if self.fault == "LB401":
                    self.scheduler.step()
            self.evaluate()
        return self

    def step(self):
        if self.fault == "LB406":
            self.clip()
        if self.fault not in ("LB406", "LB403", "LB407"):
            self.monitor.step()
        elif self.fault == "LB406":
            with pytest.raises(ConfigError, match="gradients were changed"):
                self.monitor.step()
        if self.scaler is None:
            self.clip()
            self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            self.clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self.fault != "LB401":
            self.scheduler.step()

    def watched(self, **options):
        options = {"dataloader": self.loader, "scheduler": self.scheduler, "accumulation": ACCUMULATION} | options
        return watch(self.model, self.optimizer, **options)

    def state(self):
        states = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        buffer = io.BytesIO()
        torch.save([*states, torch.get_rng_state(), str(self.monitor.noise_scale)], buffer)
        return buffer.getvalue()


def codes(watched):
    return [finding.code for finding in watched.findings]


def half_scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scaled", [False, True], ids=["float32", "with a GradScaler"])
def test_a_sane_loop_shows_nothing_and_stays_the_same_bit_for_bit(scaled, compiled):
    make_scaler = half_scaler if scaled else lambda: None
    plain = Loop(scaler=make_scaler(), compiled=compiled).run()
    loop = Loop(scaler=make_scaler(), compiled=compiled)
    with loop.watched() as watched:
        loop.run()
    assert codes(watched) == [] and watched.unread == ()
    assert (watched.num_backwards, watched.num_steps) == (16, 8)
    assert loop.state() == plain.state()


FAULTS = ["LB203", "LB301", "LB401", "LB403", "LB405", "LB406", "LB407"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_none_other_and_nothing_changes(fault):
    plain = Loop(fault).run()
    loop, told = Loop(fault), []
    with loop.watched(on_finding=told.append) as watched:
        loop.run()
    assert codes(watched) == [fault]
    assert [finding.code for finding in told] == [fault]
    assert loop.state() == plain.state()
    assert all(finding.about.fix in str(finding) for finding in watched.findings)


@pytest.mark.parametrize("fault", ["LB401", "LB403", "LB405", "LB406"])
def test_faults_are_found_under_a_gradient_scaler(fault):
    loop = Loop(fault, scaler=half_scaler())
    with loop.watched() as watched:
        loop.run()
    assert codes(watched) == [fault]


@pytest.mark.parametrize("fault", ["LB401", "LB405", "LB203"])
def test_faults_are_found_in_a_compiled_model(fault):
    loop = Loop(fault, compiled=True)
    with loop.watched() as watched:
        loop.run(1)
    assert codes(watched) == [fault]


def test_neither_optimizer_nor_scheduler_nor_loader_need_be_given():
    for fault in ("", "LB401", "LB405", "LB301"):
        loop = Loop(fault)
        with watch(loop.model) as watched:
            loop.run()
        assert codes(watched) == ([fault] if fault else [])


def test_findings_are_there_before_the_context_ends():
    loop = Loop("LB401")
    with loop.watched() as watched:
        loop.run(1)
        assert codes(watched) == ["LB401"]


def test_a_step_that_the_scaler_skips_is_a_step_and_no_second_schedule_step():
    loop = Loop(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127))
    loop.monitor.close()
    loop.monitor.step = lambda: None
    loss, taken = loop.loss, []
    loop.loss = lambda inputs, labels: 1000 * loss(inputs, labels)  # beyond float32 until the scale has halved often
    loop.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    with loop.watched() as watched:
        loop.run()
    assert codes(watched) == [] and watched.num_steps == 8 and len(taken) < 4


def test_an_accumulation_that_was_asked_for_and_never_happens_is_found():
    loop = Loop()
    with loop.watched(accumulation=4) as watched:
        for inputs, labels in loop.loader:
            F.cross_entropy(loop.model(inputs), labels).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert codes(watched) == ["LB407"]
    assert "accumulation is 4" in watched.findings[0].seen


def test_two_optimizers_that_take_turns_on_one_model_are_no_fault():
    # As in a GAN: the second one's backward leaves gradients that the first one zeroes before its own.
    torch.manual_seed(0)
    critic, maker = nn.Linear(2, 1), nn.Linear(2, 2)
    first = torch.optim.SGD(critic.parameters(), lr=0.1)
    second = torch.optim.SGD(maker.parameters(), lr=0.1)
    with watch(critic, first) as watched:
        for _ in range(3):
            first.zero_grad()
            critic(maker(torch.randn(4, 2)).detach()).mean().backward()
            first.step()
            second.zero_grad()
            critic(maker(torch.randn(4, 2))).mean().backward()
            second.step()
    assert codes(watched) == []


def test_dropout_alone_and_recomputed_statistics_and_checkpointing_and_a_teacher_are_no_evaluation():
    from torch.optim.swa_utils import update_bn
    from torch.utils.checkpoint import checkpoint

    loop = Loop()
    teacher = copy.deepcopy(loop.model).requires_grad_(False)
    both = nn.ModuleDict({"student": loop.model, "teacher": teacher})
    with watch(both, loop.optimizer) as watched:
        inputs = data()[:8][0]
        update_bn([inputs], loop.model)
        loop.model.train()
        with torch.no_grad():
            teacher(inputs)
        checkpoint(loop.model, inputs.clone().requires_grad_(), use_reentrant=True).sum().backward()
        loop.model.eval()
        loop.model[3].train()
        with torch.no_grad():
            loop.model(inputs)
    assert codes(watched) == []


def test_a_first_look_at_a_batch_is_no_epoch():
    loop = Loop()
    with loop.watched() as watched:
        next(iter(loop.loader))
        loop.run(1)
    assert codes(watched) == []


def test_a_pass_without_a_backward_is_no_epoch_either():
    loop = Loop()
    with loop.watched() as watched:
        loop.run(1)
        assert len(list(loop.loader)) == 8  # the same epoch once more: an evaluation on the training data, say
    assert codes(watched) == []


def test_a_watch_may_begin_in_the_middle_of_a_step():
    loop = Loop()
    loop.monitor.close()
    batches = list(loop.loader)
    (loop.loss(*batches[0])).backward()
    with loop.watched() as watched:
        for index, (inputs, labels) in enumerate(batches[1:6]):
            loop.loss(inputs, labels).backward()
            if index % 2 == 0:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                loop.scheduler.step()
    assert codes(watched) == [] and watched.num_steps == 3


def test_a_monitor_that_measures_what_a_scaler_has_unscaled_measures_nothing_clipped():
    for clips in (False, True):
        loop = Loop(scaler=half_scaler())
        with loop.watched(monitor=loop.monitor) as watched:
            for inputs, labels in list(loop.loader)[:2]:
                loop.scaler.scale(loop.loss(inputs, labels)).backward()
            loop.scaler.unscale_(loop.optimizer)
            if clips:  # by hand, where no function is called and no version counted
                for parameter in loop.model.parameters():
                    parameter.grad.data.mul_(0.5)
                with pytest.raises(ConfigError, match="gradients were changed"):
                    loop.monitor.step()
            else:
                loop.monitor.step()
            loop.scaler.step(loop.optimizer)
        assert codes(watched) == (["LB406"] if clips else [])


@pytest.mark.parametrize("total", [False, True], ids=["by its own mask", "by the step's total"])
def test_masked_sums_are_weighed_by_what_they_are_divided_by(total):
    loop = Loop()
    loop.monitor.close()
    masks = [torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])]
    with loop.watched() as watched:
        for (inputs, labels), mask in zip(loop.loader, masks, strict=False):
            each = F.cross_entropy(loop.model(inputs), labels, reduction="none") * mask
            (each.sum() / 6 if total else each.sum() / mask.sum() / 2).backward()
        loop.optimizer.step()
    assert codes(watched) == ([] if total else ["LB403"])
    if not total:
        assert "microbatches of 4, 2 units weigh 0.5 each" in watched.findings[0].seen


def test_a_reentrant_checkpoint_s_own_backward_is_no_microbatch():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.Sequential(first, last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, accumulation=2) as watched:
        for _ in range(3):
            for _ in range(2):
                (
                    last(checkpoint(first, torch.randn(4, 4, requires_grad=True), use_reentrant=True)).mean() / 2
                ).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert codes(watched) == [] and watched.num_backwards == 6 and watched.unread == ()


def test_samplers_draw_what_they_drew_whatever_they_are():
    for sampler in (
        BatchSampler(RandomSampler(range(20)), 4, drop_last=False),
        [[0, 1], [2, 3]],
    ):
        loader = DataLoader(data(), batch_sampler=sampler)
        torch.manual_seed(3)
        plain = [batch[0] for batch in loader]
        torch.manual_seed(3)
        model = nn.Linear(1, 1)
        torch.manual_seed(3)
        with watch(model, dataloader=loader):
            followed = [batch[0] for batch in loader]
        assert all(map(torch.equal, plain, followed))


def everything_that_is_wrapped():
    from torch.nn.modules import module
    from torch.optim import optimizer

    return [
        torch.autograd.backward, torch.optim.lr_scheduler.LRScheduler.step,
        torch.optim.lr_scheduler.ReduceLROnPlateau.step, torch.amp.GradScaler.scale, torch.amp.GradScaler.step,
        torch.amp.GradScaler.unscale_, nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_,
        nn.utils.clip_grad_value_, NoiseScaleMonitor.step, DistributedSampler.__iter__, BatchSampler.__iter__,
        len(module._global_forward_pre_hooks), len(module._global_forward_hooks),
        len(module._global_forward_hooks_always_called), len(optimizer._global_optimizer_post_hooks),
    ]  # fmt: skip


def test_a_sane_loop_gives_no_warning_that_it_does_not_give_unwatched():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loop().run()
        loop = Loop()
        with loop.watched():
            loop.run()


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_all_is_put_back_after_an_exception_and_the_next_watch_works(error):
    loop = Loop()
    before = everything_that_is_wrapped()
    with pytest.raises(error), loop.watched() as watched:
        assert everything_that_is_wrapped() != before
        loop.run(1)
        raise error
    assert everything_that_is_wrapped() == before
    assert watched.num_steps == 4 and codes(watched) == []
    with loop.watched() as watched:
        loop.run(1)
    assert watched.num_steps == 4
    assert everything_that_is_wrapped() == before


def test_one_watch_at_a_time_and_only_of_a_model():
    loop = Loop()
    with loop.watched() as watched:
        with pytest.raises(ConfigError, match="another watch is open"), loop.watched():
            pass
        loop.run(1)
    assert watched.num_steps == 4
    for bad in (
        {"model": 3}, {"optimizer": "sgd"}, {"accumulation": 0}, {"accumulation": True}, {"dataloader": 3},
        {"dataloader": "train"}, {"scheduler": 3}, {"scheduler": loop.optimizer}, {"group": 3}, {"monitor": 3},
        {"on_finding": 3},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="; got "), watch(**({"model": loop.model} | bad)):
            pass


def test_a_model_that_is_copied_or_pickled_meanwhile_carries_nothing_of_the_watch():
    loop = Loop()
    loop.monitor.close()
    with loop.watched():
        copied = copy.deepcopy(loop.model)
        pickle.dumps(loop.model)
        pickle.dumps(loop.scheduler.state_dict())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in copied.modules())
