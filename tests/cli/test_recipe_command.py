"""`largebatch recipe` says what a run would be, and its sbatch script stops and queues again as it says."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from largebatch.cli.app import run
from largebatch.cli.recipe import describe
from largebatch.errors import ConfigError
from largebatch.tasks.published import published

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "imagenet.sbatch"


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments):
        code = run(["recipe", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_hour_of_the_paper_comes_out_without_data(cli):
    code, out, err = cli("imagenet", "--gpus", 256, "--local-batch", 32, "--json")
    assert code == 0, err
    said = json.loads(out)
    # Goyal 2017, Table 1 and sec. 5.1: 3.2 at 8k, 90 epochs of 156.39 steps, n = 32, 23.74 +- 0.09.
    assert (said["batch"], said["lr"], said["num_steps"], said["microbatch"]) == (8192, 3.2, 14075, 32)
    assert "23.74 ± 0.09 % (Goyal 2017, Table 1)" in said["curve"][0]
    assert "plain batch norm" in said["batch_norm"]
    assert "takes 1.00 hours" in said["loading"]  # sec. 5.5, from the rate and back
    assert all(number["rule"] and number["source"] for number in said["numbers"])
    assert said["warnings"] == []


def test_the_command_it_prints_stands_alone_on_standard_output(cli):
    code, out, err = cli("imagenet", "--gpus", 64, "--local-batch", 128)
    assert code == 0
    words = out.split()
    assert words[0] == "torchrun" and out.count("\n") == 1
    assert {"--nnodes=8", "--nproc-per-node=8", "8192"} <= set(words)
    assert json.loads(cli("imagenet", "--gpus", 64, "--local-batch", 128, "--json")[1])["microbatch"] == 32
    assert "4 ghost batches of 32" in err and "32 at a time" in err


def test_the_batch_of_all_workers_is_the_same_as_the_share_of_each(cli):
    shares, whole, both = (
        cli("imagenet", "--gpus", 64, *how, "--json")
        for how in (["--local-batch", 128], ["--batch", 8192], ["--batch", 8192, "--local-batch", 128])
    )
    assert shares[0] == 0 and shares == whole == both
    code, _, err = cli("imagenet", "--gpus", 64, "--batch", 8192, "--local-batch", 32)
    assert code == 2 and "--batch 8192 is not --gpus 64 times --local-batch 32, which is 2048" in err
    code, _, err = cli("imagenet", "--gpus", 64, "--batch", 8200)
    assert code == 2 and "8192" in err  # the nearest that can be dealt out


def test_a_batch_beyond_the_elbow_is_told_and_nothing_is_promised_beyond_the_figures(cli):
    _, _, err = cli("imagenet", "--gpus", 512)
    assert "24.79 ± 0.27 %" in err and "beyond the elbow at 8192" in err and "note: a batch of 16384 is beyond" in err
    _, _, err = cli("imagenet-resnet101", "--gpus", 512)
    assert "nothing is published above a batch of 8192" in err


def test_a_small_share_needs_a_group_of_workers_for_its_n(cli):
    code, _, err = cli("imagenet", "--gpus", 64, "--local-batch", 16)
    assert code == 0
    assert "group batch norm over 2 workers of 16" in err and "not over 16" in err


def test_the_given_rate_is_what_each_loader_must_reach(cli):
    _, out, _ = cli("detection", "--gpus", 8, "--images-per-second", 12.5, "--json")
    said = json.loads(out)
    assert said["examples_per_second_per_gpu"] == 12.5 and "100 for all (as given)" in said["loading"]
    # 22 epochs of 117,266 pictures at 100 a second.
    assert f"{22 * 117_266 / 100 / 3600:.2f} hours" in said["loading"]


def test_a_task_with_its_data_has_the_same_without_a_curve(cli):
    code, out, _ = cli("digits", "--gpus", 2, "--local-batch", 32, "--json")
    said = json.loads(out)
    assert code == 0 and (said["batch"], said["curve"], said["examples_per_second_per_gpu"]) == (64, [], None)
    assert said["command"] == "torchrun --nproc-per-node=2 -m largebatch train digits --batch 64"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("imagnet",), ("imagnet", "Did you mean 'imagenet'")),
        (("imagenet", "--gpus", 64, "--local-batch", 100), ("6400", "64 workers", "6144 or 8192")),
        (("detection", "--gpus", 4, "--local-batch", 3), ("2 at a time", "8 or 16")),
        (("imagenet", "--gpus", 100_000), ("3200000", "1281167")),
        (("imagenet", "--images-per-second", 0), ("--images-per-second", "above 0")),
        (("imagenet", "--images-per-second", "nan"), ("--images-per-second", "above 0")),
        (("imagenet", "--images-per-second", "1e-320"), ("--images-per-second", "from 1e-06 to 1e+12")),
        (("imagenet", "--images-per-second", "1e308"), ("--images-per-second", "from 1e-06 to 1e+12")),
        (("imagenet", "--gpus", 0), ("--gpus", "1")),
        (("imagenet", "--local-batch", -1), ("--local-batch", "1")),
    ],
)
def test_bad_input_ends_in_one_sentence(cli, arguments, words):
    code, out, err = cli(*arguments)
    assert code == 2 and out == "" and "Traceback" not in err
    for word in words:
        assert word in err, err


def test_a_batch_that_the_workers_do_not_divide_names_the_nearest():
    with pytest.raises(ConfigError, match="The nearest that can: 768 or 1536"):
        describe(published("imagenet"), batch=1000, gpus=24)


@pytest.mark.parametrize(("gpus", "nodes", "per_node"), [(8, 1, 8), (12, 2, 6), (13, 13, 1), (2, 1, 2)])
def test_the_command_starts_every_worker_once(gpus, nodes, per_node):
    command = describe(published("imagenet"), batch=32 * gpus, gpus=gpus).command
    assert f"--nproc-per-node={per_node} " in command
    assert (f"--nnodes={nodes} " in command) == (nodes > 1)


def test_the_sbatch_script_is_bash():
    subprocess.run(["bash", "-n", SCRIPT], check=True)


def started(tmp_path, srun):
    """The script with stand-ins for SLURM's own commands; `ready` is a pipe on which the stand-in step says it runs."""
    for name, body in {
        "srun": srun,
        "scontrol": '[ "$1" = show ] && echo node1 && echo node2 || echo "$@" $(ls saved) >> requeued',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": "/pictures", "SLURM_JOB_ID": "77", "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }  # fmt: skip
    bash = shutil.which("bash") or "bash"
    return subprocess.Popen([bash, SCRIPT], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_preempted_job_saves_and_queues_again(tmp_path, number):
    # The stand-in saves on SIGTERM as `largebatch train` does and ends with its code of a stopped run.
    srun = (
        f"sleep 600 > /dev/null & nap=$!; trap 'sleep 0.3; echo saved > {tmp_path}/saved; kill $nap; exit 130' TERM; "
        'echo "$@"; wait $nap'
    )
    job = started(tmp_path, srun)
    arguments = job.stdout.readline()  # the step runs
    assert "--rdzv-endpoint=node1:20077 --rdzv-id=77" in arguments and "--nnodes=2" in arguments
    job.send_signal(number)
    job.communicate(timeout=30)
    assert (tmp_path / "requeued").read_text() == "requeue 77 saved\n"  # and not before it was saved


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_that_ended_by_itself_is_not_queued_again(tmp_path, code):
    job = started(tmp_path, f"exit {code}")
    job.communicate(timeout=30)
    assert job.returncode == code and not (tmp_path / "requeued").exists()
