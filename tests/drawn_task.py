"""A user's task file for tests: linear regression on data drawn at random (see oracles/drawn_front.py)."""

from pathlib import Path

import numpy as np

SOURCE = '''"""Linear regression on the numbers in data.npz."""
from pathlib import Path

import numpy as np
import torch
from torch import nn

import largebatch as lb

numbers = np.load(Path(__file__).with_name("data.npz"))
inputs, targets = (torch.from_numpy(numbers[name]).float() for name in ("inputs", "targets"))
held_out = len(inputs) // 8


def loss(model, batch):
    x, y = batch
    return 0.5 * (model(x).squeeze(-1) - y).square().sum()


def make_model():
    model = nn.Linear(inputs.shape[1], 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


task = lb.Task(
    name="drawn",
    train=lb.TensorSplit((inputs, targets)),
    held_out=lb.TensorSplit((inputs[:held_out], targets[:held_out])),
    model=make_model,
    loss=loss,
    errors=loss,
    recipe=lb.Recipe(
        reference_batch={batch}, reference_lr={lr}, epochs={epochs}, warmup_epochs=1.0, momentum=0.0, nesterov=False,
        weight_decay=0.0,
    ),
    goals={goals},
    num_goal_examples=len(inputs),
)
'''


def write_task(folder: Path, inputs, targets, *, batch=16, lr=0.02, epochs=6, goals=None) -> Path:
    """Write the task file and its data; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "data.npz", inputs=inputs, targets=targets)
    path = folder / "drawn.py"
    text = SOURCE
    for name, value in {"batch": batch, "lr": lr, "epochs": epochs, "goals": goals}.items():
        text = text.replace("{" + name + "}", repr(value))
    path.write_text(text)
    return path
