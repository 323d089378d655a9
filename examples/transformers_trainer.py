"""The noise scale of a GPT-2 in a Hugging Face Trainer, on real text: `python examples/transformers_trainer.py`."""

import os
from pydoc_data.topics import topics  # the Python reference: real text that every Python has
from tempfile import TemporaryDirectory

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from largebatch.integrations.transformers import NoiseScaleMixin

paragraphs = [text for topic in topics.values() for text in topic.split("\n\n") if len(text) > 40]
tokenizer = ByteLevelBPETokenizer()
tokenizer.train_from_iterator(paragraphs, vocab_size=512, show_progress=False)
rows = [tokens.ids[:64] for tokens in tokenizer.encode_batch(paragraphs)]


def collate(rows):
    """Rows of uneven length, padded; padding carries no label."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": ids}


class MyTrainer(NoiseScaleMixin, Trainer):
    """The Trainer, measuring."""


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=512, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
with TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=60, learning_rate=1e-3,
        logging_steps=20, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = MyTrainer(
        model=model, args=settings, train_dataset=rows, data_collator=collate, monitor_options={"half_life": 20}
    )
    trainer.train()
print(f"{trainer.state.global_step} optimizer steps, {trainer.monitor.num_steps} counted")
print(trainer.monitor.noise_scale)
