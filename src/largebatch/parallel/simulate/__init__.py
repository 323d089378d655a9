"""How long would a step take on a cluster that nobody has rented yet?

`step_time` needs a measured table alone; `simulate_point` and `best_point` put a `Workload` on a `Cluster`.
"""

from largebatch.parallel.simulate.cluster import NVLINK, PCIE, Cluster, Plan, Workload
from largebatch.parallel.simulate.goal import Change, reach
from largebatch.parallel.simulate.goyal import GOYAL_2017
from largebatch.parallel.simulate.point import Point, best_point, simulate_point, timeline
from largebatch.parallel.simulate.step import step_bound, step_time
from largebatch.parallel.simulate.trace import trace_events

__all__ = [
    "Change", "Cluster", "GOYAL_2017", "NVLINK", "PCIE", "Plan", "Point", "Workload", "best_point", "reach",
    "simulate_point", "step_bound", "step_time", "timeline", "trace_events",
]  # fmt: skip
