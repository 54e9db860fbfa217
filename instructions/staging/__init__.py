"""From instructions to stages: fusion, buckets, rematerialization, the rows that a change of shard sizes moves."""
