"""What does B_simple approximate? B_noise = tr(H Sigma) / (G'HG), by products with the Hessian and by line search."""

from largebatch.noise.curvature.line_search import LineSearch, fit_line_search, measure_line_search
from largebatch.noise.curvature.products import (
    CurvatureMoments,
    CurvatureScale,
    b_noise,
    measure_curvature,
    solve_curvature,
)
from largebatch.noise.curvature.temperature import Temperature, temperature

__all__ = [
    "CurvatureMoments",
    "CurvatureScale",
    "LineSearch",
    "Temperature",
    "b_noise",
    "fit_line_search",
    "measure_curvature",
    "measure_line_search",
    "solve_curvature",
    "temperature",
]
