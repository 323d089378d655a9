"""Over how many examples does a batch norm layer normalise, whatever the layout of the batch?

With batch norm the loss of an example depends on the n examples it is normalised with, so n belongs to the loss and
stays what the baseline's was when the batch grows (Goyal 2017, eq. 5 to 7). k workers of n, one device that cuts its
batch into k runs of n, and k accumulated microbatches of n then have the same outputs and gradients.
"""

from largebatch.recipe.batchnorm.convert import BatchNormLayer, batchnorm_layers, batchnorm_over
from largebatch.recipe.batchnorm.ghost import GhostBatchNorm
from largebatch.recipe.batchnorm.group import GroupBatchNorm
from largebatch.recipe.batchnorm.statistics import average_statistics, recompute_statistics

__all__ = [
    "BatchNormLayer",
    "GhostBatchNorm",
    "GroupBatchNorm",
    "average_statistics",
    "batchnorm_layers",
    "batchnorm_over",
    "recompute_statistics",
]
