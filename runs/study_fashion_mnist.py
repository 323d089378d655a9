"""Experiment: the whole study on Fashion-MNIST. Fetch the data first: scripts/fetch_data.sh fashion-mnist."""

from _record import record_study

record_study("study_fashion_mnist", ["fashion-mnist", "--jobs", "2"])
