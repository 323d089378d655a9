"""Does measuring stay within its share of the time, and does it come back after a spike?"""

import logging
import math
import random
import time
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from largebatch.noise.cadence import MEMORY, SELDOM, WARMUP, Cadence
from largebatch.noise.estimate import RunningNoiseScale
from largebatch.noise.monitor import NoiseScaleMonitor
from oracles import noise_moments as oracle
from workers import on_workers


def run(cadence, steps, cost, step=lambda _: 1.0):
    """Measure as the monitor does, `cost(n)` seconds each time; what a vote says holds from the next measured step on.

    Returns the numbers of the measured steps and the share of time they took.
    """
    measured, voted, following, spent, total = [], 1, 0, 0.0, 0.0
    for n in range(steps):
        total += step(n)
        if n < following:
            continue
        every, voted = voted, cadence.every()
        measured.append(n)
        spent += cost(n)
        cadence.note(step_seconds=step(n) + cost(n), cost_seconds=cost(n))
        following = n + every
    return measured, spent / total


@pytest.mark.parametrize("share", [0.001, 0.009, 0.03, 0.2, 1.5])
@pytest.mark.parametrize("overhead", [0.01, 0.003])
def test_measuring_stays_within_its_share_in_the_long_run(share, overhead):
    rng = random.Random(0)
    # A lognormal of spread 0.4 has a mean 8 % above its median: a median alone would overspend.
    times = [rng.lognormvariate(math.log(share), 0.4) for _ in range(30_000)]
    cost = sum(times) / len(times)
    measured, spent = run(Cadence(overhead=overhead), 30_000, times.__getitem__)
    start = WARMUP * 2 * cost / 30_000
    assert spent <= overhead * 1.05 + start
    assert len(measured) >= 30_000 / (cost / overhead * 1.4 + 1)  # and is not shy of using it


def test_a_step_in_twenty_is_measured_where_measuring_costs_a_seventh_of_it():
    measured, _ = run(Cadence(overhead=0.01), 1000, lambda _: 1 / 7)
    assert max(b - a for a, b in pairwise(measured)) <= SELDOM


def test_dearer_measuring_is_never_done_more_often():
    def every(share):
        cadence = Cadence(overhead=0.01)
        for _ in range(WARMUP):
            cadence.note(step_seconds=1 + share, cost_seconds=share)
        return cadence.every()

    intervals = [every(0.001 * k) for k in range(500)]
    assert intervals == sorted(intervals)
    assert intervals[0] == 1


@pytest.mark.parametrize("num_spikes", [1, MEMORY // 2])
def test_a_spike_does_not_freeze_the_cadence(num_spikes):
    cadence = Cadence(overhead=0.01)
    usual = 6
    for _ in range(WARMUP):
        cadence.note(step_seconds=1.045, cost_seconds=0.045)
    assert cadence.every() == usual
    for _ in range(num_spikes):
        cadence.note(step_seconds=3601.0, cost_seconds=3600.0)
        assert cadence.every() <= 2 * usual
    for _ in range(MEMORY):
        cadence.note(step_seconds=1.045, cost_seconds=0.045)
    assert cadence.every() == usual


def test_a_slow_machine_changes_nothing():
    rng = random.Random(0)
    pauses = [5.0 if rng.random() < 0.2 else 0.0 for _ in range(3000)]
    measured, _ = run(Cadence(overhead=0.01), 3000, lambda _: 0.02, lambda n: 1.0 + pauses[n])
    assert 700 <= len(measured) <= 1500  # 1000 without pauses


def test_nothing_is_decided_before_the_warmup_ends():
    cadence = Cadence(overhead=0.01)
    for _ in range(WARMUP - 1):
        cadence.note(step_seconds=100.0, cost_seconds=99.0)
        assert cadence.every() == 1
    assert math.isnan(Cadence(overhead=0.01).share())


def test_measuring_seldom_is_logged_once(caplog):
    cadence = Cadence(overhead=0.01)
    with caplog.at_level(logging.INFO):
        for _ in range(WARMUP + 2):
            cadence.note(step_seconds=1.5, cost_seconds=0.5)
            cadence.every()
    assert [record.message.split(",")[0] for record in caplog.records] == ["measuring takes 50 % of a step"]


def at_own_speed(rank, steps):
    """Train with pauses that differ between workers; which steps were measured."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    with NoiseScaleMonitor(ddp, microbatch=2, every="auto", overhead=0.02) as monitor:
        measured = []
        for step in range(steps):
            ddp.zero_grad()
            time.sleep(0.002 * (1 + 3 * rank) * (step % 3))
            ddp(torch.randn(2, 3)).sum().backward()
            if monitor.step() is not None:
                measured.append(step)
    return measured, monitor.every


def test_workers_of_different_speed_measure_the_same_steps():
    (first, *others) = on_workers(2, partial(at_own_speed), 60)
    assert others == [first]
    assert first[0][:3] == [0, 1, 2]


@pytest.mark.parametrize("every", [4, SELDOM])
def test_the_interval_widens_by_no_more_than_the_root_of_the_cadence(every):
    rng = np.random.default_rng(0)

    def log_width(moments):
        running = RunningNoiseScale()
        for trace_cov, grad_sq_norm in moments:
            running.update(trace_cov=trace_cov, grad_sq_norm=grad_sq_norm, batch=4)
        low, high = running.estimate().interval
        return math.log(high / low)

    widths = []
    for _ in range(8):
        draws = 1.0 + rng.standard_normal((200 * every, 4, 16))  # microbatches of one unit
        moments = [oracle.of_microbatches(step, [1] * 4) for step in draws]
        widths.append((log_width(moments[::every]), log_width(moments)))
    seldom, always = np.mean(widths, axis=0)
    assert seldom <= 1.1 * math.sqrt(every) * always  # the mean width of 8 runs is known to a few percent
    assert seldom >= 0.7 * math.sqrt(every) * always
