"""RWKV-7's decoding step in one launch under Triton's interpreter."""

import pytest

from slipstream.runtime.backends import HAVE_TRITON
from tests.support.interpreted import run


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_triton_rwkv7_step_matches_formula() -> None:
    run(script="tests.support.rwkv7_steps")
