"""Portable Triton kernels; imported only when one is chosen."""
