"""Measures the devices of this job and what joins them; `run.profile` makes a Cluster of it."""
