"""Sparse: attention to keys that lists select."""
