"""What does the simulator say of the cluster of Goyal 2017? One constant is fitted; the rest follows."""

from __future__ import annotations

from dataclasses import dataclass

from largebatch.parallel.cost import LinkCost
from largebatch.parallel.known_models import known_profile
from largebatch.parallel.simulate.cluster import NVLINK, Cluster, Workload
from largebatch.parallel.simulate.jitter import expected_latest
from largebatch.parallel.simulate.point import Point, best_point

BACKWARD_SECONDS = 0.120
"""ResNet-50, 32 images on a P100; Goyal 2017, section 4."""
STEP_SECONDS_AT_8 = 29 * 3600 / 90 / (1_281_167 / 256)
"""0.232 s: 90 epochs in 29 hours at 256 images a step, on one host; Goyal 2017, section 5.5."""
EFFICIENCY_AT_256 = 0.90
"""What the constant is fitted to; Goyal 2017, section 5.5."""
NETWORK = LinkCost(20e-6, 8 / 50e9)
"""50 Gbit Ethernet; Goyal 2017, section 4. The paper gives no latency: 20 us a message is assumed, not fitted."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What is needed to put that cluster on paper."""

    jitter: float
    """Standard deviation of a worker's compute time from step to step, as a part of it."""
    other_seconds: float
    """Of a step of one worker beside its backward, so that 8 of them take `STEP_SECONDS_AT_8`."""

    def cluster(self) -> Cluster:
        """Hosts of 8 P100."""
        return Cluster(network=NETWORK, intra=NVLINK, jitter=self.jitter)

    def workload(self) -> Workload:
        """ResNet-50, 32 images a GPU."""
        return Workload(
            profile=known_profile("resnet50").scaled(BACKWARD_SECONDS), other_seconds=self.other_seconds, per_gpu=32
        )

    def point(self, gpus: int) -> Point:
        """A step on so many of these GPUs."""
        return best_point(self.workload(), gpus, self.cluster())


GOYAL_2017 = Fit(0.0882, 0.0858)
"""As `fit` finds it."""


def fit() -> Fit:
    """Find the jitter that gives 90 % at 256 GPUs, and the rest of the step that gives 0.232 s at 8.

    Transfer cannot be what costs the 10 %: 31 ms of it hide under a backward of 120 ms. Each worker's time differs from
    step to step, though, by its loader, its host and its clock, and all wait for the last of k: that grows with k
    however fast the network is. What is exposed depends on neither number, so both follow in closed form: with z_k the
    expected latest of k and e_k what is exposed, step_k = compute (1 + jitter z_k) + e_k.

    Source: Goyal et al. 2017, sections 4 and 5.5.
    """
    without = Fit(0.0, STEP_SECONDS_AT_8 - BACKWARD_SECONDS)
    few, many = without.point(8).exposed_seconds, without.point(256).exposed_seconds
    longer = STEP_SECONDS_AT_8 / EFFICIENCY_AT_256 - STEP_SECONDS_AT_8 - (many - few)
    spread = longer / (expected_latest(256) - expected_latest(8))
    compute = STEP_SECONDS_AT_8 - few - spread * expected_latest(8)
    return Fit(spread / compute, compute - BACKWARD_SECONDS)


def hours(point: Point, *, examples: int = 1_281_167, epochs: int = 90) -> float:
    """Of a whole training at a point: steps of its batch, over all epochs.

    >>> from largebatch.parallel.simulate.goyal import GOYAL_2017
    >>> round(hours(GOYAL_2017.point(8)))
    29
    """
    return epochs * examples / point.units_per_second / 3600
