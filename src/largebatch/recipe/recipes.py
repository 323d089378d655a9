"""Which whole recipes are published?"""

from __future__ import annotations

from largebatch.recipe.recipe import Recipe


def goyal2017_resnet50() -> Recipe:
    """The recipe that trained ResNet-50 on ImageNet in one hour.

    Returns:
        Reference batch 256 at 0.1, 90 epochs, 5 of gradual warmup, a tenth after epochs 30, 60 and 80, batch norm
        over 32; shown up to a batch of 8192.

    >>> resolved = goyal2017_resnet50().resolve(8192, 1_281_167, world_size=256)
    >>> resolved.lr, resolved.warmup_steps, resolved.num_steps, resolved.batchnorm_n
    (3.2, 782, 14075, 32)

    Source: Goyal 2017, sec. 2.3, 5.1, Figure 1.
    """
    return Recipe(
        reference_batch=256,
        reference_lr=0.1,
        epochs=90,
        warmup="gradual",
        warmup_epochs=5.0,
        schedule="step",
        decay_epochs=(30.0, 60.0, 80.0),
        decay_factor=0.1,
        optimizer="sgd",
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        exclude_biases=False,
        scaling="linear",
        shown_up_to=8192,
        batchnorm_n=32,
    )
