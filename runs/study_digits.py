"""Experiment: the whole study on scikit-learn's digits, the newcomer's first command."""

from _record import record_study

record_study("study_digits", ["digits", "--jobs", "2"])
