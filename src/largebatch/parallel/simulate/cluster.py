"""What does a cluster on paper consist of? Hosts that are alike, two kinds of links, and workers out of time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from largebatch.errors import ConfigError
from largebatch.parallel.cost import LinkCost
from largebatch.parallel.model_profile import ModelProfile

BETWEEN_HOSTS = ("ring", "halving_doubling", "tree")
"""What the simulator puts between hosts: what Goyal et al. 2017 compare, and the tree of NCCL."""

NVLINK = LinkCost(10e-6, 1 / 60e9)
"""Between the GPUs of a host over NVLink: 60 GB/s, the rings of a first-generation cube mesh together."""
PCIE = LinkCost(10e-6, 1 / 10e9)
"""Between the GPUs of a host over PCI Express 3, x16: 10 GB/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts and links; how many GPUs there are is said for each point."""

    network: LinkCost
    """Between hosts."""
    intra: LinkCost = NVLINK
    """Between the GPUs of a host."""
    gpus_per_host: int = 8
    """GPUs of a full host."""
    jitter: float = 0.0
    """Standard deviation of one worker's compute time from step to step, as a part of it; independent between workers.
    All of them wait for the last one."""
    straggler_seconds: float = 0.0
    """What one worker is late by in every step."""
    slow_link: float = 1.0
    """How many times slower one host's link is than the others', >= 1."""

    def __post_init__(self) -> None:
        if self.gpus_per_host < 1:
            raise ConfigError(f"a host has 1 GPU or more; got {self.gpus_per_host}.")
        for name, least in (("jitter", 0.0), ("straggler_seconds", 0.0), ("slow_link", 1.0)):
            value: float = getattr(self, name)
            if not (value >= least and math.isfinite(value)):
                raise ConfigError(f"{name} is a number, {least:g} or more; got {value!r}.")

    def hosts(self, gpus: int) -> int:
        """Hosts of so many GPUs, the last perhaps not full.

        Raises:
            ConfigError: it is fewer than 1.
        """
        if gpus < 1:
            raise ConfigError(f"a cluster has 1 GPU or more; got {gpus}.")
        return -(-gpus // self.gpus_per_host)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What each worker computes in a step."""

    profile: ModelProfile
    """The backward, layer by layer, in seconds."""
    other_seconds: float
    """Everything else: forward, waiting for data, optimizer step."""
    per_gpu: int = 32
    """Units of a worker in a step."""

    def __post_init__(self) -> None:
        if self.per_gpu < 1 or not (self.other_seconds >= 0 and math.isfinite(self.other_seconds)):
            raise ConfigError(
                f"a worker computes 1 unit or more in 0 seconds or more beside the backward; got "
                f"per_gpu={self.per_gpu}, other_seconds={self.other_seconds!r}."
            )

    @property
    def compute_seconds(self) -> float:
        """Of a worker alone."""
        return self.other_seconds + self.profile.backward_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How gradients are sent."""

    algorithm: str = "halving_doubling"
    """Between hosts: one of `BETWEEN_HOSTS`."""
    bucket_bytes: float = 25 * 2**20
    """A bucket is full when it holds so many, as in DistributedDataParallel; 0 sends each layer on its own."""
    concurrency: int = 2
    """All-reduces in flight."""
    sharded: bool = False
    """Whether every GPU carries its part between hosts, instead of one carrying all."""
