"""What can go wrong for a user, and in which words is it said?

Every error a user can cause derives from `LargebatchError`; the command line turns it into one
sentence and exit code 2. Bugs of our own are `assert`s.
"""


class LargebatchError(Exception):
    """Base of every error that says what happened, with the values, and what to do."""


class ConfigError(LargebatchError, ValueError):
    """A value that was asked for cannot be used."""


class DataError(LargebatchError, ValueError):
    """A data file is missing, cut short, or not what it should be."""


class RecordError(LargebatchError, ValueError):
    """A file on disk is not the record it should be, or belongs to another study."""


class CheckpointError(LargebatchError, RuntimeError):
    """No checkpoint could be read, or the one there is belongs to another run."""


class DivergedError(LargebatchError, ArithmeticError):
    """Training left the range of finite numbers wherever it was tried."""


class GoalNotReachedError(LargebatchError, RuntimeError):
    """No run reached the goal within the steps allowed."""


class StorageError(LargebatchError, OSError):
    """The disk refused a write; what was there before is still whole."""


class MissingExtraError(LargebatchError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. Run: pip install 'largebatch[{extra}]'"
        )
