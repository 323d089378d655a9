"""A task of your own: `largebatch study examples/own_task.py` finds the batch size that is worth it.

Change three things: the data, the model, and the recipe that your baseline was tuned with.
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import largebatch as lb

features, classes = load_breast_cancer(return_X_y=True)  # 569 tumours, 30 measurements, benign or not
inputs, labels = torch.from_numpy(features).float(), torch.from_numpy(classes).long()
held_out = torch.arange(len(labels)) % 4 == 0
mean, std = inputs[~held_out].mean(dim=0), inputs[~held_out].std(dim=0)
inputs = (inputs - mean) / std


def make_model() -> nn.Module:
    """Fresh weights: called once a run, under the run's seed."""
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The SUM over the batch, never the mean: parts of a batch then add up."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="sum")


task = lb.Task(
    name="breast-cancer",
    train=lb.TensorSplit((inputs[~held_out], labels[~held_out])),
    held_out=lb.TensorSplit((inputs[held_out], labels[held_out])),
    model=make_model,
    loss=loss,
    errors=lb.count_wrong,
    recipe=lb.Recipe(reference_batch=8, reference_lr=0.01, epochs=20, warmup_epochs=5, decay_epochs=(12, 16)),
)
