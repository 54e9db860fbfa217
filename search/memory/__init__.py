"""test_lesser_limits Bytes: of tensors over their lives, of XLA's kernels and schedule."""
