"""Kernels for sm_90; imported only when one is chosen."""
