"""What is known of a full-size task without its data: its size, its recipe and the errors that were published?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from largebatch.recipe.recipe import Recipe
from largebatch.recipe.recipes import goyal2017_resnet50
from largebatch.tasks.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """One published result."""

    batch: int
    """Units in one step."""
    value: float
    """Mean over the runs, in percent."""
    std: float | None
    """Standard deviation over the runs, in percent; None where one run was made."""
    source: str
    """Where it stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A published quantity by batch: numbers as printed, none between them."""

    name: str
    """What is measured, in percent."""
    trained: str
    """What was trained, and over how many runs."""
    points: tuple[Reported, ...]
    """By rising batch."""
    flat: tuple[int, int]
    """The batches from which to which it is called the same."""
    elbow: int | None
    """Largest batch before it becomes worse; None where no larger one was trained."""
    diverges_above: int | None = None
    """Batch above which training was seen to diverge; None where that was not looked for."""

    def at(self, batch: int) -> Reported | None:
        """The result at exactly this batch, or None.

        >>> published("imagenet").curves[0].at(8192)
        Reported(batch=8192, value=23.74, std=0.09, source='Goyal 2017, Table 1')
        """
        return next((point for point in self.points if point.batch == batch), None)

    def around(self, batch: int) -> tuple[Reported, ...]:
        """The nearest results below and above a batch that lies between two; nothing outside them.

        >>> [point.batch for point in published("imagenet").curves[0].around(5000)]
        [4096, 8192]
        """
        below = [point for point in self.points if point.batch < batch]
        above = [point for point in self.points if point.batch > batch]
        return (below[-1], above[0]) if below and above and self.at(batch) is None else ()

    def expect(self, batch: int) -> str:
        """What to expect at a batch, in a sentence that claims no more than was published.

        >>> published("imagenet-resnet101").curves[0].expect(16384)
        'top-1 error: nothing is published above a batch of 8192'
        """
        point, between = self.at(batch), self.around(batch)
        first, last = self.points[0].batch, self.points[-1].batch
        if point is not None:
            said = f"{_figure(point)} ({point.source})"
        elif between:
            said = f"no figure at {batch}; " + ", ".join(f"{_figure(near)} at {near.batch}" for near in between)
            said += f" ({' and '.join(dict.fromkeys(near.source for near in between))})"
        elif self.diverges_above is not None and batch > self.diverges_above:
            return f"{self.name}: above a batch of {self.diverges_above} training diverged ({self.points[-1].source})"
        elif self.flat[0] <= batch < first:
            said = f"drawn as the same as at {first}, but no figure is printed ({self.points[0].source})"
        else:
            return f"{self.name}: nothing is published {'above' if batch > last else 'below'} a batch of " + str(
                last if batch > last else first
            )
        low, high = self.flat
        where = f"in the flat range of {low} to {high}" if low <= batch <= high else f"beyond the elbow at {self.elbow}"
        return f"{self.name}: {said}, {where}"


def _figure(point: Reported) -> str:
    return f"{point.value:.2f} %" if point.std is None else f"{point.value:.2f} ± {point.std:.2f} %"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A task as far as it is known without its data."""

    name: str
    """As on the command line."""
    num_examples: int
    """Training examples of the full size."""
    unit: str
    """What a batch counts."""
    recipe: Recipe
    """What the baseline is trained with."""
    microbatch: int | None
    """Examples in one forward where that is part of the loss; None: any number will do."""
    curves: tuple[Curve, ...] = ()
    """What was published of it, by batch."""
    rate: float | None = None
    """Examples a second of one GPU, where a run's time was published."""
    rate_source: str = ""
    """From what `rate` follows."""


