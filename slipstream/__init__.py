"""Slipstream: attention kernels for PyTorch."""

from slipstream import ops as ops
from slipstream.integrations import auto_models
from slipstream.runtime.token_ids import synchronize as synchronize

__version__ = "0.2.0"

auto_models.register()
