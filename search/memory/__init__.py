"""Bytes: of tensors over their lives, of XLA's kernels and schedule."""
