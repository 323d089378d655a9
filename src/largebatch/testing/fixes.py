"""What is to be done about each cause for which updates part?"""

from __future__ import annotations

from largebatch.testing.report import Cause

_FIXES: dict[str, tuple[str, tuple[str, ...]]] = {
    "loss normalisation": (
        "sum the losses, divide by the examples of the whole step (kn), and multiply by world_size where gradients are "
        "averaged over workers (Goyal 2017, remark 3). A larger rate does not undo it: the weight decay stays "
        "(remark 1).",
        (),
    ),
    "loss over uneven parts": (
        "divide each part's summed loss by the total of the step, not by its own number of examples, and multiply by "
        "world_size where gradients are averaged over workers (Goyal 2017, remark 3).",
        ("LB404",),
    ),
    "batch norm": (
        "hold n fixed, whatever the number of workers: the loss is a function of n (Goyal 2017, eq. (5)-(7)). Compare "
        "with microbatch=n, a step that takes a list of microbatches and plain batch norm; or use ghost batch norm.",
        ("LB201",),
    ),
    "clipping": (
        "clip once, after the workers' gradients were averaged and by the norm of the whole averaged gradient (with "
        "sharded weights: over all shards, as torch.nn.utils.clip_grad_norm_ does).",
        (),
    ),
    "data": (
        "make one shuffle of the whole data set an epoch, with the same seed on every worker, and deal it out without "
        "overlap (Goyal 2017, remark 4).",
        ("LB302",),
    ),
    "randomness": (
        "switch dropout and other draws off for this check: workers draw other numbers than one worker does, and that "
        "is no mistake. Then check again.",
        (),
    ),
    "schedule": ("step the scheduler once an optimizer step, on every worker alike.", ("LB402",)),
    "learning rate": (
        "choose the rate by the total batch, which is the same here on any number of workers, and scale it once.",
        ("LB105",),
    ),
    "weight decay": (
        "apply weight decay once an update, in the optimizer: with an optimizer group's weight_decay, the same on any "
        "number of workers (Goyal 2017, eq. (8) and remark 1).",
        (),
    ),
    "optimizer settings": (
        "give the optimizer the same numbers, and no state of its own, on any number of workers.",
        (),
    ),
    "optimizer steps": ("step the optimizer once, after all microbatches and workers have added up.", ("LB407",)),
    "gradients not averaged": (
        "call the wrapped model (not model.module), leave no_sync before the last backward, or average every gradient "
        "by hand before optimizer.step().",
        (),
    ),
    "unknown": ("look at the comparisons step by step; halve the model or the step until the difference goes.", ()),
}


def cause(name: str, evidence: str, codes: tuple[str, ...] = ()) -> Cause:
    """The cause of that name with its fix; `codes` where they are not the usual ones."""
    fix, usual = _FIXES[name]
    return Cause(name=name, evidence=evidence, fix=fix, codes=codes or usual)
