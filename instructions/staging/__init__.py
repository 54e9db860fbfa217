"""From instructions to stages: fusion, buckets, rematerialization, resharding moves."""
