"""How do gradients travel? All-reduce algorithms, a hook for DistributedDataParallel, and a cluster on paper."""

from largebatch.parallel.calibrate import calibrate
from largebatch.parallel.choose import Choices
from largebatch.parallel.hook import PipelinedAllreduce, pipelined_allreduce
from largebatch.parallel.model_profile import ModelProfile, profile
from largebatch.parallel.topology import Topology, find_topology
from largebatch.parallel.transport import PeerLostError, Transport

__all__ = [
    "Choices", "ModelProfile", "PeerLostError", "PipelinedAllreduce", "Topology", "Transport", "calibrate",
    "find_topology", "pipelined_allreduce", "profile",
]  # fmt: skip
