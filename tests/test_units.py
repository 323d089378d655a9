"""Units cannot be mixed, and a duration means the same number of steps however it is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.errors import ConfigError
from largebatch.units import BatchSize, Duration


def test_batches_of_different_units_do_not_divide():
    with pytest.raises(ConfigError, match="one counts tokens, the other sequences"):
        BatchSize(8, "tokens") / BatchSize(4, "sequences")


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_batch_is_a_positive_whole_number(count):
    with pytest.raises(ConfigError, match="whole number of at least 1"):
        BatchSize(count)


def test_an_unknown_unit_names_the_known_ones():
    with pytest.raises(ConfigError, match="examples, tokens, frames, sequences"):
        BatchSize(1, "pixels")


@given(st.integers(1, 100), st.integers(1, 4096), st.integers(1, 2_000_000))
def test_epochs_and_units_say_the_same_duration(epochs, batch, units_per_epoch):
    by_epochs = Duration(epochs, "epochs").in_steps(batch=batch, units_per_epoch=units_per_epoch)
    by_units = Duration(epochs * units_per_epoch, "examples").in_steps(batch=batch, units_per_epoch=units_per_epoch)
    assert by_epochs == pytest.approx(by_units, rel=1e-15)


def test_imagenet_at_8192_has_156_39_steps_an_epoch():
    """Goyal 2017, sec. 2.2: 5 epochs of 1,281,167 examples at 8192 are 782 iterations."""
    assert Duration(1, "epochs").in_steps(batch=8192, units_per_epoch=1_281_167) == pytest.approx(156.39, abs=0.005)
