"""Which mistakes does an audit know, and what is to be said of each?

"LB1xx" is of the optimizer and its schedule at rest, "LB2xx" of the model, "LB3xx" of the data order, "LB4xx" of what
only real steps show. A number that was once given keeps its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: the training is not what was asked for. warning: it is known to cost accuracy at a large batch. note: it
differs from what the paper did, and may be meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """One mistake that an audit knows."""

    name: str
    """Short name, words joined by "-"."""
    severity: Severity
    """How bad it is."""
    why: str
    """Why it matters, with its source."""
    fix: str
    """What to do."""
    wrong_when: str
    """When the finding is none."""


CODES: dict[str, Code] = {
    "LB101": Code(
        name="decay-on-norms",
        severity="warning",
        why="A norm layer's output does not change when the weights before it are scaled, so that its gamma and beta "
        "alone set the size of what comes out: decay pulls them to 0. Goyal 2017 puts none on them (sec. 5.1).",
        fix="Give the parameters of norm layers a group with weight_decay=0, chosen by module type and not by name, as "
        "build_sgd does (torchvision's references: --norm-weight-decay 0).",
        wrong_when="the baseline was tuned with decay on its norms and is to be reproduced exactly.",
    ),
    "LB102": Code(
        name="decay-on-biases",
        severity="note",
        why="Goyal 2017 leaves only the norms' gamma and beta without decay (sec. 5.1), so that a bias with decay is "
        "the paper's own recipe; timm and Hugging Face leave biases out, and the two are not the same run.",
        fix="Do at this batch as at the baseline; build_sgd(..., exclude_biases=True) leaves biases without decay.",
        wrong_when="the baseline decays its biases too, as the paper does.",
    ),
    "LB103": Code(
        name="no-zero-gamma",
        severity="note",
        why="With gamma = 0 in the last norm of every residual block, each block starts as the identity and early "
        "training is easier: 23.74 % against 24.11 % error at a batch of 8192, 23.60 against 23.84 at 256 "
        "(Goyal 2017, sec. 5.1, Table 2b).",
        fix="Set the weight of the last norm of every residual block to 0 before training (torchvision: "
        "zero_init_residual=True; timm: zero_init_last=True), never that of the downsample branch.",
        wrong_when="weights are loaded later, or the baseline was tuned with gamma = 1 and is to be reproduced.",
    ),
    "LB104": Code(
        name="lr-not-scaled",
        severity="error",
        why="A batch k times as large takes k times fewer steps an epoch; k times the rate goes with it for SGD "
        "(Goyal 2017, sec. 2.1), about sqrt(k) times for Adam (Malladi 2022). Left as it was, the error rose from "
        "23.74 % to 41.67 % at k = 32 (Goyal 2017, Table 2a).",
        fix="Scale the rate with the batch; Recipe(reference_batch=..., reference_lr=...).resolve(batch, ...) does.",
        wrong_when="the rate was tuned at this batch, or the batch is far beyond the noise scale, where the best rate "
        "is flat (McCandlish 2018, eq. 2.6).",
    ),
    "LB105": Code(
        name="lr-scaled-twice",
        severity="error",
        why="The linear rule holds for one factor k = batch / reference batch (Goyal 2017, sec. 2.1). A script and a "
        "library that both multiply, or a factor of workers on top of one of the batch, give a rate that is k "
        "times too high, which diverges or ends at a worse error.",
        fix="Multiply once, by the total batch over the reference batch: Recipe.resolve gives the rate.",
        wrong_when="the rate was tuned at this batch.",
    ),
    "LB106": Code(
        name="no-warmup",
        severity="warning",
        why="Early in training the weights change fast and the linear rule does not hold: without a warmup the error "
        "at k = 32 was 24.84 %, with a gradual one over 5 epochs 23.74 % (Goyal 2017, sec. 2.2, Table 1).",
        fix="Raise the rate from the reference's to the scaled one by the same amount at every step of the first 5 "
        "epochs: as_torch_scheduler(optimizer, recipe.resolve(batch, ...).schedule).",
        wrong_when="the rate is raised by hand or by a callback that was not given, or the weights are pretrained and "
        "the rate is small.",
    ),
    "LB107": Code(
        name="momentum-correction",
        severity="error",
        why="With the learning rate inside the velocity (v <- m v + lr g) the history must be multiplied by "
        "new_lr / old_lr whenever the rate changes, or it is too small after a rise and too large after a drop "
        "(Goyal 2017, eq. (10), remark 2). With the rate outside it (u <- m u + g, w <- w - lr u, eq. (9); torch's "
        "SGD) the history holds no rate, and the same factor makes it wrong.",
        fix="Use torch.optim.SGD as it is, with no correction; or the velocity form with its correction.",
        wrong_when="the rate does not change while training.",
    ),
    "LB108": Code(
        name="batch-beyond-b-crit",
        severity="warning",
        why="At the critical batch size a goal takes twice the fewest steps and twice the fewest examples; beyond it "
        "more examples buy hardly any steps (McCandlish 2018, eq. (2.11), fig. 3), and the linear rule ends "
        "there.",
        fix="Use a batch of at most b_crit, and the rest of the machines for something else; or accept the cost.",
        wrong_when="b_crit was measured early: it grows while the loss falls (McCandlish 2018, sec. 2.5).",
    ),
    "LB109": Code(
        name="parameter-not-in-optimizer",
        severity="error",
        why="A trainable parameter that no group of the optimizer has gets gradients and is never updated: a part of "
        "the model stays as it was drawn. Usually the optimizer was made before a layer was replaced or wrapped.",
        fix="Make the optimizer after the model is complete, and check the filter that makes its groups; or freeze the "
        "parameter with requires_grad_(False).",
        wrong_when="another optimizer, which was not given, has it.",
    ),
    "LB201": Code(
        name="bn-size-differs",
        severity="warning",
        why="With batch norm the loss of an example depends on the n examples it is normalised with, so that n is part "
        "of the loss: another n is another loss, which the scaling rule does not carry over (Goyal 2017, "
        "eq. (5) to (7), sec. 2.3).",
        fix="Keep the n of the baseline whatever the layout: ghost batch norm where the local batch is larger, batch "
        "norm over a group of workers where it is smaller.",
        wrong_when="a layer that was not recognised already divides the local batch into parts of n.",
    ),
    "LB202": Code(
        name="sync-bn-over-all",
        severity="warning",
        why="Batch norm over all workers takes its statistics from kn examples: n, and with it the loss, changes with "
        "the number of workers (Goyal 2017, sec. 2.3: statistics are not to be computed across workers).",
        fix="Use plain batch norm; or, where a local batch is too small, synchronise over the few workers that "
        "together hold the baseline's n (process_group of SyncBatchNorm).",
        wrong_when="the baseline normalised over as many examples (detection with 1 or 2 images a worker); give "
        "batchnorm_n then.",
    ),
    "LB203": Code(
        name="eval-in-training-statistics",
        severity="error",
        why="In training mode a batch norm normalises with the evaluated batch and moves its running statistics: the "
        "score depends on the evaluation's batch, and the model has seen the evaluation data (Goyal 2017, sec. 2.3 "
        "and 5.2: inference uses the running averages).",
        fix="Call model.eval() before the evaluation and model.train() after it.",
        wrong_when="the forward without gradients was made to recompute the running statistics on training data.",
    ),
    "LB301": Code(
        name="sampler-without-set-epoch",
        severity="error",
        why="Every epoch is a new shuffle of the whole data (Goyal 2017, remark 4). A DistributedSampler draws its "
        "order from its seed and epoch: unless set_epoch is called, all epochs have the order of the first.",
        fix="Call loader.sampler.set_epoch(epoch) at the start of every epoch.",
        wrong_when="the training is one epoch long.",
    ),
    "LB302": Code(
        name="overlapping-shuffles",
        severity="error",
        why="One shuffle of the whole data an epoch is dealt out to the workers, each example to one of them "
        "(Goyal 2017, remark 4). When every worker shuffles for itself, a step holds examples several times and an "
        "epoch leaves others out, which may contaminate results.",
        fix="Give the DataLoader a DistributedSampler with every worker's own rank, the same seed and the number of "
        "workers; or deal out a ShuffledStream with rank_slice.",
        wrong_when="every worker's data set is already its own part of the data, or a framework that was not "
        "recognised replaces the sampler.",
    ),
    "LB303": Code(
        name="padding-repeats",
        severity="note",
        why="Where the workers do not divide the data, a padding sampler repeats a few examples at the end of every "
        "epoch, so that they count twice (Goyal 2017, remark 4: an epoch is one permutation dealt out); an "
        "evaluation that pads is off by as much.",
        fix="Set drop_last=True in the sampler when training, or use a ShuffledStream, which neither pads nor drops.",
        wrong_when="the data are so many that a few repeats do not count.",
    ),
    "LB304": Code(
        name="no-shuffle",
        severity="warning",
        why="Steps on data in its stored order are not on random examples: data sets stored by class give batches of "
        "one class. Every epoch is to be a new shuffle (Goyal 2017, remark 4).",
        fix="Set shuffle=True, in the DistributedSampler where there is one.",
        wrong_when="the data set shuffles itself, or the loader is an evaluation's.",
    ),
    "LB401": Code(
        name="schedule-per-microbatch",
        severity="error",
        why="Warmup and decays are counted in optimizer steps (Goyal 2017, sec. 2.2: an increment each iteration). A "
        "scheduler stepped once a microbatch runs `accumulation` times too fast: the warmup is over too soon and "
        "the decays come too early.",
        fix="Call scheduler.step() once after each optimizer.step(), and nowhere else.",
        wrong_when="the schedule was written in microbatches.",
    ),
    "LB402": Code(
        name="schedule-per-process",
        severity="error",
        why="Warmup and decays are counted in optimizer steps, which all workers take together (Goyal 2017, sec. 2.2). "
        "A scheduler that steps once a process, as one prepared by accelerate does, runs world_size times too "
        "fast.",
        fix="Leave the scheduler out of accelerator.prepare, or set step_scheduler_with_optimizer=False and step it "
        "once a step, or write the schedule's lengths times the number of processes.",
        wrong_when="the schedule's lengths were multiplied by the number of processes.",
    ),
    "LB403": Code(
        name="loss-over-uneven-microbatches",
        severity="warning",
        why="The mean of the microbatches' means is not the mean over the step when they differ in size: the units of "
        "a small microbatch count more. The loss is divided by the step's total (Goyal 2017, remark 3).",
        fix="Sum each microbatch's loss and divide it by the units of the whole step: recipe.loss.normalise.",
        wrong_when="only the last step of an epoch is uneven, and it does not count.",
    ),
    "LB404": Code(
        name="loss-over-uneven-workers",
        severity="warning",
        why="Data-parallel training averages the workers' gradients, so that each worker weighs the same however many "
        "units it has. The loss is divided by the total kn, not by each worker's own n (Goyal 2017, remark 3).",
        fix="Sum each worker's loss, divide it by the units of all workers, and multiply it by world_size where "
        "the workers' gradients are averaged.",
        wrong_when="only the last step of an epoch is uneven, and it does not count.",
    ),
    "LB405": Code(
        name="loss-not-divided-by-accumulation",
        severity="error",
        why="Gradients of microbatches add up: the mean loss of each, not divided, gives `accumulation` times the "
        "gradient. That is not `accumulation` times the learning rate, since the weight decay stays (Goyal 2017, "
        "remark 1).",
        fix="Divide each microbatch's mean loss by accumulation; or sum it and divide by the units of the step.",
        wrong_when="the gradients are divided later, before the optimizer's step.",
    ),
    "LB406": Code(
        name="clipping-before-measuring",
        severity="warning",
        why="Clipping changes a gradient's norm by a factor that depends on its noise: moments of clipped gradients "
        "are not those of McCandlish 2018, eq. (A.2), and the noise scale from them is biased.",
        fix="Read the gradients before they are clipped: let the monitor measure before clip_grad_norm_ is called.",
        wrong_when="the gradients' norms lay below the limit, so that nothing was clipped.",
    ),
    "LB407": Code(
        name="optimizer-per-microbatch",
        severity="error",
        why="An optimizer that steps after every microbatch trains at a batch that is `accumulation` times smaller "
        "than was asked for, at a rate and a schedule meant for the larger one (Goyal 2017, eq. (3) and (4)).",
        fix="Call optimizer.step() and zero_grad() once every `accumulation` microbatches.",
        wrong_when="accumulation was given too high.",
    ),
}
"""Every mistake by its code."""
