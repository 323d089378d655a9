"""How does torchvision's reference training loop take a step?

`train_one_epoch` of references/classification/train.py and the parts of utils.py it stands on, as torchvision 0.29
has them, for one process on the CPU: what a flag turns off there (EMA, mixed precision, clipping) is left out. One
thing is added: `accumulation`, which at 1 leaves the loop as it is.
"""

from __future__ import annotations

import datetime
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import torch
from torch import Tensor, nn


class SmoothedValue:
    """Track a series of values and provide access to smoothed values over a window or the global series average."""

    def __init__(self, window_size: int = 20, fmt: str = "{median:.4f} ({global_avg:.4f})") -> None:
        self.deque: deque[float] = deque(maxlen=window_size)
        self.total, self.count, self.fmt = 0.0, 0, fmt

    def update(self, value: float, n: int = 1) -> None:
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def __str__(self) -> str:
        values = torch.tensor(list(self.deque))
        return self.fmt.format(
            median=values.median().item(), avg=values.to(torch.float32).mean().item(),
            global_avg=self.total / self.count, max=max(self.deque), value=self.deque[-1],
        )  # fmt: skip


class MetricLogger:
    """Meters by name, printed every `print_freq` iterations."""

    def __init__(self, delimiter: str, file: TextIO) -> None:
        self.meters: defaultdict[str, SmoothedValue] = defaultdict(SmoothedValue)
        self.delimiter, self.file = delimiter, file

    def update(self, **values: Any) -> None:
        for name, value in values.items():
            self.meters[name].update(value.item() if isinstance(value, Tensor) else value)

    def __str__(self) -> str:
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())

    def log_every(self, iterable: Iterable[Any], print_freq: int, header: str, total: int) -> Iterator[Any]:
        end = time.time()
        iter_time, data_time = SmoothedValue(fmt="{avg:.4f}"), SmoothedValue(fmt="{avg:.4f}")
        for i, item in enumerate(iterable):
            data_time.update(time.time() - end)
            yield item
            iter_time.update(time.time() - end)
            if i % print_freq == 0:
                eta = datetime.timedelta(seconds=int(iter_time.total / iter_time.count * (total - i)))
                text = (f"[{i}/{total}]", f"eta: {eta}", str(self), f"time: {iter_time}", f"data: {data_time}")
                print(header, self.delimiter.join(text), file=self.file)
            end = time.time()


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[Tensor]:
    """Percent right among the k largest outputs, for each k."""
    with torch.inference_mode():
        _, predicted = output.topk(max(topk), 1, True, True)
        correct = predicted.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / len(target)) for k in topk]


def train_one_epoch(
    model: nn.Module, criterion: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer,
    data_loader: Iterable[tuple[Tensor, Tensor]], device: torch.device, epoch: int, *, accumulation: int,
    print_freq: int = 10, num_batches: int, file: TextIO,
) -> None:  # fmt: skip
    """One pass over `data_loader`, whose items are microbatches; `accumulation` of them are a step."""
    model.train()
    metric_logger = MetricLogger("  ", file)
    metric_logger.meters["lr"] = SmoothedValue(window_size=1, fmt="{value}")
    metric_logger.meters["img/s"] = SmoothedValue(window_size=10, fmt="{value}")
    batches = metric_logger.log_every(data_loader, print_freq, f"Epoch: [{epoch}]", num_batches)
    for i, (image, target) in enumerate(batches):
        start_time = time.time()
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)

        if i % accumulation == 0:
            optimizer.zero_grad()
        (loss if accumulation == 1 else loss / accumulation).backward()
        if (i + 1) % accumulation == 0:
            optimizer.step()

        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        batch_size = image.shape[0]
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        metric_logger.meters["acc1"].update(acc1.item(), n=batch_size)
        metric_logger.meters["acc5"].update(acc5.item(), n=batch_size)
        metric_logger.meters["img/s"].update(batch_size / (time.time() - start_time))
