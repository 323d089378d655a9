"""The tasks that come with the library: their data, splits, losses, and that they can be learned."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from largebatch.errors import ConfigError, MissingExtraError
from largebatch.tasks.catalog import load_task
from largebatch.tasks.files import find_idx, places
from largebatch.tasks.mnist import find_json
from largebatch.tasks.splits import every_fifth
from largebatch.tasks.task import Task


def _task(name: str) -> Task:
    """The task, or a skip with the line that fetches its data: a test never downloads."""
    directories = places(name, {"fashion-mnist": "FashionMNIST", "mnist": "MNIST"}.get(name, ""), None)
    if name != "digits" and find_idx(directories) is None and (name != "mnist" or find_json(directories) is None):
        pytest.skip(f"the data of {name} is absent; run: scripts/fetch_data.sh {name}")
    return load_task(name)


CLASSES = ("digits", "fashion-mnist", "mnist")
"""The tasks whose examples are pictures of one class each, whole in memory; others have tests of their own."""


@pytest.fixture(scope="module", params=CLASSES)
def task(request: pytest.FixtureRequest) -> Task:
    torch.set_num_threads(1)
    return _task(request.param)


def _rows(split) -> list[bytes]:
    return [row.numpy().tobytes() for row in split.fetch(torch.arange(len(split)))[0]]


def test_the_inputs_are_float32_and_the_labels_are_the_classes_0_to_9(task: Task):
    for split in (task.train, task.held_out):
        inputs, labels = split.fetch(torch.arange(len(split)))
        assert inputs.dtype == torch.float32 and labels.dtype == torch.int64
        assert len(inputs) == len(labels) == len(split)
        assert sorted(labels.unique().tolist()) == list(range(10))
    assert task.count(task.train.fetch(torch.tensor([3, 5, 3]))) == 3


def test_training_inputs_have_mean_0_and_deviation_1(task: Task):
    inputs = task.train.fetch(torch.arange(len(task.train)))[0].double()
    assert abs(inputs.mean().item()) < 1e-4
    assert abs(inputs.std().item() - 1) < 1e-4


def test_digits_has_1437_training_and_360_held_out_examples_and_the_split_never_changes():
    task = load_task("digits")
    assert (len(task.train), len(task.held_out)) == (1437, 360)
    labels = [split.fetch(torch.arange(len(split)))[1].numpy() for split in (task.train, task.held_out)]
    digest = hashlib.sha256(b"".join(part.astype(np.uint8).tobytes() for part in labels)).hexdigest()
    assert digest[:16] == "dc4ddc87a36a7b5b"


def test_every_digit_of_scikit_learn_is_in_exactly_one_half():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    train, held_out = every_fifth(torch.from_numpy(labels))
    assert sorted(train.tolist() + held_out.tolist()) == list(range(1797))
    task = load_task("digits")
    both = torch.cat([task.train.fetch(torch.arange(1437))[0], task.held_out.fetch(torch.arange(360))[0]])
    back = both.double() * pixels[train].std() + pixels[train].mean()
    np.testing.assert_allclose(back, np.concatenate([pixels[train], pixels[held_out]]), atol=1e-5)


def test_no_held_out_digit_is_a_copy_of_a_training_digit():
    task = load_task("digits")
    assert not set(_rows(task.train)) & set(_rows(task.held_out))


def test_fashion_mnist_is_the_whole_official_set():
    task = _task("fashion-mnist")
    assert (len(task.train), len(task.held_out)) == (60_000, 10_000)
    labels = task.train.fetch(torch.arange(60_000))[1]
    assert labels.bincount().tolist() == [6_000] * 10
    assert task.train.fetch(torch.arange(2))[0].shape == (2, 1, 28, 28)


@pytest.mark.parametrize("sizes", [(7, 3, 12), (5,), (1, 1, 1)])
def test_one_in_five_of_every_class_is_held_out_and_the_rest_is_not(sizes: tuple[int, ...]):
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    train, held_out = every_fifth(labels)
    assert sorted(train.tolist() + held_out.tolist()) == list(range(len(labels)))
    assert len(held_out) == -(-len(labels) // 5)
    for label, size in enumerate(sizes):
        assert abs((labels[held_out] == label).sum().item() - size / 5) < 1


def test_the_loss_is_a_sum_so_the_parts_of_a_batch_add_up_to_it(task: Task):
    torch.manual_seed(0)
    model = task.model()
    losses = [task.loss(model, task.train.fetch(torch.arange(a, b))).item() for a, b in ((0, 8), (8, 9), (9, 40))]
    whole = task.loss(model, task.train.fetch(torch.arange(40))).item()
    assert sum(losses) == pytest.approx(whole, rel=1e-5)  # float32 sums of 40 terms
    wrong = [task.errors(model, task.train.fetch(torch.arange(a, b))).item() for a, b in ((0, 8), (8, 9), (9, 40))]
    assert sum(wrong) == task.errors(model, task.train.fetch(torch.arange(40))).item()


def test_loss_and_errors_equal_those_computed_in_float64_from_the_logits(task: Task):
    torch.manual_seed(1)
    model = task.model()
    inputs, labels = task.train.fetch(torch.arange(50, 250))
    logits = model(inputs).detach().numpy().astype(np.float64)
    log_sums = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    expected = (log_sums - logits[np.arange(200), labels.numpy()]).sum()
    assert task.loss(model, (inputs, labels)).item() == pytest.approx(expected, rel=1e-5)
    assert task.errors(model, (inputs, labels)).item() == (logits.argmax(1) != labels.numpy()).sum()


def test_fresh_weights_depend_on_the_seed_and_on_nothing_else(task: Task):
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.nn.utils.parameters_to_vector(task.model().parameters())

    first = weights(0)
    np.random.default_rng().random()
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


MAX_ERROR = {"digits": 0.05, "fashion-mnist": 0.20, "mnist": 0.10}
"""After one epoch of the reference recipe (digits: four), roughly twice what is seen; chance is 0.9."""


def test_a_short_training_at_the_reference_learns(task: Task):
    recipe, num = task.recipe, len(task.train)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), recipe.reference_lr, recipe.momentum, nesterov=recipe.nesterov)
    for _ in range(4 if num < 10_000 else 1):
        for indices in torch.randperm(num).split(recipe.reference_batch):
            optimizer.zero_grad()
            (task.loss(model, task.train.fetch(indices)) / len(indices)).backward()
            optimizer.step()
    with torch.no_grad():
        wrong = task.errors(model, task.held_out.fetch(torch.arange(len(task.held_out)))).item()
    assert wrong / len(task.held_out) < MAX_ERROR[task.name]


def test_an_unknown_task_is_answered_with_the_nearest_names_and_all_names():
    with pytest.raises(ConfigError, match=r"no task 'fashion_mnsit'. Did you mean 'fashion-mnist'") as raised:
        load_task("fashion_mnsit")
    assert "digits, fashion-mnist, " in str(raised.value)
    with pytest.raises(ConfigError, match=r"no task 'zzz'. Tasks: .*digits"):
        load_task("zzz")


def test_digits_refuses_a_data_directory_instead_of_ignoring_it():
    with pytest.raises(ConfigError, match=r"digits.*reads no files; got data=somewhere"):
        load_task("digits", Path("somewhere"))


def test_without_scikit_learn_the_digits_name_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"'scikit-learn'.*pip install 'largebatch\[study\]'"):
        load_task("digits")
