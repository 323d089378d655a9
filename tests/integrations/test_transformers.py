"""Does a Hugging Face Trainer measure what a plain loop over the same text does, clipping or not?"""

from __future__ import annotations

import os
from functools import partial
from pydoc_data.topics import topics

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from integrations.plain_loop import assert_same, plain_loop
from largebatch.errors import ConfigError
from largebatch.integrations.transformers import NoiseScaleMixin
from largebatch.integrations.transformers_callback import NoiseScaleCallback
from largebatch.noise.monitor import NoiseScaleMonitor
from workers import on_workers

pytestmark = pytest.mark.xdist_group("transformers")

LR, CLIP, PAD, MASKED = 0.5, 0.02, 256, 255
TEXT = [line.strip() for line in topics["assert"].splitlines() if line.strip()][:22]
"""Real sentences, of 11 to 70 characters: the Python reference on the assert statement."""


def collate(rows):
    """Bytes, padded on the right, padding without labels; a row that begins with MASKED has none."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    labels = torch.where(ids[:, :1] == MASKED, PAD, ids)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels.masked_fill(labels == PAD, -100)}


def data():
    return [list(line.encode()) for line in TEXT]


def make_model(lora=False):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=257, bos_token_id=0, eos_token_id=0, n_positions=80, n_embd=16, n_layer=1, n_head=2,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return get_peft_model(model, config)


class Recording(NoiseScaleMixin, Trainer):
    """Keeps what it was given, and what was measured."""

    def __init__(self, *args, **kwargs):
        self.seen, self.measured = [[]], []
        options = {"every": 1, "on_measured": [lambda step: self.measured.append(step.moments)]}
        super().__init__(*args, monitor_options=options | kwargs.pop("monitor_options", {}), **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen[-1].append({name: tensor.clone() for name, tensor in inputs.items()})
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self.seen.append([])
        return loss


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


class InOrder(Recording):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(
    model, folder, *, cls=Recording, rows=None, shuffle=True, resume=None, stop_after=None, callbacks=(),
    monitor_options=None, **changes,
):  # fmt: skip
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_grad_norm": CLIP, "max_steps": 6,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    } | changes  # fmt: skip
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    callbacks = [*callbacks, Stop(stop_after)] if stop_after else list(callbacks)
    trainer = (cls if shuffle else InOrder)(
        model=model, args=TrainingArguments(str(folder), **settings), train_dataset=rows or data(),
        data_collator=collate, optimizers=(optimizer, schedule), callbacks=callbacks,
        **({"monitor_options": monitor_options} if monitor_options else {}),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def mean_loss(model, part, first=0):
    """What the Trainer makes of a row: predictions from its second token on, over the labels from `first` on."""
    logits = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits[:, :-1]
    labels = part["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum") / (
        counted(part, first)
    )


def counted(part, first=0):
    return int((part["labels"][:, first:] != -100).sum())


def alike(part, step):
    return 1 / len(step)


def expected(model, steps, weight_of=None, first=0, loss_of=None):
    size_of = partial(counted, first=first)
    return plain_loop(
        model, [step for step in steps if step], loss_of=loss_of or partial(mean_loss, first=first), size_of=size_of,
        weight_of=weight_of or (lambda part, step: size_of(part) / sum(map(size_of, step))), lr=LR, clip=CLIP,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lora", "first"),
    [(False, 0), (False, 1), (True, 0)],
    ids=["plain", "the first label of a row not counted", "LoRA"],
)
def test_moments_are_the_plain_loop_s_though_the_trainer_clips(lora, first, tmp_path):
    model, plain = make_model(lora), make_model(lora)
    if first:
        model.loss_type = "ForCausalLM"
    trainer = train(model, tmp_path)
    sizes = [len(step) for step in trainer.seen if step]
    assert sizes == [3, 3, 3, 2, 3, 3]  # 22 rows make 11 microbatches an epoch
    assert len({counted(part) for step in trainer.seen for part in step}) > 5
    assert_same(trainer.measured, expected(plain, trainer.seen, first=first))
    assert trainer.monitor.num_steps == trainer.state.global_step == trainer.lr_scheduler.last_epoch == 6
    assert trainer.monitor.noise_scale.unit == "tokens"
    assert all(entry["grad_norm"] > CLIP for entry in trainer.state.log_history if "grad_norm" in entry)


def test_a_model_that_does_not_take_the_step_s_count_weighs_its_microbatches_alike(tmp_path):
    model = make_model()
    model.accepts_loss_kwargs = False
    trainer = train(model, tmp_path)
    own_mean = partial(mean_loss, first=1)
    assert_same(trainer.measured, expected(make_model(), trainer.seen, alike, loss_of=own_mean))


def worker(rank, folder, average):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for, not used: the group is there already
    for state in (PartialState, AcceleratorState, GradientState):
        state._reset_state()  # what the parent's Trainers left
    trainer = train(
        make_model(), folder, average_tokens_across_devices=average, per_device_train_batch_size=1, max_steps=4
    )
    seen = [[{name: t.tolist() for name, t in part.items()} for part in step] for step in trainer.seen if step]
    return seen, trainer.measured, trainer.monitor.num_steps, trainer.state.global_step, trainer.lr_scheduler.last_epoch


@pytest.mark.parametrize("average", [True, False])
def test_two_processes_measure_one_step_together_and_count_it_once(average, tmp_path):
    def weight_of(part, step):
        half = len(step) // 2
        mine = step[:half] if any(part is one for one in step[:half]) else step[half:]
        return counted(part) / sum(map(counted, step)) if average else counted(part) / sum(map(counted, mine)) / 2

    results = on_workers(2, worker, str(tmp_path), average)
    steps = [
        [{name: torch.tensor(rows) for name, rows in part.items()} for part in first + second]
        for first, second in zip(results[0][0], results[1][0], strict=True)
    ]
    assert_same(results[0][1], expected(make_model(), steps, weight_of))
    for _, _, *counts in results:
        assert counts == [4, 4, 4]
    assert results[1][1] == []  # one process logs


class Norms(TrainerCallback):
    """What a callback sees before the optimizer steps: the norm of the gradients."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        self.seen.append(float(torch.cat(grads).norm()))


