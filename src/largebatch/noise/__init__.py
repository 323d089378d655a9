"""How noisy are my gradients?"""

from largebatch.noise.curvature import b_noise, measure_curvature, solve_curvature
from largebatch.noise.estimate import NoiseScale, RunningNoiseScale, Window, noise_scale, windows
from largebatch.noise.ledger import MeasuredStep
from largebatch.noise.line_search import fit_line_search, measure_line_search
from largebatch.noise.moments import StepMoments, solve_moments, solve_per_example, solve_two_sizes
from largebatch.noise.monitor import NoiseScaleMonitor
from largebatch.noise.reduce import LossScaling
from largebatch.noise.temperature import temperature

__all__ = [
    "LossScaling",
    "MeasuredStep",
    "NoiseScale",
    "NoiseScaleMonitor",
    "RunningNoiseScale",
    "StepMoments",
    "Window",
    "b_noise",
    "fit_line_search",
    "measure_curvature",
    "measure_line_search",
    "noise_scale",
    "solve_curvature",
    "solve_moments",
    "solve_per_example",
    "solve_two_sizes",
    "temperature",
    "windows",
]
