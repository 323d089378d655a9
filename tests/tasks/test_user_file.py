"""A user's own Python file: what it may define, and what is said when something in it is wrong."""

import pickle
from pathlib import Path

import pytest
import torch

from largebatch.errors import ConfigError, DataError
from largebatch.tasks.catalog import load_task

GOOD = """
import torch
from torch import nn
from largebatch.recipe.recipe import Recipe
from largebatch.tasks.task import Task, TensorSplit, count_wrong, cross_entropy_sum

def model():
    return nn.Linear(2, 3)

def make(name):
    split = TensorSplit((torch.zeros(64, 2), torch.zeros(64, dtype=torch.long)))
    recipe = Recipe(reference_batch=8, reference_lr=0.1)
    return Task(name=name, train=split, held_out=split, model=model, loss=cross_entropy_sum, errors=count_wrong,
                recipe=recipe)
"""


def _file(folder: Path, code: str) -> str:
    path = folder / "my_task.py"
    path.write_text(code)
    return str(path)


def test_a_file_may_define_a_task(tmp_path: Path):
    assert load_task(_file(tmp_path, GOOD + "task = make('mine')")).name == "mine"


def test_a_file_may_define_a_function_of_the_data_directory(tmp_path: Path):
    path = _file(tmp_path, GOOD + "def task(data):\n    return make(f'from {data}')")
    assert load_task(path, Path("folder")).name == "from folder"
    assert load_task(path).name == "from None"


def test_a_file_may_import_its_neighbours(tmp_path: Path):
    (tmp_path / "neighbour_of_my_task.py").write_text("name = 'next door'")
    assert (
        load_task(_file(tmp_path, GOOD + "import neighbour_of_my_task as n\ntask = make(n.name)")).name == "next door"
    )


def test_what_the_file_defines_can_be_pickled(tmp_path: Path):
    model = load_task(_file(tmp_path, GOOD + "task = make('mine')")).model
    assert pickle.loads(pickle.dumps(model)) is model


def test_two_files_of_one_name_in_two_folders_are_two_tasks(tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = _file(tmp_path / folder, GOOD + f"task = make('{folder}')")
        assert load_task(path).name == folder


def test_data_for_a_file_that_cannot_take_it_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"`task` in .*my_task\.py is not a function, so data=folder cannot"):
        load_task(_file(tmp_path, GOOD + "task = make('mine')"), Path("folder"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1", r"my_task\.py defines no `task`\. Define `task = lb\.Task"),
        ("task = 3", r"`task` in .*my_task\.py is of type int, not a Task or a function"),
        ("task = None", r"is None, not a Task"),
        (GOOD + "task = Task", r"is the class Task, not a Task or a function"),
        ("def task(data):\n    pass", r"the function `task` in .*my_task\.py returned None, not a Task"),
        ("def task():\n    pass", r"must take one argument, the data directory or None; too many positional"),
        ("\nimport no_such_package", r"my_task\.py raised ModuleNotFoundError at line 2: No module named"),
        ("\n\nprint(1", r"my_task\.py raised SyntaxError at line 3"),
        ("def f():\n    raise ValueError('odd')\nf()", r"my_task\.py raised ValueError at line 2: odd\. Correct"),
        ("import torch\n\ntorch.zeros(2) @ torch.zeros(3)", r"my_task\.py raised RuntimeError at line 3: "),
        ("def task(data):\n    return 1 / 0", r"my_task\.py raised ZeroDivisionError at line 2: division"),
        ("raise ValueError('two\\nlines')", r"my_task\.py raised ValueError at line 1: two lines"),
        ("raise SystemExit", r"my_task\.py raised SystemExit at line 1: no message"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_its_own_line(tmp_path: Path, code: str, said: str):
    with pytest.raises(ConfigError, match=said) as raised:
        load_task(_file(tmp_path, code))
    assert "\n" not in str(raised.value)


def test_the_users_own_traceback_is_kept_as_the_cause(tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        load_task(_file(tmp_path, "def task(data):\n    return {}['key']"))
    assert isinstance(raised.value.__cause__, KeyError)


def test_an_error_of_the_library_passes_through_unchanged(tmp_path: Path):
    code = "from largebatch.errors import DataError\ndef task(data):\n    raise DataError('my file is gone')"
    with pytest.raises(DataError, match=r"^my file is gone$"):
        load_task(_file(tmp_path, code))


def test_a_missing_file_or_a_directory_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"task file .*gone\.py does not exist"):
        load_task(str(tmp_path / "gone.py"))
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match=r"task file .*folder\.py is a directory"):
        load_task(str(tmp_path / "folder.py"))


def test_a_file_that_failed_can_be_corrected_and_loaded_again(tmp_path: Path):
    with pytest.raises(ConfigError):
        load_task(_file(tmp_path, "raise ValueError"))
    assert load_task(_file(tmp_path, GOOD + "task = make('mine')")).name == "mine"


def test_the_example_is_a_task_that_trains():
    task = load_task(str(Path(__file__).parents[2] / "examples" / "own_task.py"))
    assert (len(task.train), len(task.held_out)) == (426, 143)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), task.recipe.reference_lr, task.recipe.momentum)
    for indices in torch.randperm(426).repeat(3).split(task.recipe.reference_batch):
        optimizer.zero_grad()
        (task.loss(model, task.train.fetch(indices)) / len(indices)).backward()
        optimizer.step()
    with torch.no_grad():
        wrong = task.errors(model, task.held_out.fetch(torch.arange(143))).item()
    assert wrong / 143 < 0.08  # seen: 0.01 to 0.03; always the larger class: 0.37
