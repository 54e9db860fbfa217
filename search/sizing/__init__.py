"""Shard sizes of a program: a linear program per dimension class, then whole units."""