def test_a_callback_sees_the_clip_where_the_mixin_sees_the_gradient(tmp_path):
    callback = Norms()
    trainer = train(make_model(), tmp_path, max_grad_norm=1.0, max_steps=2, callbacks=[callback])
    assert callback.seen == pytest.approx([1.0] * 2, abs=1e-5)
    true = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [m.sq_norm_step**0.5 for m in trainer.measured] == pytest.approx(true, rel=1e-5)
    assert min(true) > 1.02


class Unguarded(NoiseScaleCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.monitor = NoiseScaleMonitor(kwargs["model"], **self._options)


def test_a_callback_that_measured_after_clipping_would_find_out(tmp_path):
    with pytest.raises(ConfigError, match="gradients were changed"):
        train(make_model(), tmp_path, cls=Trainer, callbacks=[Unguarded(microbatch=2)])


@pytest.mark.parametrize(
    ("changes", "why"),
    [({}, r"after clipping \(max_grad_norm=0.02\)"), ({"max_grad_norm": 0.0}, "dataloader_drop_last")],
)
def test_a_plain_callback_refuses_what_it_would_measure_wrongly(changes, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        train(make_model(), tmp_path, cls=Trainer, callbacks=[NoiseScaleCallback(microbatch=2)], **changes)


def test_a_plain_callback_measures_without_clipping(tmp_path):
    measured = []
    callback = NoiseScaleCallback(microbatch=2, every=1, on_measured=[lambda step: measured.append(step.moments)])
    even = [
        row[:11] for row in data()[:-1]
    ]  # an epoch is 10 microbatches of 2 x 11 labels, 3 3 3 1; a row is left over
    settings = {"max_grad_norm": 0.0, "dataloader_drop_last": True, "rows": even, "max_steps": 6}
    plain = train(make_model(), tmp_path, cls=Trainer, callbacks=[callback], **settings)
    mixin = train(make_model(), tmp_path, monitor_options={"unit": "sequences"}, **settings)
    assert callback.monitor.num_steps == plain.state.global_step == 6
    assert callback.monitor.num_skipped == 1  # the step with one microbatch
    for mine, other in zip(measured, mixin.measured, strict=True):
        assert mine.batch == other.batch / 11
        assert mine.grad_sq_norm == pytest.approx(other.grad_sq_norm, rel=1e-6)
        assert mine.trace_cov == pytest.approx(other.trace_cov / 11, rel=1e-6)


def test_a_run_from_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    whole = train(make_model(), tmp_path / "whole")
    train(make_model(), tmp_path / "halves", max_steps=6, save_strategy="steps", save_steps=3, stop_after=3)
    resumed = train(make_model(), tmp_path / "halves", resume=str(tmp_path / "halves" / "checkpoint-3"))
    assert len(resumed.measured) == 3
    assert resumed.monitor.num_steps == resumed.state.global_step == 6
    assert resumed.monitor.state_dict() == whole.monitor.state_dict()


def test_what_was_measured_is_in_the_trainer_s_log(tmp_path):
    trainer = train(make_model(), tmp_path, max_steps=12)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 12
    estimate = trainer.monitor.noise_scale
    assert logged[-1]["noise_scale_trace_cov"] == estimate.trace_cov
    assert estimate.resolved
    assert (logged[-1]["noise_scale_low"], logged[-1]["noise_scale_high"]) == estimate.interval
    assert logged[-1]["noise_scale"] == estimate.b_simple


def test_a_step_with_a_microbatch_without_labels_is_skipped(tmp_path):
    rows = [row if index not in (14, 15) else [MASKED, *row] for index, row in enumerate(data())]
    trainer = train(make_model(), tmp_path, rows=rows, shuffle=False, max_steps=3)
    assert (trainer.monitor.num_steps, trainer.monitor.num_skipped, len(trainer.measured)) == (3, 1, 2)
    assert_same(trainer.measured, expected(make_model(), trainer.seen[:2]))


def test_an_accumulation_that_the_data_s_end_cuts_in_two_is_refused(tmp_path):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data())

    with pytest.raises(ConfigError, match="ended inside an accumulation"):
        train(make_model(), tmp_path, rows=Endless(), max_steps=8)


class HalfPrecision(Recording):
    """A gradient scaler as fp16 has one, which a CPU has not; the Trainer then scales the loss by it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


@pytest.mark.parametrize("divided", [True, False], ids=["by the step's labels", "by the accumulation"])
def test_a_loss_scale_is_divided_out(divided, tmp_path):
    models = make_model(), make_model()
    for model in models:
        model.accepts_loss_kwargs = divided
    plain, scaled = (
        train(model, tmp_path, cls=cls, max_steps=1)
        for model, cls in zip(models, (Recording, HalfPrecision), strict=True)
    )
    assert scaled.accelerator.scaler.get_scale() == 1024
    assert scaled.measured[0].trace_cov == pytest.approx(plain.measured[0].trace_cov, rel=1e-6)
    assert scaled.measured[0].grad_sq_norm == pytest.approx(plain.measured[0].grad_sq_norm, rel=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant, tmp_path):
    plain = train(make_model(), tmp_path, max_steps=3)
    again = train(
        make_model(), tmp_path, max_steps=3, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )  # fmt: skip
    for mine, other in zip(again.measured, plain.measured[-len(again.measured) :], strict=True):
        assert mine.trace_cov == pytest.approx(other.trace_cov, rel=1e-5)
        assert mine.grad_sq_norm == pytest.approx(other.grad_sq_norm, rel=1e-5)
    assert again.monitor.num_steps == 3


def hooks(model):
    return sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_a_second_train_measures_anew_and_neither_leaves_a_hook(tmp_path):
    model = make_model()
    trainer = train(model, tmp_path, monitor_options={"every": 4}, max_steps=2)
    first, estimate = trainer.monitor, trainer.monitor.noise_scale
    assert hooks(model) == 0
    trainer.measured.clear()
    trainer.seen = [[]]
    trainer.train()
    assert trainer.monitor is not first
    assert (hooks(model), first.num_steps, trainer.monitor.num_steps) == (0, 2, 2)
    assert str(first.noise_scale) == str(estimate)
    assert trainer.measured[0].batch == sum(map(counted, trainer.seen[0]))


def test_a_train_that_fails_leaves_no_hook(tmp_path):
    class Failing(TrainerCallback):
        def on_substep_end(self, *_, **__):
            raise ArithmeticError

    model = make_model()
    with pytest.raises(ArithmeticError):
        train(model, tmp_path, callbacks=[Failing()])
    assert hooks(model) == 0
