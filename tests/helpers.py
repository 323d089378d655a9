"""Small tasks that tests train, with answers known in closed form."""

import torch
from torch import nn

from largebatch.recipe.recipe import Recipe
from largebatch.tasks.task import Task, TensorSplit


def linear_task(num_examples=256, dim=4, sigma=0.5, dropout=0.0, augment=None, **recipe) -> Task:
    """Linear regression y = w.x + noise with loss (1/2)(w.x - y)^2, in float32."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(num_examples + 64, dim, generator=generator)
    targets = inputs @ torch.ones(dim) + sigma * torch.randn(num_examples + 64, generator=generator)

    def loss(model, batch):
        x, y = batch
        return 0.5 * (model(x).squeeze(-1) - y).square().sum()

    def make():
        layers = [nn.Dropout(dropout)] if dropout else []
        return nn.Sequential(*layers, nn.Linear(dim, 1, bias=False))

    settings = {"reference_batch": 8, "reference_lr": 0.05, "epochs": 6, "warmup_epochs": 2.0, "momentum": 0.0,
                "nesterov": False, "weight_decay": 0.0} | recipe  # fmt: skip
    return Task(
        name="linear", train=TensorSplit((inputs[:num_examples], targets[:num_examples])),
        held_out=TensorSplit((inputs[num_examples:], targets[num_examples:])), model=make, loss=loss,
        errors=loss, recipe=Recipe(**settings), augment=augment, num_goal_examples=128,
    )  # fmt: skip
