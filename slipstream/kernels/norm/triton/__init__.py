"""Portable Triton kernels of the norms; imported only when one is chosen."""
