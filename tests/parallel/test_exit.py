"""Does a process whose peer was lost end as Python ends on any error: its message, exit code 1, no abort?

A thread that is inside torch when the interpreter ends takes the whole process down with SIGABRT, and torchrun then
tells of that instead of the lost rank.
"""

import os
import subprocess
import sys

import pytest

from jobs import free_port

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from largebatch.parallel import pipelined_allreduce

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(30, 30) for _ in range(6))), bucket_cap_mb=0.005)
handle = pipelined_allreduce(model, algorithm=sys.argv[1], timeout=8.0)
for step in range(4):
    loss = model(torch.randn(4, 30)).square().mean()
    if step == 2 and dist.get_rank() == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
"""


def ended(algorithm, killed):
    """Exit code and standard error of each of two workers."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, algorithm, str(killed)]
    workers = [
        subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, text) for worker, text in zip(workers, said, strict=True)]


@pytest.mark.parametrize(("algorithm", "killed"), [("backend", 1), ("ring", -1)])
def test_the_end_is_a_message_and_exit_code_1_or_0_where_all_is_well(algorithm, killed):
    found = ended(algorithm, killed)
    if killed < 0:
        assert [code for code, _ in found] == [0, 0], found
        return
    code, said = found[1 - killed]
    assert code == 1, said
    assert f"PeerLostError: rank {killed} was lost" in said
