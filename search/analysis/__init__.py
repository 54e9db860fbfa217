"""Facts of a graph that no ratio decides."""
