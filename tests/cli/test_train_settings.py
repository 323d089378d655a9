"""What a task fixes, `largebatch train` keeps: the forward its loss is defined over, its own measures, its backbone."""

import pytest

from largebatch.cli.app import run
from largebatch.records.files import read_json, read_lines

TASK = """
import torch
import largebatch as lb
from largebatch.tasks.task import Task, TensorSplit

inputs = torch.randn(144, 4, generator=torch.Generator().manual_seed(0))
targets = inputs.sum(1, keepdim=True)

def loss(model, batch):
    sizes.append(len(batch[0]))
    return (model(batch[0]) - batch[1]).square().sum()

sizes = []
task = Task(
    name="fixed", train=TensorSplit((inputs[:128], targets[:128])), held_out=TensorSplit((inputs[128:], targets[128:])),
    model=lambda: torch.nn.Linear(4, 1), loss=loss, errors=loss, num_goal_examples=16,
    recipe=lb.Recipe(reference_batch=16, reference_lr=0.01, epochs=1, warmup_epochs=0.0),
    microbatch=4, measures=lambda model, split: {"half_sum": float(len(split)) / 32 + 0 * model.weight.sum().item()},
)
"""


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "fixed.py"
    path.write_text(TASK)
    return path


def test_the_microbatch_of_the_loss_is_kept_at_every_batch_and_measures_are_taken_at_the_end(task, tmp_path, capsys):
    for batch in (16, 64):
        out = tmp_path / str(batch)
        assert run(["train", str(task), "--batch", str(batch), "--out", str(out)]) == 0
        assert {line["num_microbatches"] for line in read_lines(out / "steps.jsonl")} == {batch // 4}
        assert read_json(out / "measures.json") == {"half_sum": 0.5}
    said = capsys.readouterr().err
    assert "half sum: 50.0 %" in said and "is defined over" not in said


def test_a_layout_that_cannot_keep_it_is_said(task, tmp_path, capsys):
    assert run(["train", str(task), "--batch", "18", "--out", str(tmp_path / "a"), "--max-steps", "1"]) == 0
    assert "defined over 4 examples in a forward" in capsys.readouterr().err
    assert run(["train", str(task), "--batch", "4", "--out", str(tmp_path / "b"), "--max-steps", "1"]) == 0
    assert "so the noise scale is not measured" in capsys.readouterr().err


def test_a_task_without_a_backbone_takes_none(task, tmp_path, capsys):
    assert run(["train", str(task), "--backbone", str(tmp_path / "model.pt")]) == 2
    assert "takes no backbone" in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_prints_the_full_size_run_without_its_data(tmp_path, monkeypatch, capsys):
    """Goyal 2017, sec. 5.1: 3.2 at 8192, 782 steps of warmup, 14,075 in all; nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert run(["train", "imagenet", "--batch", "8192", "--dry-run"]) == 0
    out, said = capsys.readouterr()
    assert "14075" in said and "782" in said and "3.2" in said and "23.74" in said
    assert out.strip() == "largebatch train imagenet --data DIR --batch 8192"
    assert list(tmp_path.iterdir()) == []
