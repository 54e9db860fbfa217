"""From a graph and a cluster to a plan's program, sizes and bounds."""
