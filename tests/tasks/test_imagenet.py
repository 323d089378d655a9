"""The task imagenet is the paper's: its numbers, its weights at the start, batch norm over 32 in whatever layout."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from largebatch.errors import ConfigError, DataError
from largebatch.recipe.decay import decay_groups
from largebatch.recipe.recipe import Recipe
from largebatch.records.files import read_json
from largebatch.records.schema import RunSpec
from largebatch.tasks.catalog import load_task
from largebatch.tasks.imagenet import load, make_model
from largebatch.train.loop import train

SMALL = Recipe(reference_batch=64, reference_lr=0.05, epochs=3, warmup_epochs=1.0, decay_epochs=(2.0,), batchnorm_n=32)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Class folders of 2 x 280 noisy pictures of 24 x 20 pixels, one class redder than the other."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for half, count in (("train", 280), ("val", 30)):
        for label, tint in enumerate(((60, 0, 0), (0, 0, 60))):
            place = folder / half / f"class{label}"
            place.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 190, (20, 24, 3)) + np.array(tint)
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number:03}.jpg", quality=95)
    return folder


def test_at_8192_the_numbers_are_the_papers(pictures):
    """Goyal 2017, sec. 5.1: 3.2 at 8192; 5 of 90 epochs of warmup are 782 of 14,075 steps on ImageNet."""
    recipe = load(pictures, size=16).recipe
    resolved = recipe.resolve(8192, 1_281_167, world_size=256)
    assert (resolved.lr, resolved.warmup_steps, resolved.num_steps, resolved.batchnorm_n) == (3.2, 782, 14075, 32)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_weights_start_as_the_paper_says(name):
    """Sec. 5.1: gamma 0 in the last norm of each block and 1 elsewhere, classifier N(0, 0.01^2), no decay on norms."""
    torch.manual_seed(0)
    model = make_model(name, 1000)
    last = "bn2" if name == "resnet18" else "bn3"
    for path, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            expected = 0.0 if path.startswith("layer") and path.endswith(last) else 1.0
            assert torch.equal(layer.weight, torch.full_like(layer.weight, expected)), path
    spread = model.fc.weight.detach().std()
    assert abs(float(spread) / 0.01 - 1) < 0.01
    norms = {id(p) for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    decayed, undecayed = decay_groups(model)
    assert {id(parameter) for parameter in undecayed} == norms and not norms & {id(parameter) for parameter in decayed}


def test_bottlenecks_stride_in_their_3x3(pictures):
    """Sec. 5.1: the variant of fb.resnet.torch."""
    block = make_model("resnet50", 10).layer2[0]
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))


def test_batch_norm_sees_32_pictures_whatever_the_batch(pictures, tmp_path):
    """Sec. 2.3: n is a hyper-parameter of batch norm and stays 32 while the batch is 64 or 128."""
    task = replace(load(pictures, "resnet18", size=16), recipe=SMALL, loaders=0)
    seen = []

    def make():
        model = task.model()
        model.bn1.register_forward_pre_hook(lambda layer, inputs: seen.append((layer.training, len(inputs[0]))))
        return model

    for batch in (64, 128):
        spec = RunSpec(task="imagenet", role="test", batch=batch, lr=0.1, seed=0, max_steps=2)
        train(replace(task, model=make), spec, tmp_path / str(batch))
    assert {count for training, count in seen if training} == {32}


def test_it_learns_through_the_loop_and_leaves_out_a_picture_that_is_none(pictures, tmp_path, caplog):
    task = replace(load(pictures, "resnet18", size=16), recipe=SMALL, loaders=0)
    path = pictures / "train" / "class1" / "017.jpg"
    whole = path.read_bytes()
    path.write_bytes(b"no picture")
    try:
        spec = RunSpec(
            task="imagenet", role="test", batch=64, lr=0.05, schedule="goyal", seed=0, max_steps=27, monitor=True,
            microbatch=32, evaluate_epochs=True,
        )  # fmt: skip
        record = train(task, spec, tmp_path)
    finally:
        path.write_bytes(whole)
    assert record.epochs[-1]["error"] < 0.1
    skipped = read_json(tmp_path / "skipped.json")
    assert list(skipped) == ["class1/017.jpg"] and skipped["class1/017.jpg"] == 3  # once an epoch
    assert "class1/017.jpg" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert len(lines) == 27 and all(np.isfinite(line["loss"]) for line in lines)


def test_what_cannot_be_trained_on_is_one_sentence(pictures, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"no model 'resnet-51'. Did you mean 'resnet50'\? Models: resnet18"):
        load(pictures, "resnet-51")
    with pytest.raises(DataError, match=r"does not exist\. Expected"):
        load_task("imagenet", tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LARGEBATCH_DATA", raising=False)
    with pytest.raises(DataError, match=r"--data DIR with DIR/train/CLASS/\*.jpg"):
        load_task("imagenet-resnet101")
