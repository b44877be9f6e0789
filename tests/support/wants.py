"""Marks of tests that want more than torch, or a torch with more."""

import pytest
from torch import distributed as dist

from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED

triton = pytest.mark.skipif(not HAVE_TRITON, reason="wants Triton, which launches import")
compiler = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)
collectives = pytest.mark.skipif(not dist.is_available(), reason="torch without collectives")
