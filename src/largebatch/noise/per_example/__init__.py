"""How long is every example's own gradient, in the one backward that makes them all?"""

from largebatch.noise.per_example.calibration import Calibration, calibrate
from largebatch.noise.per_example.check import check_independent
from largebatch.noise.per_example.collector import PerExampleCollector

__all__ = ["Calibration", "PerExampleCollector", "calibrate", "check_independent"]
