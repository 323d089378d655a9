"""The whole study on a task that is drawn at random: it must recover a noise scale and a front that nobody typed in."""

import json

import numpy as np
import pytest

from drawn_task import write_task
from largebatch.study.study import study
from oracles import drawn_front as oracle

pytestmark = [pytest.mark.xdist_group("study"), pytest.mark.timeout(900)]
FOLDERS = {}


@pytest.fixture(scope="module", params=[11, 12])
def drawn(request, tmp_path_factory):
    """(problem, result) of a study of randomly drawn data; goals lie between the first loss and the floor."""
    folder = tmp_path_factory.mktemp("drawn")
    inputs, targets, _ = oracle.draw_problem(request.param)
    inputs, targets = inputs.astype(np.float32).astype(float), targets.astype(np.float32).astype(float)
    first, solution = oracle.losses_at(inputs, targets, np.zeros(inputs.shape[1])), np.linalg.lstsq(inputs, targets)[0]
    floor = oracle.losses_at(inputs, targets, solution)
    goals = tuple(round(floor + share * (first - floor), 4) for share in (0.3, 0.12, 0.05))
    task = write_task(folder / "task", inputs, targets, batch=8, lr=0.05, epochs=6, goals=goals)
    study(str(task), out=folder / "out", jobs=2)
    FOLDERS[request.param] = (task, folder)
    return (inputs, targets, goals), json.loads((folder / "out" / "result.json").read_text())


def test_the_noise_scale_is_the_datas_own(drawn):
    """Sums of exact tr(Sigma) and |G|^2 along an independent run at the same rate (McCandlish 2018, eq. 2.9)."""
    (inputs, targets, goals), result = drawn
    rows = np.arange(len(inputs))
    ratios = []
    for seed in range(8):
        _, path = oracle.run(
            inputs, targets, 8, result["tuned_lr"], np.random.default_rng(seed), goals[-1:], rows, 5000
        )
        moments = np.array([oracle.moments_at(inputs, targets, weights) for weights in path[:-1]])
        ratios.append(moments[:, 0].sum() / moments[:, 1].sum())
    truth, spread = np.mean(ratios), np.std(ratios)
    found = result["predictions"][-1]["b_simple"]
    assert result["predictions"][-1]["resolved"]
    low, high = found["low"] - 3 * spread, (found["high"] or np.inf) + 3 * spread
    assert low <= truth <= high, (truth, spread, found)
    assert found["value"] == pytest.approx(truth, rel=0.5)


def test_the_front_is_the_brute_force_front(drawn):
    (inputs, targets, goals), result = drawn
    front = result["fronts"][-1]
    assert front["resolved"], front["reason"]
    batches = [8, 16, 32, 64, 128, 256, 512]
    lrs = np.exp(np.linspace(np.log(0.015), np.log(1.8), 14))
    rows = np.arange(len(inputs))
    steps = [
        oracle.best_steps(inputs, targets, batch, goals[-1], rows, lrs, 6, max_steps=16000 // batch + 300)
        for batch in batches
    ]
    truth = oracle.critical_batch(batches, steps)
    low, high = front["b_crit"]["low"], front["b_crit"]["high"]
    assert low / 1.3 <= truth <= high * 1.3, (truth, front["b_crit"])
    assert front["b_crit"]["value"] == pytest.approx(truth, rel=0.5)
    measured = {point["batch"]: np.exp(np.mean(np.log(point["steps"]))) for point in front["points"] if point["steps"]}
    for batch, truth in zip(batches, steps, strict=True):
        if batch in measured:
            assert measured[batch] == pytest.approx(truth, rel=0.35), batch


def test_one_job_and_two_give_the_same_result(drawn, request):
    """Also a second run into a fresh folder: result.json is the same, byte for byte."""
    task, folder = FOLDERS[request.node.callspec.params["drawn"]]
    if request.node.callspec.params["drawn"] != 11:
        return
    study(str(task), out=folder / "again", jobs=1)
    assert (folder / "again" / "result.json").read_bytes() == (folder / "out" / "result.json").read_bytes()


def test_a_finished_study_answers_at_once(drawn, request, monkeypatch):
    task, folder = FOLDERS[request.node.callspec.params["drawn"]]
    before = (folder / "out" / "result.json").read_bytes()
    monkeypatch.setattr("largebatch.study.launch.run_cell", lambda *_: pytest.fail("trained again"))
    study(str(task), out=folder / "out", jobs=1)
    assert (folder / "out" / "result.json").read_bytes() == before
