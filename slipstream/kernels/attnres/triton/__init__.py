"""Attention over the depth in portable Triton; attnres.py is imported when chosen."""
