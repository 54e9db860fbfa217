"""Measures the devices and links of this job; `run.profile` makes a Cluster of it."""
