"""Kernels under Triton's interpreter touch nothing outside of their tensors for any index."""

import pytest

from slipstream.runtime.backends import HAVE_TRITON
from tests.support.interpreted import run

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
SCRIPT = "tests.support.wrong_indices"
PACKED = "attention-packed", "chunk_hgrn", "chunk_rwkv4", "selective_scan-groups"
PACKED += "short_convolution-packed", "token_shift-packed", "recurrent_step", "chunk_mamba3"
PACKED += "chunk_gla", "chunk_gated_oja_rule"


def test_wrong_indices_touch_no_other_memory() -> None:
    run("indices", script=SCRIPT)


@pytest.mark.parametrize("row", PACKED)
def test_wrong_offsets_touch_no_other_memory(row: str) -> None:
    run("offsets", row, script=SCRIPT)
