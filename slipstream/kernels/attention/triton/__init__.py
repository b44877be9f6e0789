"""Portable Triton kernels of softmax attention."""
