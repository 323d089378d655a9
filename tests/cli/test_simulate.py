"""`largebatch simulate` answers for the paper's cluster, says what would help, and refuses in one sentence."""

import json
import resource
import signal

import pytest

from largebatch.cli.app import run

PAPER = ("--model", "resnet50", "--per-gpu", 32, "--network", "50gbit", "--latency", "20us", "--intra", "nvlink",
         "--backward", "120ms")  # fmt: skip


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments):
        code = run(["simulate", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_papers_cluster_and_far_beyond_it(cli):
    code, out, err = cli(*PAPER, "--gpus", "8,64,256,1024,16384", "--json")
    assert code == 0, err
    points = json.loads(out)["points"]
    assert [point["gpus"] for point in points] == [8, 64, 256, 1024, 16384]
    assert points[0]["iteration_ms"] == pytest.approx(232, abs=0.5)  # 29 hours for 90 epochs; Goyal 2017, section 5.5
    assert points[0]["efficiency"] == 1 and points[2]["efficiency"] == pytest.approx(0.90, abs=0.002)
    efficiencies = [point["efficiency"] for point in points]
    assert efficiencies == sorted(efficiencies, reverse=True)
    for point in points:
        whole = point["iteration_ms"] - point["waiting_ms"] - point["exposed_ms"]
        assert whole == pytest.approx(205.8, abs=0.1)  # of a worker alone, everywhere the same
        assert point["algorithms_ms"][point["algorithm"] or "ring"] <= min(point["algorithms_ms"].values()) * 1.001
        assert {"bucket_mb", "concurrency", "hosts", "busy_ms", "units_per_second"} <= point.keys()
    assert points[-1]["algorithm"] == "halving_doubling" and points[0]["algorithm"] is None


def test_people_get_a_table_and_a_trace(cli, tmp_path):
    code, out, err = cli(*PAPER, "--gpus", "8,256", "--trace", tmp_path / "step.json", "--goal", 0.97)
    assert code == 0 and out.strip() == str(tmp_path / "step.json")
    assert "halving_doubling" in err and "90.0%" in err and "jitter" in err
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def test_a_goal_is_answered_in_json(cli):
    code, out, _ = cli("--backward", "60ms", "--network", "10gbit", "--gpus", "8,256", "--goal", 0.88, "--json")
    goal = json.loads(out)["goal"]
    reached = [change["name"] for change in goal["changes"] if change["reaches"]]
    assert code == 0 and goal["gpus"] == 256 and reached == ["batch of a GPU", "bandwidth"]
    code, out, err = cli("--backward", "60ms", "--gpus", "8,16", "--goal", 0.5)
    assert code == 0 and "is reached as it is" in err


def test_what_was_asked_for_is_what_is_simulated(cli):
    common = ("--backward", "60ms", "--network", "10gbit", "--gpus", "256", "--json")
    ask = ("--algorithm", "ring", "--bucket", "25MB", "--concurrency", 3, "--intra", "pcie", "--jitter", "0")
    (point,) = json.loads(cli(*common, *ask)[1])["points"]
    assert (point["algorithm"], point["bucket_mb"], point["concurrency"]) == ("ring", 25, 3)
    assert point["waiting_ms"] == 0
    slower = ("--straggler", "5ms", "--slow-link", 2, "--other", "80ms")
    (other,) = json.loads(cli(*common, *ask, *slower)[1])["points"]
    assert other["waiting_ms"] == 5 and other["busy_ms"] == pytest.approx(2 * point["busy_ms"], rel=1e-6)
    assert other["iteration_ms"] - other["exposed_ms"] == pytest.approx(60 + 80 + 5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--backward", "120"), "--backward is a time such as 120ms"),
        (("--backward", "-1ms"), "--backward is a time such as 120ms"),
        (("--backward", "0ms"), "a backward takes seconds, more than 0"),
        (("--backward", "1ms", "--network", "50"), "--network is a bandwidth such as 50gbit"),
        (("--backward", "1ms", "--network", "0gbit"), "--network is a bandwidth above 0"),
        (("--backward", "1ms", "--latency", "1.2.3us"), "--latency is a time"),
        (("--backward", "1ms", "--gpus", "8,0"), "--gpus is a list of whole numbers"),
        (("--backward", "1ms", "--gpus", "eight"), "--gpus is a list of whole numbers"),
        (("--backward", "1ms", "--model", "resnet51"), "no profile of 'resnet51' is built in"),
        (("--backward", "1ms", "--intra", "copper"), "--intra is nvlink, pcie or a bandwidth"),
        (("--backward", "1ms", "--algorithm", "butterfly"), "--algorithm is one of"),
        (("--backward", "1ms", "--bucket", "25"), "--bucket is a size such as 25MB"),
        (("--backward", "1ms", "--jitter", "9x"), "--jitter is a part such as 9%"),
        (("--backward", "1ms", "--slow-link", 0.5), "slow_link is a number, 1 or more"),
        (("--backward", "1ms", "--gpus", "8", "--goal", 0.9), "the goal is sought on more than 8 GPUs"),
        (("--backward", "1ms", "--gpus", "8,9", "--goal", 97), "the goal is an efficiency above 0 and below 1"),
        (("--backward", "1ms", "--gpus", "8", "--trace", "no/such/folder"), "the trace cannot be written"),
        (("--backward", "1e308s"), "--backward is 1e+06 s at most; got '1e308s'"),
        (("--backward", "1ms", "--other", "1e308s"), "--other is 1e+06 s at most"),
        (("--backward", "1ms", "--latency", "1e308s"), "--latency is 1e+06 s at most"),
        (("--backward", "1ms", "--network", "1e-320gbit"), "--network is a bandwidth from"),
        (("--backward", "1ms", "--intra", "1e300gbit"), "--intra is a bandwidth from"),
        (("--backward", "1ms", "--bucket", "1e300GB"), "--bucket is 1e+15 bytes at most"),
        (("--backward", "1ms", "--jitter", "1e308"), "--jitter is 1 at most"),
        (("--backward", "1ms", "--slow-link", 1e308), "--slow-link is 1e+06 times at most"),
        (("--backward", "1ms", "--gpus", "9" * 400), "--gpus is 1,000,000,000 at most"),
        (("--backward", "1ms", "--gpus", "9" * 5000), "one has more than 4,000 digits"),
        (("--backward", "1ms", "--per-gpu", 10**400), "--per-gpu is 1,000,000,000 at most"),
        (("--backward", "1ms", "--concurrency", 10**30), "--concurrency is 1,000,000,000 at most"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(cli, arguments, says):
    code, out, err = cli(*arguments)
    assert code == 2 and says in err and out == "" and "Traceback" not in err


def test_more_in_flight_than_there_are_buckets_costs_and_changes_nothing(cli, tmp_path):
    common = ("--backward", "60ms", "--gpus", "16", "--bucket", "25MB", "--json", "--trace", tmp_path / "step.json")
    (some,), (many,) = (
        json.loads(cli(*common, "--concurrency", number)[1])["points"] for number in (100, 1_000_000_000)
    )
    assert many | {"concurrency": 100} == some


@pytest.mark.parametrize("jitter", ["1e-9", "1e-320"])
def test_a_straggler_is_late_by_all_it_is_late_by_however_small_the_jitter(cli, jitter):
    common = ("--backward", "60ms", "--gpus", "256", "--straggler", "5ms", "--json", "--jitter")
    code, out, err = cli(*common, jitter)
    assert code == 0, err
    assert json.loads(out)["points"][0]["waiting_ms"] == pytest.approx(5, abs=1e-4)


def test_a_disk_that_is_full_leaves_the_trace_that_was_there(cli, tmp_path):
    (tmp_path / "step.json").write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        code, out, err = cli("--backward", "1ms", "--gpus", "8", "--trace", "step.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2 and out == "" and "the trace cannot be written to step.json" in err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("step.json", "old")]
