"""Portable Triton kernels of the short convolution; imported only when one is chosen."""
