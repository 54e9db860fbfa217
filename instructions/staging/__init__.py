"""From instructions to stages: fusion, rematerialization, the rows that a change of shard sizes moves."""
