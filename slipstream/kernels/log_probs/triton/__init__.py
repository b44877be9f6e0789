"""Triton kernels of log-probabilities and entropies."""
