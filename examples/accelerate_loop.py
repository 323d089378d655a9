"""The noise scale in an Accelerate loop: `torchrun --nproc-per-node 2 examples/accelerate_loop.py`."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from largebatch.integrations.accelerate import make_monitor

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
pixels, labels = load_digits(return_X_y=True)  # 1,797 handwritten digits
data = TensorDataset(torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels).long())
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))

monitor = make_monitor(accelerator, model, microbatch=16, half_life=50)  # 1. after prepare
num_steps = 0
for _ in range(3):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            with monitor.microbatch(len(inputs)):  # 2. only because the last batch of an epoch is smaller
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            if accelerator.sync_gradients:
                monitor.step()  # 3. after the last backward of a step, before clipping
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                num_steps += 1
            optimizer.step()
            optimizer.zero_grad()
accelerator.print(f"{num_steps} optimizer steps, {monitor.num_steps} counted")
accelerator.print(monitor.noise_scale)
accelerator.end_training()
