"""Do the curves in TensorBoard hold what was measured, read back by TensorBoard's own reader?"""

import sys

import numpy as np
import pytest
import torch
from tests.integrations.test_metrics import train
from torch import nn

from largebatch.errors import MissingExtraError
from largebatch.integrations.tensorboard import TensorBoardSink
from largebatch.noise.ledger import MeasuredStep
from largebatch.noise.moments import solve_moments
from largebatch.noise.monitor import NoiseScaleMonitor

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="tensorboard is not installed: pip install 'largebatch[tensorboard]'",
)


def curves(folder):
    """Tag -> (steps, values)."""
    reader = accumulator.EventAccumulator(str(folder))
    reader.Reload()
    return {
        tag: ([event.step for event in reader.Scalars(tag)], [event.value for event in reader.Scalars(tag)])
        for tag in reader.Tags()["scalars"]
    }


def made_step(step):
    moments = solve_moments([1.0 + step, 9.0], [4, 4], 4.0)
    return MeasuredStep(step=step, moments=moments, groups={"rest": moments})


def test_every_curve_reads_back_as_it_was_measured(tmp_path):
    torch.manual_seed(0)
    model, seen, estimates = nn.Linear(3, 1), [], []
    with TensorBoardSink(tmp_path / "runs", noise_scale=lambda: monitor.noise_scale) as sink:
        monitor = NoiseScaleMonitor(
            model, microbatch=8, every=1, unit="sequences",
            on_measured=[seen.append, lambda _: estimates.append(monitor.noise_scale), sink],
        )  # fmt: skip
        train(monitor, model, 30)
        monitor.close()
    read = curves(tmp_path / "runs")
    # TensorBoard keeps float32.
    for tag, wanted in (
        ("noise/trace_cov", [one.moments.trace_cov for one in seen]),
        ("noise/grad_sq_norm", [one.moments.grad_sq_norm for one in seen]),
        ("noise/batch", [32.0] * 30),
    ):
        assert read[tag][0] == list(range(1, 31))
        np.testing.assert_array_equal(np.float32(read[tag][1]), np.float32(wanted))
    resolved = [(one.step, est) for one, est in zip(seen, estimates, strict=True) if est.resolved]
    assert 5 < len(resolved) < 30
    for end, values in (
        ("", [est.b_simple for _, est in resolved]),
        ("_low", [est.interval[0] for _, est in resolved]),
        ("_high", [est.interval[1] for _, est in resolved]),
    ):
        steps, numbers = read[f"noise/b_simple_sequences{end}"]
        known = dict(zip(steps, np.float32(numbers), strict=True))
        assert [known[step] for step, _ in resolved] == list(np.float32(values))
    assert read["noise/b_simple_sequences"][0] == [step for step, _ in resolved], "a gap while it is unresolved"


def test_a_training_that_goes_on_hides_the_steps_it_makes_again(tmp_path):
    for steps in (range(1, 8), range(4, 6)):
        with TensorBoardSink(tmp_path) as sink:
            for step in steps:
                sink(made_step(step))
    assert curves(tmp_path)["noise/trace_cov"][0] == [1, 2, 3, 4, 5]


def test_a_writer_of_yours_stays_open(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    with TensorBoardSink(writer) as sink:
        sink(made_step(1))
    writer.add_scalar("loss", 0.5, 1)
    writer.close()
    assert {"loss", "noise/trace_cov"} <= set(curves(tmp_path))


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard" or "utils.tensorboard" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'largebatch\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


def test_no_folder_is_made_before_the_first_step(tmp_path):
    TensorBoardSink(tmp_path / "runs").close()
    assert not (tmp_path / "runs").exists()
