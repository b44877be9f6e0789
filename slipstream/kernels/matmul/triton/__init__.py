"""Portable Triton matmul; imported only where it is chosen."""
