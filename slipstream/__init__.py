"""Slipstream: attention kernels for PyTorch."""

from slipstream import ops as ops
from slipstream.core.ids import synchronize as synchronize

__version__ = "0.1.0"
