"""What is wrong with my training? `largebatch audit examples/audit_my_task.py` looks at it, and at 8 of its batches.

Put your own model, optimizer, loader, scheduler and step into `setup`. This one has three mistakes: the scheduler steps
once a microbatch, the loss is not divided by the accumulation, and the batch norm's parameters decay. (Biases decay
too, which is a note.)
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION = 2


def setup():
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)  # 1,797 handwritten digits
    data = TensorDataset(torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels).long())
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    num_seen = 0

    def step(batch):
        nonlocal num_seen
        inputs, targets = batch
        nn.functional.cross_entropy(model(inputs), targets).backward()
        num_seen += 1
        if num_seen % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()

    return {
        "model": model, "optimizer": optimizer, "dataloader": loader, "scheduler": scheduler, "step": step,
        "accumulation": ACCUMULATION, "reference_batch": 16, "reference_lr": 0.05,
    }  # fmt: skip
