"""Is what cannot be used refused in a sentence with the value and the way out?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from largebatch.errors import ConfigError
from largebatch.testing.deal import microbatches, num_examples, share_of, share_sizes
from largebatch.testing.equivalence import check_parallel_equivalence
from testing.setups import check, examples, plain_net, setup, sgd


@given(num=st.integers(2, 200), world_size=st.integers(1, 9), uneven=st.booleans())
def test_shares_are_the_batch_cut_in_pieces_and_nobody_goes_without(num: int, world_size: int, uneven: bool):
    try:
        sizes = share_sizes(num, world_size, uneven)
    except ConfigError:
        assert num % world_size or num < 2 * world_size
        return
    assert len(sizes) == world_size
    assert min(sizes) >= 1
    assert world_size == 1 or (len(set(sizes)) > 1) is uneven
    dealt = [share_of(np.arange(num), sizes, rank) for rank in range(world_size)]
    np.testing.assert_array_equal(np.concatenate(dealt), np.arange(num))
    parts = microbatches(np.arange(num), 7)
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(num))
    assert all(len(part) == 7 for part in parts[:-1])


def test_a_batch_keeps_its_form_when_it_is_dealt():
    batch = {"x": torch.arange(6), "pair": (np.arange(6), list("abcdef"))}
    share = share_of(batch, (4, 2), 1)
    assert num_examples(batch) == 6
    assert share["x"].tolist() == [4, 5]
    assert share["pair"][0].tolist() == [4, 5]
    assert share["pair"][1] == ["e", "f"]
    assert share_of(["a", "b", "c"], (2, 1), 0) == ["a", "b"]


def never(rank: int, world_size: int) -> Any:
    raise AssertionError("no worker is started for an argument that cannot be used")


@pytest.mark.parametrize(
    ("make", "batch", "options", "words"),
    [
        (3, examples(), {}, "make is a function of (rank, world_size) that returns (model, optimizer, step); got 3"),
        (lambda: None, examples(), {}, "make takes (rank, world_size); too many positional arguments"),
        (never, examples(), {"world_sizes": ()}, "world_sizes are whole numbers of workers of at least 1; got ()"),
        (never, examples(), {"world_sizes": (0,)}, "got (0,)"),
        (never, examples(), {"world_sizes": (1,)}, "leaves nothing to compare with one worker. Add 2"),
        (never, examples(), {"world_sizes": (3,)}, "a batch of 8 cannot be dealt out evenly to 3 workers. Give 6 or 9"),
        (never, examples(), {"steps": 0}, "steps is a whole number of at least 1; got 0"),
        (never, examples(), {"microbatch": 2.5}, "microbatch is a whole number of at least 1; got 2.5"),
        (never, examples(), {"microbatch": 9}, "a microbatch of 9 is larger than the batch of 8"),
        (never, examples(), {"seed": "a"}, "seed is a whole number from 0 to 2^63 - 1; got 'a'"),
        (never, examples(), {"seed": -1}, "seed is a whole number from 0 to 2^63 - 1; got -1"),
        (never, examples(), {"seed": 2**70}, "seed is a whole number from 0 to 2^63 - 1; got 1180591620717411303424"),
        (never, examples(), {"uneven": "x"}, "uneven is True or False; got 'x'"),
        (never, examples(), {"tolerance": 0.0}, "tolerance is a relative difference in (0, 1); got 0.0"),
        (never, examples(), {"timeout": -1.0}, "timeout is a finite number of seconds above 0; got -1.0"),
        (never, 5, {}, "a batch is a tensor, a list of examples, or a dict or tuple of columns; got int"),
        (never, (torch.ones(3), torch.ones(4)), {}, "the columns of a batch differ in length: {0: 3, 1: 4}"),
        (never, [], {}, "a batch holds at least one example; got none"),
        (never, torch.tensor(1.0), {}, "got a tensor of no dimension"),
        (never, lambda a, b: None, {}, "batch is a function of (a, b); it takes (step)"),
        (never, lambda step, rank, size: None, {"uneven": True}, "deals the global batch, and batch(step, rank"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_before_any_worker(
    make: Any, batch: Any, options: dict[str, Any], words: str
):
    with pytest.raises(ConfigError) as error:
        check(make, batch, **options)
    assert words in str(error.value)


def without_update(rank: int, world_size: int) -> Any:
    model = plain_net()
    return model, sgd(model), lambda share: model(share[0]).sum().backward()


def another_model(rank: int, world_size: int) -> Any:
    return setup(net=lambda: nn.Sequential(nn.Linear(5, 3 * world_size)))(rank, world_size)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rank, size: (1, 2), "make(rank, world_size) returns (model, optimizer, step)"),
        (lambda rank, size: (plain_net(), 2, print), "make's second part is a torch.optim.Optimizer; got int"),
        (lambda rank, size: (2, sgd(plain_net()), print), "make's first part is the model, a torch.nn.Module; got int"),
        (lambda rank, size: (plain_net(), sgd(plain_net()), 3), "make's third part is step, a function of a share"),
        (without_update, "never called optimizer.step() of the optimizer that make returned"),
        (another_model, "make gives another model on 2 workers than on 1: 0.weight is of shape (3, 5) on one and of"),
    ],
)
def test_a_setup_that_cannot_be_used_is_refused_in_a_sentence(make: Any, words: str):
    with pytest.raises(ConfigError) as error:
        check(make, examples(), (1, 2))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "bad", [{"world_sizes": 2}, {"world_sizes": None}, {"tolerance": "a"}, {"timeout": "a"}, {"timeout": None}]
)
def test_an_argument_of_another_type_is_refused_before_a_worker_starts(bad):
    given = {"world_sizes": (1, 2)} | bad
    with pytest.raises(ConfigError, match="; got "):
        check_parallel_equivalence(lambda rank, world_size: None, torch.zeros(8, 3), **given)
