"""Shared by the Triton kernels of the linear family."""
