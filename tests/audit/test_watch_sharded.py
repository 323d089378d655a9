"""Are a fully_shard model's steps judged as a plain one's, though its gradients are out of sight in a backward?

A unit that is gathered for its forward shows parameters without a gradient until its backward ends; what is not reduced
yet (set_requires_gradient_sync) is out of sight longer still. Each fault is one a loop on a plain model has too.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from largebatch.audit.watch import watch
from largebatch.audit.watch_microbatches import UNSEEN
from workers import on_workers

NUM_STEPS = 3
PLAIN = {
    "": [], "LB403": ["LB403"], "LB405": ["LB405"], "not zeroed": ["LB407"], "stepped each time": ["LB407"],
    "stale first": [],
}  # fmt: skip


def make_model(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    given = {"reshard_after_forward": True} if "resharded" in how else {}  # torch's default leaves a root gathered
    if "blocks" in how:
        fully_shard(model[0], **given)
    if "root" in how:
        fully_shard(model, **given)
    return model


def train(how, fault, *, syncs_each=True, given=True, evaluates=False):
    """The codes of a loop, and the backwards it is said to have had."""
    model = make_model(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if evaluates:  # gathered when the watch begins
        with torch.no_grad():
            model(torch.ones(4, 4))
    # An accumulation of 3 lets the stale backward of 3 rows be taken for a microbatch beside the two of 4: LB403.
    with watch(model, optimizer if given else None, accumulation=3 if fault == "stale first" else 2) as watched:
        for _ in range(NUM_STEPS):
            if fault == "stale first":  # another's backward, whose gradients are zeroed before the loop's own
                (model(torch.ones(3, 4)).mean() / 2).backward()
            if fault != "not zeroed":
                optimizer.zero_grad()
            for number in range(2):
                if not syncs_each:
                    for module in model.modules():
                        if hasattr(module, "set_requires_gradient_sync"):
                            module.set_requires_gradient_sync(number == 1, recurse=False)
                size = 2 if fault == "LB403" and number else 4
                loss = model(torch.randn(size, 4)).square().mean()
                (loss if fault == "LB405" else loss / 2).backward()
                if fault == "stepped each time" and number == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if evaluates:
                with torch.no_grad():
                    model(torch.ones(4, 4))
            optimizer.step()
    return [finding.code for finding in watched.findings], watched.num_backwards, watched.unread


def is_unseen(how, way, fault):
    """Whether the first step is left out: the blocks may not be all, or a root is gathered when the watch begins."""
    is_partly = how == "blocks" and not way.get("given", True)
    is_gathered = how in ("root", "blocks", "root and blocks") and way.get("evaluates", False)
    return (is_partly or is_gathered) and fault in ("LB403", "LB405", "stale first")


WAYS = [
    {}, {"syncs_each": False}, {"given": False}, {"evaluates": True}, {"given": False, "evaluates": True},
]  # fmt: skip


TOGETHER = ("", "root", "blocks", "root and blocks", "root, resharded", "root and blocks, resharded")
ALONE = ("blocks", "root and blocks, resharded")


def all_of_them(rank):
    return {
        (how, number): {fault: train(how, fault, **way) for fault in PLAIN if _is_possible(fault, way)}
        for how in (ALONE if dist.get_world_size() == 1 else TOGETHER)
        for number, way in enumerate(WAYS)
    }


def _is_possible(fault, way):
    # A step between them would find gradients that are not reduced.
    return way.get("syncs_each", True) or fault != "stepped each time"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sharded_model_shows_what_a_plain_one_does(world_size):
    for found in on_workers(world_size, all_of_them):
        for setup, of_faults in found.items():
            for fault, seen in of_faults.items():
                num = 3 if fault == "stale first" else 2
                unread = (UNSEEN,) if is_unseen(setup[0], WAYS[setup[1]], fault) else ()
                assert seen == (PLAIN[fault], num * NUM_STEPS, unread), (setup, fault)
