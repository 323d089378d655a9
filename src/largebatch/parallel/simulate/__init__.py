"""How long would a step take on a cluster that nobody has rented yet?"""

from largebatch.parallel.simulate.step import step_bound, step_time

__all__ = ["step_bound", "step_time"]
