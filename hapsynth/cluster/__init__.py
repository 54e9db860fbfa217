"""Devices, links, memory: a cluster and its description in TOML."""
