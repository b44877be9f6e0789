"""Attention to the keys that a list names for each query."""
