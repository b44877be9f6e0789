"""Slipstream: attention kernels for PyTorch."""

from slipstream import ops as ops

__version__ = "0.1.0"
