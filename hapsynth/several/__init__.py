"""Functions with one state, planned together."""
