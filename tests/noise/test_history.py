"""What a log of raw moments says, against sums written out by hand; no step is lost to drawing."""

import math
import time
from itertools import pairwise

import numpy as np
import pytest
from tests.report.moments_sample import SHARES, write_log

from largebatch.noise import history as module
from largebatch.noise.history import history
from largebatch.records.moments_log import read_moments


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return read_moments(write_log(tmp_path_factory.mktemp("log") / "moments.jsonl"))


def test_every_windows_noise_scale_is_the_ratio_of_its_own_sums(table):
    said = history(table)
    assert len(said.total.windows) == 32
    trace, grad = np.array(table.trace_cov), np.array(table.grad_sq_norm)
    for number, window in enumerate(said.total.windows):
        rows = slice(20 * number, 20 * number + 20)
        assert (window.first_step, window.last_step) == (1 + 100 * number, 96 + 100 * number)
        assert window.b_simple.value == pytest.approx(math.fsum(trace[rows]) / math.fsum(grad[rows]))
        assert window.b_simple.low < window.b_simple.value < window.b_simple.high
    assert said.total.b_simple.value == pytest.approx(math.fsum(trace) / math.fsum(grad))
    # tr(Sigma) / |G|^2 grows from 100 to 400.
    assert said.total.windows[0].b_simple.value == pytest.approx(100, rel=0.2)
    assert said.total.windows[-1].b_simple.value == pytest.approx(400, rel=0.2)


def test_a_group_has_its_own_sums_and_its_share_of_the_noise(table):
    said = history(table)
    assert list(said.groups) == list(SHARES)
    for name, share in SHARES.items():
        assert said.groups[name].trace_share == pytest.approx(share, rel=0.05)
        columns = table.groups[name]
        ratio = math.fsum(columns.trace_cov) / math.fsum(columns.grad_sq_norm)
        assert said.groups[name].b_simple.value == pytest.approx(ratio)
    assert said.preconditioned.b_simple == said.total.b_simple


def test_a_curves_bins_hold_every_step_once(table):
    curve = history(table).curve
    assert len(curve.step) == module.MOST_BINS
    edges = np.unique(np.linspace(0, 640, 201).astype(int))
    for column, values in ((table.trace_cov, curve.trace_cov), (table.grad_sq_norm, curve.grad_sq_norm)):
        wanted = [np.mean(column[a:b]) for a, b in pairwise(edges)]
        np.testing.assert_allclose(values, wanted)
        weighted = np.dot(values, np.diff(edges)) / 640
        assert weighted == pytest.approx(np.mean(column))
    assert set(curve.batch) == {64.0}


def test_the_advice_rests_on_the_last_window_and_says_so(table):
    said = history(table)
    last = said.total.windows[-1]
    assert said.advice_from == (last.first_step, last.last_step)
    assert said.advice.startswith("Batch 64 examples is")
    batch = 16 * round(last.b_simple.value / 16)
    assert f"Raise it to {batch} examples" in said.advice
    assert "each of 2 workers" in said.advice


def test_a_weak_signal_gets_fewer_and_longer_windows(tmp_path):
    weak = history(read_moments(write_log(tmp_path / "m.jsonl", noise=4.0)))
    assert len(weak.total.windows) < 32
    resolved = [window.resolved for window in weak.total.windows]
    assert 2 * sum(resolved) >= len(resolved)


def test_a_short_last_step_is_not_taken_for_the_batch(tmp_path):
    path = write_log(tmp_path / "m.jsonl")
    *lines, last = path.read_text().splitlines(keepends=True)
    short = last.replace('"batch":64', '"batch":5').replace('"num_microbatches":8', '"num_microbatches":1')
    path.write_text("".join(lines) + short)
    table = read_moments(path)
    assert table.batch[-1] == 5
    said = history(table)
    assert said.advice.startswith("Batch 64 examples is")
    assert "microbatches of 8 examples" in said.advice


def test_a_lost_signal_is_unresolved_everywhere_and_advises_nothing(tmp_path):
    lost = history(read_moments(write_log(tmp_path / "m.jsonl", 100, noise=60.0)))
    assert not any(window.resolved for window in lost.total.windows)
    assert lost.advice.startswith("Nothing is advised after 100 measured steps")
    assert lost.caveats == ()


@pytest.mark.parametrize("num_steps", [1, 2, 7, 11, 13])
def test_a_log_that_has_just_begun_has_one_window(tmp_path, num_steps):
    said = history(read_moments(write_log(tmp_path / "m.jsonl", num_steps)))
    assert len(said.total.windows) == 1
    assert said.num_steps == num_steps
    assert len(said.curve.step) == num_steps


def test_adams_language_model_is_advised_by_a_lower_bound(tmp_path):
    said = history(read_moments(write_log(tmp_path / "m.jsonl", unit="tokens", optimizer="adam")))
    assert any("Merrill" in caveat for caveat in said.caveats)


def test_a_long_log_is_read_and_divided_in_seconds(tmp_path):
    path = write_log(tmp_path / "m.jsonl", 200)
    first, *lines = path.read_text().splitlines()
    heads = [line.partition(",")[2] for line in lines]
    with path.open("w") as file:
        file.write(first + "\n")
        file.writelines(f'{{"step":{step},{heads[step % 200]}\n' for step in range(1, 50_001))
    started = time.perf_counter()
    said = history(read_moments(path))
    seconds = time.perf_counter() - started
    assert (said.num_steps, len(said.curve.step)) == (50_000, 200)
    assert seconds < 60
