"""The noise scale of a Lightning training: `python examples/lightning_callback.py --devices 2`."""

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from largebatch.integrations.lightning import NoiseScaleCallback

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=1)
devices = parser.parse_args().devices

pixels, labels = load_digits(return_X_y=True)  # 1,797 handwritten digits
data = TensorDataset(torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels).long())


class Digits(pl.LightningModule):
    """One hidden layer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


pl.seed_everything(0, verbose=False)
noise = NoiseScaleCallback(half_life=50)
trainer = pl.Trainer(
    max_epochs=3, callbacks=[noise], accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="cpu",
    devices=devices, strategy="ddp" if devices > 1 else "auto", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Digits(), DataLoader(data, batch_size=16, shuffle=True))
if trainer.is_global_zero:
    print(f"{trainer.global_step} optimizer steps, {noise.monitor.num_steps} counted")
    print(noise.monitor.noise_scale)
