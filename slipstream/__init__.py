"""Slipstream: attention kernels for PyTorch."""

from slipstream import ops as ops
from slipstream.core import auto_models
from slipstream.core.ids import synchronize as synchronize

__version__ = "0.1.0"

auto_models.register()
