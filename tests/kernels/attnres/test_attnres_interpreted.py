"""The kernels of attention over the depth under Triton's interpreter, beside float64."""

import pytest

from slipstream.runtime.backends import HAVE_TRITON
from tests.support.interpreted import run


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_attnres_interpreted() -> None:
    run("attnres")
