"""How noisy are my gradients?"""

from largebatch.noise.collect.reduce import LossScaling
from largebatch.noise.estimate import NoiseScale, RunningNoiseScale, Window, noise_scale, windows
from largebatch.noise.ledger import MeasuredStep
from largebatch.noise.moments import StepMoments, solve_moments, solve_per_example, solve_two_sizes
from largebatch.noise.monitor import NoiseScaleMonitor

__all__ = [
    "LossScaling",
    "MeasuredStep",
    "NoiseScale",
    "NoiseScaleMonitor",
    "RunningNoiseScale",
    "StepMoments",
    "Window",
    "noise_scale",
    "solve_moments",
    "solve_per_example",
    "solve_two_sizes",
    "windows",
]
