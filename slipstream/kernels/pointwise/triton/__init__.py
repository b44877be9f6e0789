"""Portable Triton kernels that act on each token alone; imported only when one is chosen."""
