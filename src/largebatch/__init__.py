"""largebatch: find the batch size that is worth it, then train at it without losing accuracy."""

from largebatch import audit, parallel, testing
from largebatch.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    GoalNotReachedError,
    LargebatchError,
    MissingExtraError,
    RecordError,
    StorageError,
)
from largebatch.noise.advice import Advice
from largebatch.noise.estimate import NoiseScale, noise_scale
from largebatch.noise.moments import StepMoments, solve_moments
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.recipe import recipes
from largebatch.recipe.batch_sampler import ShuffledLoader
from largebatch.recipe.batchnorm import batchnorm_over
from largebatch.recipe.optimizer import build_optimizer, build_sgd
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.resolved import ResolvedRecipe
from largebatch.recipe.sampler import ShuffledStream, rank_slice
from largebatch.recipe.schedule import Constant, WarmupStepDecay, as_torch_scheduler
from largebatch.recipe.step_loss import StepLoss
from largebatch.records.moments_log import MomentsLog
from largebatch.tasks.task import Task, TensorSplit, count_rows, count_wrong, cross_entropy_sum
from largebatch.units import BatchSize, Duration

__all__ = [
    "Advice",
    "BatchSize",
    "CheckpointError",
    "ConfigError",
    "Constant",
    "DataError",
    "DivergedError",
    "Duration",
    "GoalNotReachedError",
    "LargebatchError",
    "MissingExtraError",
    "MomentsLog",
    "NoiseScale",
    "NoiseScaleMonitor",
    "Recipe",
    "RecordError",
    "ResolvedRecipe",
    "ShuffledLoader",
    "ShuffledStream",
    "StepLoss",
    "StepMoments",
    "StorageError",
    "Task",
    "TensorSplit",
    "WarmupStepDecay",
    "as_torch_scheduler",
    "audit",
    "batchnorm_over",
    "build_optimizer",
    "build_sgd",
    "count_rows",
    "count_wrong",
    "cross_entropy_sum",
    "noise_scale",
    "parallel",
    "rank_slice",
    "recipes",
    "solve_moments",
    "testing",
]
