"""Does a job under torchrun survive kills, and go on with the nodes that are left and with those that come back?"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import (
    OFTEN,
    STEPS,
    ForkedJob,
    assert_every_example_was_seen_in_its_place,
    assert_same_run,
    free_port,
    newest_checkpoint,
    num_steps,
    wait_for,
    write_ledger_task,
)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_ledger_task(tmp_path_factory.mktemp("task"))


def train(task: Path, out: Path) -> list[str]:
    return ["-m", "largebatch", "train", str(task), *OFTEN, "--out", str(out)]


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, the nearest first."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found[1:]


def workers_of(pid: int) -> list[int]:
    """The processes below an agent that train."""
    found: list[int] = []
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{each}/cmdline").read_bytes()
            if b"--checkpoint-seconds" in command and b"torch.distributed.run" not in command:
                found.append(each)
    return found


class Agent:
    """torchrun, and what it has started."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment
            )

    def kill(self) -> None:
        """Kill -9 the agent and all below it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGSTOP)  # so that it starts none while they are counted
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def is_running(self) -> bool:
        return self.process.poll() is None


def train_without_kills(task: Path, out: Path) -> Path:
    codes = ForkedJob(2, train(task, out)[2:], out.with_suffix(".log")).wait()
    assert codes == [0, 0], out.with_suffix(".log").read_text()
    return out


@pytest.mark.proofs
@pytest.mark.timeout(1800)
def test_twenty_kills_of_workers_and_of_whole_jobs_leave_the_run_that_never_was_killed(task, tmp_path):
    whole = train_without_kills(task, tmp_path / "whole")
    draw = random.Random(0)
    out, log = tmp_path / "run", tmp_path / "run.log"
    command = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=20", f"--master-port={free_port()}", *train(task, out)]
    agent = Agent(command, log)
    try:
        seen = 0
        for target in sorted(draw.sample(range(2, STEPS - 6), 20)):
            # Mostly in the middle of steps and saves; some while the workers start, which costs torchrun 30 s.
            target = min(STEPS - 6, max(target, seen + 1)) if draw.random() < 0.8 else target
            wait_for(lambda target=target, agent=agent: num_steps(out) >= target or not agent.is_running(), seconds=300)
            assert agent.is_running(), log.read_text()
            if draw.random() < 0.7:  # torchrun ends the other worker and starts both again
                wait_for(lambda agent=agent: len(workers_of(agent.process.pid)) == 2, seconds=120)
                workers, seen = workers_of(agent.process.pid), num_steps(out)
                os.kill(draw.choice(workers), signal.SIGKILL)
                wait_for(
                    lambda workers=workers, agent=agent: not set(workers) & set(workers_of(agent.process.pid)),
                    seconds=120,
                )
            else:
                seen = num_steps(out)
                agent.kill()
                agent = Agent(command, log)
            assert newest_checkpoint(out) >= seen - 2
        assert agent.process.wait(300) == 0, log.read_text()
    finally:
        agent.kill()
    assert_every_example_was_seen_in_its_place(out)
    assert_same_run(out, whole)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def two_nodes():
    """Two network namespaces with a cable between them: name, address and interface of each."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip (apt-get install iproute2)")
    names = [f"lb{os.getpid()}{side}" for side in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", f"cable{number}")
            for interface in ("lo", f"cable{number}"):
                ip("-n", name, "link", "set", interface, "up")
        yield [(name, f"10.77.0.{number + 1}", f"cable{number}") for number, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.proofs
@pytest.mark.timeout(900)
def test_a_job_of_two_nodes_goes_on_with_one_and_takes_the_other_back(task, tmp_path, two_nodes):
    whole = train_without_kills(task, tmp_path / "whole")
    out = tmp_path / "run"

    def start(number: int) -> Agent:
        namespace, address, interface = two_nodes[number]
        rendezvous = f"is_host={int(number == 0)},keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
        command = [
            "ip", "netns", "exec", namespace, *TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=20",
            "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=ledger", f"--rdzv-conf={rendezvous}",
            f"--local-addr={address}", *train(task, out),
        ]  # fmt: skip
        log = tmp_path / f"node{number}.log"
        # torch 2.14 says where workers meet in a node's first round only: a node that comes later waits in vain for
        # it, unless each round makes a meeting place of its own.
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": interface}
        return Agent(command, log, LEDGER_PAUSE_ALONE="0.3", **own)

    first, second = start(0), start(1)

    def said() -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(tmp_path.glob("node*.log")))

    def train_until(steps: int) -> None:
        wait_for(lambda: num_steps(out) >= steps or not first.is_running(), seconds=300)
        assert first.is_running(), said()

    try:
        train_until(5)
        assert len(workers_of(first.process.pid)) == len(workers_of(second.process.pid)) == 1
        second.kill()
        here = num_steps(out)
        train_until(here + 4)  # alone
        second = start(1)
        wait_for(lambda: bool(workers_of(second.process.pid)) or not first.is_running(), seconds=300)
        assert first.is_running(), said()  # taken back before the end
        assert first.process.wait(300) == 0 and second.process.wait(300) == 0, said()
    finally:
        first.kill()
        second.kill()
    assert json.loads((out / "timing.json").read_text())["num_workers"] == 2
    assert_every_example_was_seen_in_its_place(out)
    assert_same_run(out, whole, tolerance=1e-6)