IMAGENET_EXAMPLES = 1_281_167
"""Training pictures of ILSVRC2012."""
COCO_EXAMPLES = 117_266
"""Pictures of COCO's train2017 with an object to be found."""
_FIG3, _T1, _T2C, _T3B = (f"Goyal 2017, {place}" for place in ("Figure 3", "Table 1", "Table 2c", "Table 3b"))
_RESNET50 = Curve(
    name="top-1 error",
    trained="ResNet-50, batch norm over 32, 90 epochs: mean and spread of 5 runs, each the median of its last 5 epochs",
    points=tuple(
        Reported(batch=batch, value=value, std=std, source=_T1 if batch in (256, 8192) else _FIG3)
        for batch, value, std in (
            (128, 23.49, 0.12), (256, 23.60, 0.12), (512, 23.48, 0.09), (1024, 23.53, 0.08), (2048, 23.49, 0.11),
            (4096, 23.56, 0.12), (8192, 23.74, 0.09), (16_384, 24.79, 0.27), (32_768, 27.55, 0.28),
            (65_536, 33.96, 0.80),
        )
    ),
    flat=(64, 8192), elbow=8192, diverges_above=65_536,
)  # fmt: skip
_RESNET101 = Curve(
    name="top-1 error", trained="ResNet-101, batch norm over 32, 90 epochs: mean and spread of 5 runs",
    points=(
        Reported(batch=256, value=22.08, std=0.06, source=_T2C),
        Reported(batch=8192, value=22.36, std=0.09, source=_T2C),
    ),
    flat=(256, 8192), elbow=None,
)  # fmt: skip
_BATCHES_3B = (2, 4, 8, 16)
_DETECTION = tuple(
    Curve(
        name=name, trained="Mask R-CNN from a ResNet-50 trained on ImageNet, batch norm frozen: one run each",
        points=tuple(
            Reported(batch=batch, value=value, std=None, source=_T3B)
            for batch, value in zip(_BATCHES_3B, values, strict=True)
        ),
        flat=(2, 16), elbow=None,
    )
    for name, values in (("box AP", (35.7, 35.7, 35.7, 35.6)), ("mask AP", (33.6, 33.7, 33.5, 33.6)))
)  # fmt: skip


def _imagenet(name: str, curve: Curve | None, minutes: float | None, source: str) -> Published:
    recipe = goyal2017_resnet50()
    return Published(
        name=name, num_examples=IMAGENET_EXAMPLES, unit="examples", recipe=recipe, microbatch=recipe.batchnorm_n,
        curves=() if curve is None else (curve,),
        rate=None if minutes is None else recipe.epochs * IMAGENET_EXAMPLES / (60 * minutes) / 256,
        rate_source="" if minutes is None else f"{source}: {minutes:g} minutes on 256 Tesla P100",
    )  # fmt: skip


def _detection() -> Published:
    from largebatch.tasks.detection import MICROBATCH, table_3b_recipe

    return Published(
        name="detection", num_examples=COCO_EXAMPLES, unit="examples", recipe=table_3b_recipe(COCO_EXAMPLES),
        microbatch=MICROBATCH, curves=_DETECTION,
    )  # fmt: skip


PUBLISHED: dict[str, Callable[[], Published]] = {
    "detection": _detection,
    "imagenet": lambda: _imagenet("imagenet", _RESNET50, 60, "Goyal 2017, sec. 5.5"),
    "imagenet-resnet18": lambda: _imagenet("imagenet-resnet18", None, None, ""),
    "imagenet-resnet101": lambda: _imagenet("imagenet-resnet101", _RESNET101, 92.5, _T2C),
}
"""Name -> what makes its description."""


def published(name: str) -> Published:
    """What is known of a full-size task without its data.

    Args:
        name: one of `PUBLISHED`.

    Raises:
        MissingExtraError: a detector's recipe is asked for and torchvision is not installed.

    >>> round(published("imagenet").rate)
    125

    Source: Goyal 2017, sec. 5.1, 5.5, Figures 1 and 3, Tables 1, 2c and 3b.
    """
    return PUBLISHED[name]()


def of_task(task: Task) -> Published:
    """The same of a task whose data is there; published results only where data and recipe are those they come from."""
    known = published(task.name) if task.name in PUBLISHED else None
    same = known is not None and (known.num_examples, known.recipe) == (len(task.train), task.recipe)
    if known is not None and same:
        return known
    return Published(
        name=task.name, num_examples=len(task.train), unit=task.unit, recipe=task.recipe, microbatch=task.microbatch,
        rate=None if known is None else known.rate, rate_source="" if known is None else known.rate_source,
    )  # fmt: skip
