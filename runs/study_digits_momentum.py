"""Experiment: does the hyperbola hold with momentum 0.9, where S_min is as short as the velocity remembers?"""

from _record import record_study

record_study("study_digits_momentum", ["runs/digits_momentum_task.py", "--jobs", "2"])
