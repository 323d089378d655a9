"""The detection task: its own normalisation, its error, average precision, and weights from a classification run."""

import copy
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from coco_folder import random_pictures, write_folder, write_half
from largebatch.errors import CheckpointError, ConfigError, DataError
from largebatch.recipe.loss import normalise
from largebatch.recipe.recipe import Recipe
from largebatch.records.schema import RunSpec
from largebatch.tasks import detection
from largebatch.tasks.catalog import load_task
from largebatch.tasks.coco import CocoSplit
from largebatch.tasks.detection import errors, flip, loss, make_task, read_halves, table_3b_recipe
from largebatch.tasks.detection_ap import average_precision, detections, score
from largebatch.tasks.detection_model import DetectorShape, make_detector
from largebatch.tasks.task import Task
from largebatch.train.checkpoint import save_weights
from largebatch.train.loop import train
from workers import on_workers

pytest.importorskip("pycocotools", reason="pip install pycocotools")
torchvision = pytest.importorskip("torchvision", reason="pip install torchvision")

TINY = DetectorShape(
    resnet="resnet18", min_size=64, max_size=64, anchor_sizes=(12, 20, 28, 36, 48), fpn_channels=32, box_features=32,
    mask_channels=(32,), proposals=50, anchors_sampled=32, rois_sampled=16, detections=10,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def task(folder: Path) -> Task:
    return _task(folder)


def _task(folder: Path, backbone: Path | None = None) -> Task:
    train_half, held_out = read_halves("coco", folder, [])
    recipe = Recipe(reference_batch=4, reference_lr=0.02, epochs=1, warmup="none", nesterov=False)
    return make_task("tiny", train_half, held_out, TINY, recipe, backbone)


def _model(task: Task, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return task.model()


def _gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad])


# The loss's normalisation


