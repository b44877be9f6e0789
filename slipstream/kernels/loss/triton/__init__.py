"""Portable Triton kernels of the losses; imported only when one is chosen."""
