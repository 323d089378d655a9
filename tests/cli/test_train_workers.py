"""`largebatch train` on several workers: one voice, one folder, one exit code, whatever ends it."""

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # DDP imports it: once here instead of in every worker
import torch.distributed.fsdp

from drawn_task import write_task
from largebatch.cli.app import run
from largebatch.records.files import read_lines
from largebatch.train.checkpoint import load_weights
from oracles.drawn_front import draw_problem

INPUTS, TARGETS, _ = draw_problem(3)


@pytest.fixture
def task(tmp_path):
    return write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=4)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def work(rank, world_size, port, folder, arguments, environment):
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    from largebatch.cli import output

    output.console.file = sys.stderr
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_PORT": str(port), "COLUMNS": "300", **environment,
    }  # fmt: skip
    torch.set_num_threads(1)
    code = 1
    try:
        code = run([str(word) for word in arguments])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Job:
    """`largebatch train` on forked workers with the environment of torchrun, without its seconds of imports."""

    def __init__(self, world_size, folder, *arguments, per_worker=lambda rank: (), environment=None):
        folder.mkdir(exist_ok=True)
        context, port = multiprocessing.get_context("fork"), free_port()
        self.folder, self.world_size = folder, world_size
        self.processes = [
            context.Process(
                target=work,
                args=(rank, world_size, port, folder, ["train", *arguments, *per_worker(rank)], environment or {}),
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def end(self, seconds=120.0):
        """Exit codes, and what each worker said, by rank."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in hung:
            self.processes[rank].kill()
        assert not hung, f"workers {hung} did not end: {self.said()}"
        return [process.exitcode for process in self.processes], self.said()

    def said(self):
        return [" ".join((self.folder / f"{rank}.err").read_text().split()) for rank in range(self.world_size)]


def refused(result, *words, speaker=0):
    """All workers end with 2, and one alone says why, in one sentence."""
    codes, said = result
    assert codes == [2] * len(codes), said
    assert [text.count("error:") for text in said] == [int(rank == speaker) for rank in range(len(said))], said
    assert not any("Traceback" in text for text in said), said
    for word in words:
        assert word in said[speaker], said[speaker]


def test_two_workers_write_one_record_and_one_speaks(tmp_path, task):
    codes, said = Job(2, tmp_path / "job", task, "--out", tmp_path / "two", "--monitor-every", 1).end()
    assert codes == [0, 0], said
    assert "held-out error" in said[0] and "B_simple" in said[0]
    rate = re.search(r"done ([\d,]+) examples/s per worker, efficiency (\d+) %", said[0])
    assert rate is not None and int(rate[1].replace(",", "")) > 0 and 0 <= int(rate[2]) <= 100
    assert said[1] == "" and (tmp_path / "job" / "1.out").read_text() == ""
    assert (tmp_path / "job" / "0.out").read_text() == f"{tmp_path / 'two' / 'run.json'}\n"
    assert run(["train", str(task), "--out", str(tmp_path / "one")]) == 0
    ours, theirs = (load_weights(tmp_path / name / "model.pt")["weight"] for name in ("two", "one"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    first, second = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("two", "one"))
    assert first["spec"] == second["spec"] and first["num_step_lines"] == second["num_step_lines"] == 64
    assert first["epochs"] == [pytest.approx(row, rel=1e-5) for row in second["epochs"]]


def wait_for_steps(folder, number):
    deadline = time.monotonic() + 120
    while len(read_lines(folder / "steps.jsonl")) < number and time.monotonic() < deadline:
        time.sleep(0.005)


def test_a_polite_kill_of_one_worker_is_a_checkpoint_of_all_and_the_run_goes_on_alone(tmp_path):
    """The second signal, here to the same worker, must not break the first one's farewell."""
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=20)
    assert run(["train", str(task), "--out", str(tmp_path / "whole")]) == 0
    arguments = (task, "--out", tmp_path / "run", "--monitor-every", 1)
    job = Job(2, tmp_path / "job", *arguments)
    wait_for_steps(tmp_path / "run", 20)
    for _ in range(2):
        os.kill(job.processes[1].pid, signal.SIGTERM)
    codes, said = job.end()
    assert codes == [130, 130], said
    assert "run the same command again" in said[0] and said[1] == ""
    steps = len(read_lines(tmp_path / "run" / "steps.jsonl"))
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{steps:09d}", "what was done until the signal is in the checkpoint"
    assert not (tmp_path / "run" / "run.json").exists()
    assert run(["train", *map(str, arguments)]) == 0
    ours, theirs = (load_weights(tmp_path / name / "model.pt")["weight"] for name in ("run", "whole"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert [line["step"] for line in read_lines(tmp_path / "run" / "steps.jsonl")] == list(range(1, 321))


def test_a_worker_that_is_killed_ends_the_others_with_a_sentence(tmp_path):
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=400)
    job = Job(3, tmp_path / "job", task, "--batch", 24, "--out", tmp_path / "run", "--monitor-every", 1)
    wait_for_steps(tmp_path / "run", 20)
    job.processes[2].kill()
    codes, said = job.end()
    assert codes == [2, 2, -signal.SIGKILL], said
    assert "another worker of this job ended" in said[0] and "run the same command again" in said[0]
    assert said[1] == "" and "Traceback" not in said[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_still_waits_for_the_others_ends_when_it_is_asked_to(number):
    """Its one peer never starts; torchrun would wait 30 s for it, and kill it."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    place = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
    }  # fmt: skip
    process = multiprocessing.get_context("fork").Process(target=meet_nobody, args=(place,))
    process.start()
    listener.settimeout(60)
    connection, _ = listener.accept()  # it is inside init_process_group now, and nobody answers
    os.kill(process.pid, number)
    process.join(20)
    ended = process.exitcode
    process.kill()
    connection.close()
    listener.close()
    assert ended == -number


def meet_nobody(place):
    os.environ |= place
    os._exit(run(["train", "digits"]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch", 33), ("batch of 33", "2 workers", "32 or 34")),
        (("--batch", 1, "--microbatch", 1), ("noise scale needs two batch sizes", "Use --batch 2")),
        (("--batch", 5000), ("5000", "at most 256")),
        (("--parallel", "zero3"), ("parallel='zero3'", "ddp, fsdp")),
        (("--precision", "fp8"), ("precision='fp8'", "float32, bf16")),
        (("--monitor-every", "often"), ("--monitor-every", "'often'", "auto")),
        (("--device", "gpu"), ("device 'gpu'", "--device cpu")),
    ],
)
def test_what_cannot_be_is_one_sentence_of_the_first_worker(tmp_path, task, arguments, words):
    refused(Job(2, tmp_path / "job", task, "--out", tmp_path / "out", *arguments).end(), *words)
    assert not (tmp_path / "out").exists(), "nothing is written before the input is known to be good"


def test_a_folder_that_is_not_ours_is_refused_on_all(tmp_path, task):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    refused(Job(2, tmp_path / "job", task, "--out", tmp_path / "out").end(), "thesis.tex", "Choose another --out")


def test_a_task_that_one_worker_alone_cannot_load_is_said_by_that_worker(tmp_path, task):
    missing = tmp_path / "away.py"
    job = Job(2, tmp_path / "job", "--out", tmp_path / "out", per_worker=lambda rank: [missing if rank else task])
    refused(job.end(), "away.py", speaker=1)


def test_a_training_that_diverges_says_step_batch_and_rate_once(tmp_path, task):
    result = Job(2, tmp_path / "job", task, "--out", tmp_path / "out", "--lr", 1e6).end()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    refused(result, f"diverged at step {record['steps']} of 64", "batch 16", "1e+06 at the peak", "Lower --lr")


@pytest.fixture
def alone(capsys, monkeypatch):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        code = run(["train", *map(str, arguments)])
        return [code], [" ".join(capsys.readouterr().err.split())]

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("RANK, WORLD_SIZE is set", "LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not")),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK=2, WORLD_SIZE=2", "a rank below the world size")),
        ({"RANK": "first", "WORLD_SIZE": "2"}, ("RANK=first", "whole numbers")),
    ],
)
def test_an_environment_that_is_no_place_in_a_job(alone, task, tmp_path, monkeypatch, environment, words):
    rest = (
        {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if environment["WORLD_SIZE"] == "2" else {}
    )
    half = words[0].startswith("RANK, ")
    for name, value in (environment | ({} if half else rest)).items():
        monkeypatch.setenv(name, value)
    refused(alone(task, "--out", tmp_path / "out"), *words)


def test_an_address_that_something_left_behind_makes_no_job(alone, task, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    codes, _ = alone(task, "--out", tmp_path / "out")
    assert codes == [0]


def test_a_port_in_use(alone, task, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        refused(alone(task, "--out", tmp_path / "out"), f"port {port}", "in use", "--master-port")


def test_fsdp_without_a_job_says_how_to_start_one(alone, task, tmp_path):
    refused(alone(task, "--out", tmp_path / "out", "--parallel", "fsdp"), "torchrun --nproc-per-node=2")


def test_another_number_of_epochs_shrinks_the_whole_schedule(alone, tmp_path):
    codes, said = alone("digits", "--batch", 64, "--epochs", 5, "--max-steps", 3, "--out", tmp_path / "out")
    assert codes == [0], said
    spec = json.loads((tmp_path / "out" / "run.json").read_text())["spec"]
    recipe = json.loads((tmp_path / "out" / "train.json").read_text())["recipe"]
    assert spec["max_steps"] == 3 and recipe["epochs"] == 5
    assert recipe["decay_epochs"] == [3, 4], "digits decays after epochs 6 and 8 of 10"
    assert recipe["warmup_epochs"] == 1.5, "and warms up over 3"


@pytest.mark.parametrize("flags", [("--precision", "bf16"), ("--channels-last",), ("--seed", 1)])
def test_what_changes_numbers_is_another_run(alone, task, tmp_path, flags):
    assert alone(task, "--out", tmp_path / "out", "--max-steps", 2)[0] == [0]
    refused(alone(task, "--out", tmp_path / "out", "--max-steps", 2, *flags), "holds another training run")
    assert alone(task, "--out", tmp_path / "out", "--max-steps", 2, "--loaders", 1, "--checkpoint-seconds", 1)[0] == [0]


@pytest.mark.proofs
def test_torchrun_trains_and_hands_its_own_signal_on(tmp_path):
    """As on a cluster: torchrun is asked to end, every worker saves and leaves, and the same command goes on."""
    task = write_task(tmp_path / "task", INPUTS[:256], TARGETS[:256], epochs=30)
    command = [
        Path(sys.executable).with_name("torchrun"), "--nproc-per-node=2", "--rdzv-endpoint=localhost:0",
        "--rdzv-backend=c10d", "-m", "largebatch", "train", task, "--out", tmp_path / "run", "--monitor-every", "1",
    ]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(tmp_path / "run", 50)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and "run the same command again" in " ".join(err.split()), err
    stood = int(max((tmp_path / "run" / "checkpoints").glob("step-*")).name[5:])
    assert stood >= 50
    again = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=250)
    assert again.returncode == 0, again.stderr
    assert [line["step"] for line in read_lines(tmp_path / "run" / "steps.jsonl")] == list(range(1, 481))