class Sums(nn.Module):
    """Stands for a detector: its losses are means over regions, of which each picture has as many as it is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, pictures: list[torch.Tensor], targets: list[dict]) -> dict[str, torch.Tensor]:
        regions = torch.cat([picture.flatten() for picture in pictures])
        return {"box": self.weight * regions.mean(), "mask": self.weight**2 * regions.square().mean()}


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_step_is_the_mean_over_pictures_of_their_microbatches_losses(sizes: list[int], seed: int):
    """In float64, by hand: sum over microbatches of n_mb / n times (w mean(r) + w^2 mean(r^2)), and its derivative."""
    random = np.random.default_rng(seed)
    parts = [[random.random(int(random.integers(1, 9))) for _ in range(size)] for size in sizes]
    model, total = Sums(), sum(sizes)
    stepped = 0.0
    for part in parts:
        batch = ([torch.from_numpy(regions) for regions in part], [{} for _ in part])
        share = normalise(loss(model, batch), total)
        share.backward()
        stepped += share.item()
    expected = slope = 0.0
    for part in parts:
        regions = np.concatenate(part)
        expected += len(part) / total * (2 * regions.mean() + 4 * (regions**2).mean())
        slope += len(part) / total * (regions.mean() + 4 * (regions**2).mean())
    assert stepped == pytest.approx(expected, rel=1e-12)
    assert model.weight.grad.item() == pytest.approx(slope, rel=1e-12)


def _microbatch_gradient(task: Task, model: nn.Module, indices: list[int], seed: int, total: int) -> float:
    torch.manual_seed(seed)  # as the loop does before each microbatch: regions are sampled
    share = normalise(task.loss(model, task.train.fetch(torch.tensor(indices))), total)
    share.backward()
    return share.item()


def test_accumulating_2_and_2_pictures_is_the_mean_of_torchvisions_own_losses(task: Task):
    model = _model(task)
    stepped = sum(_microbatch_gradient(task, model, part, seed, 4) for seed, part in enumerate([[0, 1], [2, 3]]))
    accumulated = _gradient(model).double()
    expected, gradient = 0.0, torch.zeros_like(accumulated)
    for seed, part in enumerate([[0, 1], [2, 3]]):
        model.zero_grad()
        torch.manual_seed(seed)
        parts = model(*task.train.fetch(torch.tensor(part)))
        assert set(parts) == {"loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg"}
        sum(parts.values()).backward()
        expected += sum(value.double().item() for value in parts.values()) / 2
        gradient += _gradient(model).double() / 2
    assert stepped == pytest.approx(expected, rel=1e-6)
    # float32 gradients of sums of some thousand terms, added in another order.
    torch.testing.assert_close(accumulated, gradient, rtol=1e-4, atol=1e-6)


def _worker(rank: int, folder: Path) -> tuple[float, str]:
    task = _task(folder)
    model = _model(task)
    share = _microbatch_gradient(task, model, [[0, 1], [2, 3]][rank], rank, 4)
    gradient = _gradient(model)
    dist.all_reduce(gradient)
    total = torch.tensor(share, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item(), hashlib.sha256(gradient.numpy().tobytes()).hexdigest()


def test_two_workers_of_2_pictures_take_the_step_of_one_that_accumulates(folder: Path, task: Task):
    model = _model(task)
    one = sum(_microbatch_gradient(task, model, part, seed, 4) for seed, part in enumerate([[0, 1], [2, 3]]))
    digest = hashlib.sha256(_gradient(model).numpy().tobytes()).hexdigest()
    for total, spread in on_workers(2, _worker, folder):
        assert total == pytest.approx(one, rel=1e-12)
        assert spread == digest  # two summands: the same bits in either order


def test_in_evaluation_the_loss_is_a_function_of_the_weights_and_draws_nothing(task: Task):
    model = _model(task).eval()
    batch = task.held_out.fetch(torch.arange(2))
    model.rpn.train()  # a module in a mode of its own stays in it
    before = torch.get_rng_state()
    with torch.no_grad():
        first = task.loss(model, batch)
        torch.manual_seed(5)
        state = torch.get_rng_state()
        assert torch.equal(task.loss(model, batch), first)
    assert torch.equal(torch.get_rng_state(), state) and not torch.equal(state, before)
    assert not model.training and not model.roi_heads.training and model.rpn.training


def test_in_training_the_regions_are_drawn_from_the_callers_generator(task: Task):
    model, batch = _model(task), task.train.fetch(torch.arange(2))
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(task.loss(model, batch).item())
    assert losses[0] == losses[1] != losses[2]


# The error


class Found(nn.Module):
    """Stands for a detector that finds what it was told."""

    def __init__(self, results: list[dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.results, self.weight, self.at = results, nn.Parameter(torch.zeros(())), 0

    def forward(self, pictures: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        start, self.at = self.at, self.at + len(pictures)
        return self.results[start : self.at]


def _result(boxes: list[list[float]], labels: list[int], scores: list[float]) -> dict[str, torch.Tensor]:
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), "labels": torch.tensor(labels),
        "scores": torch.tensor(scores, dtype=torch.float32),
    }  # fmt: skip


A, B, NEAR_A = [0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 40.0, 40.0], [0.0, 0.0, 10.0, 6.0]  # IoU of A and NEAR_A: 0.6


@pytest.mark.parametrize(
    ("found", "there", "expected"),
    [
        (([A, B], [1, 2], [0.9, 0.6]), ([A, B], [1, 2]), 0),
        (([], [], []), ([A, B], [1, 2]), 1),
        (([A], [1], [0.9]), ([A, B], [1, 2]), 1 / 2),
        (([A, B], [1, 2], [0.9, 0.4]), ([A, B], [1, 2]), 1 / 2),  # not sure enough
        (([A, B], [1, 1], [0.9, 0.9]), ([A, B], [1, 2]), 2 / 3),  # a wrong class is one missed and one too many
        (([A, NEAR_A], [1, 1], [0.9, 0.8]), ([A], [1]), 1 / 2),  # one object is found once
        (([NEAR_A, A], [1, 1], [0.8, 0.9]), ([A], [1]), 1 / 2),
        # The second overlaps the first object more (0.9 to 0.89), but that one is taken: it finds the other.
        (([A, [0, 0, 10, 9]], [1, 1], [0.9, 0.8]), ([A, [0, 0, 10, 8]], [1, 1]), 0),
        (([[0, 0, 10, 4]], [1], [0.9]), ([A], [1]), 1),  # overlaps by 0.4
        (([A], [1], [0.9]), ([], []), 1),
        (([], [], []), ([], []), 0),
    ],
)
def test_the_error_is_the_share_of_objects_drawn_or_found_without_a_partner(found, there, expected: float):
    target = {key: value for key, value in _result(*there, [0.0] * len(there[1])).items() if key != "scores"}
    batch = ([torch.zeros(3, 48, 64)], [target])
    assert errors(Found([_result(*found)]), batch).item() == pytest.approx(expected)


def test_errors_add_up_over_pictures_and_an_untrained_detector_finds_next_to_nothing(task: Task):
    model = _model(task).eval()
    parts = [task.errors(model, task.held_out.fetch(torch.tensor([index]))).item() for index in range(4)]
    assert task.errors(model, task.held_out.fetch(torch.arange(4))).item() == pytest.approx(sum(parts))
    assert sum(parts) > 3.5


# Mirrored pictures


@given(seed=st.integers(0, 999), draw=st.floats(0, 0.999))
def test_a_mirrored_picture_takes_its_boxes_and_masks_with_it(folder: Path, seed: int, draw: float):
    split = CocoSplit(folder / "train2017", folder / "annotations" / "instances_train2017.json")
    batch = split.fetch(torch.tensor([seed % len(split)]))
    before = copy.deepcopy(batch)
    draws = torch.full((1, 8), draw)
    (picture,), (target,) = flip(batch, draws)
    assert torch.equal(picture, before[0][0].flip(-1) if draw < 0.5 else before[0][0])
    for box, mask in zip(target["boxes"], target["masks"], strict=True):
        rows, columns = mask.nonzero().unbind(1)
        edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert box.tolist() == [edge.item() for edge in edges]
    again = flip((([picture]), [target]), draws)
    assert torch.equal(again[0][0], before[0][0]) and torch.equal(again[1][0]["boxes"], before[1][0]["boxes"])
    assert torch.equal(batch[1][0]["masks"], before[1][0]["masks"])  # what was fetched is not written to


# Average precision


@pytest.fixture
def one_class(tmp_path: Path) -> CocoSplit:
    """Two pictures with an object of one class each."""
    write_half(tmp_path, "val2017", [[(4, 4, 20, 20, 3)], [(10, 10, 30, 20, 3)]])
    return CocoSplit(tmp_path / "val2017", tmp_path / "annotations" / "instances_val2017.json")


def _true(split: CocoSplit, index: int, sure: float = 0.9) -> dict[str, torch.Tensor]:
    target = split.fetch(torch.tensor([index]))[1][0]
    return {
        "boxes": target["boxes"].clone(), "labels": target["labels"].clone(), "masks": target["masks"][:, None].float(),
        "scores": torch.full((len(target["boxes"]),), sure),
    }  # fmt: skip


def _nothing() -> dict[str, torch.Tensor]:
    return {**_result([], [], []), "labels": torch.zeros(0, dtype=torch.int64), "masks": torch.zeros(0, 1, 48, 64)}


def test_finding_everything_exactly_scores_1_and_nothing_scores_0(one_class: CocoSplit, task: Task):
    for split in (one_class, task.held_out):
        whole = average_precision(Found([_true(split, index) for index in range(len(split))]), split)
        assert set(whole) == {"box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75"}
        assert all(value == pytest.approx(1.0) for value in whole.values())
    none = average_precision(Found([_nothing(), _nothing()]), one_class)
    assert all(value == 0.0 for value in none.values())


def test_half_of_the_objects_score_51_of_101_recall_points(one_class: CocoSplit):
    """COCO averages precision at recalls 0, 0.01, ... 1: it is 1 up to 0.5, and 0 beyond."""
    half = average_precision(Found([_true(one_class, 0), _nothing()]), one_class)
    assert half["box_ap"] == pytest.approx(51 / 101) and half["mask_ap"] == pytest.approx(51 / 101)


def test_a_surer_false_alarm_halves_the_precision(one_class: CocoSplit):
    alarm = {key: value.clone() for key, value in _true(one_class, 0, sure=0.95).items()}
    alarm["boxes"] += 23
    alarm["masks"] = alarm["masks"].roll((23, 23), (2, 3))
    right = _true(one_class, 0)
    both = {key: torch.cat((alarm[key], right[key])) for key in right}
    found = average_precision(Found([both, _nothing()]), one_class)
    assert found["box_ap"] == pytest.approx(51 / 202) and found["mask_ap50"] == pytest.approx(51 / 202)


def test_masks_are_scored_by_themselves(one_class: CocoSplit):
    """Masks of 62 and 62 % of the pixels pass at 0.50, 0.55 and 0.60 of ten thresholds; the boxes pass at all."""
    results = [_true(one_class, index) for index in range(2)]
    for result in results:
        pixels = result["masks"][0, 0].nonzero()
        for row, column in pixels[round(0.62 * len(pixels)) :].tolist():
            result["masks"][0, 0, row, column] = 0
    found = average_precision(Found(results), one_class)
    assert found["box_ap"] == pytest.approx(1.0)
    assert found["mask_ap"] == pytest.approx(0.3) and found["mask_ap50"] == pytest.approx(1.0)


def _find_share(rank: int, folder: Path) -> dict[str, float]:
    task = _task(folder)
    model = _model(task, seed=3)
    mine = detections(model, task.held_out, range(rank, len(task.held_out), 2))
    shares: list = [None, None]
    dist.all_gather_object(shares, mine)
    return score(task.held_out, [row for share in shares[::-1] for row in share])


def test_the_detections_of_two_workers_score_exactly_as_those_of_one(folder: Path, task: Task):
    model = _model(task, seed=3)
    with torch.no_grad():  # low thresholds, so that an untrained model finds something that is right by chance
        assert detections(model, task.held_out, range(2))
    whole = average_precision(model, task.held_out)
    assert on_workers(2, _find_share, folder) == [whole, whole]


# Weights from a classification run


def _classifier(name: str = "resnet18", seed: int = 7, **options) -> nn.Module:
    torch.manual_seed(seed)
    net = torchvision.models.get_model(name, weights=None, num_classes=5, **options)
    with torch.no_grad():  # statistics that a forgotten copy would not have
        net(torch.randn(4, 3, 64, 64))
    return net


def _save(net: nn.Module, path: Path) -> Path:
    save_weights(path, "imagenet", net.state_dict())  # as `largebatch train` writes model.pt
    return path


def test_the_backbone_computes_what_the_classifier_computed_and_is_frozen_at_the_bottom(folder: Path, tmp_path: Path):
    net = _classifier()
    task = _task(folder, _save(net, tmp_path / "model.pt"))
    net.eval()
    pictures = torch.randn(2, 3, 64, 64)
    features = {}
    for stage in range(1, 5):
        getattr(net, f"layer{stage}").register_forward_hook(
            lambda _, __, output, stage=stage: features.update({str(stage - 1): output})
        )
    with torch.no_grad():
        net(pictures)
        for seed in (0, 1):  # whatever the seed of the run
            model = _model(task, seed)
            body = model.backbone.body(pictures)  # in training mode: the statistics are frozen
            for level, output in features.items():
                torch.testing.assert_close(body[level], output, rtol=1e-4, atol=1e-5)
    frozen = {name.split(".")[2] for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen == {"conv1", "layer1"}
    before = copy.deepcopy(model.backbone.body.state_dict())
    torch.manual_seed(0)
    task.loss(model, task.train.fetch(torch.arange(2))).backward()
    assert all(torch.equal(before[name], value) for name, value in model.backbone.body.state_dict().items())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize("form", ["ours", "plain", "nested", "ddp", "compiled"])
def test_every_usual_form_of_a_checkpoint_is_read(folder: Path, tmp_path: Path, form: str):
    net, path = _classifier(), tmp_path / "weights"
    state = net.state_dict()
    prefix = {"ddp": "module.", "compiled": "_orig_mod."}.get(form, "")
    state = {prefix + name: value for name, value in state.items()}
    if form == "ours":
        _save(net, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if form == "nested" else state, path)
    body = _model(_task(folder, path)).backbone.body
    assert torch.equal(body.layer4[1].conv2.weight, net.layer4[1].conv2.weight)
    assert torch.equal(body.bn1.running_var, net.bn1.running_var)


def test_a_group_norm_backbone_stays_one_and_trains_whole(folder: Path, tmp_path: Path):
    net = _classifier(norm_layer=lambda channels: nn.GroupNorm(32, channels))
    model = _model(_task(folder, _save(net, tmp_path / "model.pt")))
    assert torch.equal(model.backbone.body.conv1.weight, net.conv1.weight)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet34", r"layer1\.2\.conv1\.weight has no place; .* and \d+ more\. Use a checkpoint of the same"),
        ("resnet50", r"layer1\.0\.conv1\.weight is 64x64x1x1, not 64x64x3x3; "),
    ],
)
def test_another_architecture_is_refused_before_the_run_with_the_first_names(folder, tmp_path, name: str, said: str):
    with pytest.raises(ConfigError, match=said) as raised:
        _task(folder, _save(_classifier(name), tmp_path / "model.pt"))
    assert str(tmp_path / "model.pt") in str(raised.value)


def test_missing_weights_are_named(folder: Path, tmp_path: Path):
    state = _classifier().state_dict()
    del state["layer3.0.bn1.running_mean"], state["conv1.weight"]
    torch.save(state, tmp_path / "weights")
    with pytest.raises(ConfigError, match=r"backbone: conv1\.weight is missing; layer3\.0\.bn1\.running_mean is missi"):
        _task(folder, tmp_path / "weights")


def test_a_backbone_file_that_is_damaged_no_weights_or_missing_is_one_sentence(folder: Path, tmp_path: Path):
    path = _save(_classifier(), tmp_path / "model.pt")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(bytes(whole))
    with pytest.raises(CheckpointError, match=r"model\.pt is damaged: its checksum"):
        _task(folder, path)
    path.write_bytes(b"hello")
    with pytest.raises(CheckpointError, match=r"model\.pt cannot be read as weights"):
        _task(folder, path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(CheckpointError, match=r"model\.pt holds no state dict"):
        _task(folder, path)
    with pytest.raises(CheckpointError, match=r"gone cannot be read: No such file"):
        _task(folder, tmp_path / "gone")


def test_a_task_that_takes_no_backbone_refuses_one():
    with pytest.raises(ConfigError, match=r"'digits' .* takes no backbone; got backbone=model\.pt.*detection, stamps"):
        load_task("digits", backbone=Path("model.pt"))


def test_freezing_without_statistics_is_refused():
    with pytest.raises(ConfigError, match=r"frozen batch norm needs the statistics of a trained backbone"):
        make_detector(TINY, 3, norm="frozen")
    with pytest.raises(ConfigError, match=r"there is no ResNet 'resnet19' in torchvision"):
        make_detector(DetectorShape(resnet="resnet19"), 3)


# The task of COCO


def test_the_schedule_is_table_3b():
    """Goyal 2017, Table 3b; the drop at 120k of 160k: He 2017, sec. 3.1. 22 whole epochs are 0.8 % more."""
    recipe = table_3b_recipe(117_266)
    for batch, lr, iterations in ((2, 2.5, 1_280_000), (4, 5.0, 640_000), (8, 10.0, 320_000), (16, 20.0, 160_000)):
        resolved = recipe.resolve(batch, 117_266)
        assert 1000 * resolved.lr == pytest.approx(lr)
        assert resolved.num_steps == pytest.approx(iterations, rel=0.01)
        assert resolved.warmup_steps == 0
        drop = round(0.75 * resolved.num_steps)
        assert 1000 * resolved.schedule.lr_at(drop - 10) == pytest.approx(lr)
        assert 1000 * resolved.schedule.lr_at(drop + 10) == pytest.approx(lr / 10)
    assert (recipe.momentum, recipe.nesterov, recipe.weight_decay) == (0.9, False, 1e-4)


def test_the_task_is_the_papers_detector_and_says_what_it_starts_from(folder: Path, caplog):
    task = load_task("detection", folder)
    assert "no backbone is given" in caplog.text
    assert (task.max_microbatch, task.unit, len(task.train), len(task.held_out)) == (2, "examples", 36, 6)
    model = task.model()
    assert model.roi_heads.box_predictor.cls_score.out_features == 4  # 3 classes and the background
    assert (model.transform.min_size, model.transform.max_size) == ((800,), 1333)
    assert model.roi_heads.fg_bg_sampler.batch_size_per_image == 512
    # Bottleneck blocks of 3, 4, 6, 3; group norm, since nothing could be frozen.
    assert [len(getattr(model.backbone.body, f"layer{stage}")) for stage in range(1, 5)] == [3, 4, 6, 3]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert task.count(task.train.fetch(torch.arange(2))) == 2


def test_halves_of_different_releases_and_absent_folders_are_refused(tmp_path: Path, monkeypatch):
    write_half(tmp_path, "train2017", random_pictures(2))
    write_half(tmp_path, "val2017", random_pictures(2))
    path = tmp_path / "annotations" / "instances_val2017.json"
    path.write_text(path.read_text().replace('{"id": 3, "name": "kind3"}', '{"id": 3}, {"id": 4}'))
    with pytest.raises(DataError, match=r"list different categories \(3 and 4\)"):
        read_halves("coco", tmp_path, [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LARGEBATCH_DATA", raising=False)
    with pytest.raises(DataError, match=r"no COCO folder in .*/data/coco.*cocodataset\.org.*--data"):
        detection.load()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_loop_trains_it_measures_its_noise_scale_and_gives_the_same_bits_again(folder, tmp_path, frozen: bool):
    task = _task(folder, _save(_classifier(), tmp_path / "model.pt") if frozen else None)
    spec = RunSpec(
        task=task.name, role="train", batch=4, microbatch=2, lr=0.02, schedule="goyal", seed=0, max_steps=3,
        monitor=True, evaluate_epochs=True,
    )  # fmt: skip
    records = [train(task, spec, tmp_path / name) for name in ("a", "b")]
    assert records[0] == records[1]
    assert records[0].steps == 3 and records[0].status == "exhausted"
    lines = [(tmp_path / name / "steps.jsonl").read_text() for name in ("a", "b")]
    assert lines[0] == lines[1] and lines[0].count("\n") == 3


@pytest.mark.proofs
def test_a_minute_of_training_finds_rectangles_that_an_untrained_detector_does_not(task: Task):
    model = _model(task)
    untrained = average_precision(model, task.held_out)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    for step in range(250):
        optimizer.zero_grad()
        indices = torch.arange(4 * step, 4 * step + 4) % len(task.train)
        for part in indices.split(2):
            normalise(task.loss(model, task.train.fetch(part)), 4).backward()
        optimizer.step()
    trained = average_precision(model, task.held_out)
    assert untrained["mask_ap50"] < 0.05
    assert trained["mask_ap50"] > 0.3 and trained["box_ap50"] > 0.3
