"""Rules tried on examples."""
