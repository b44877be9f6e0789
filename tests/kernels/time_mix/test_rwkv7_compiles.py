"""RWKV-7's step compiled for a GPU that need not be there: spills, wide loads."""

from typing import Any

import pytest
import torch

from slipstream.compiler.trace import trace
from slipstream.ops import rwkv7_step
from slipstream.runtime.backends import HAVE_TRITON
from tests.support.rwkv7_steps import Sizes, make

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")


@pytest.mark.parametrize(
    ("K", "v_first", "stack"), [(64, False, 0), (64, True, 0), (128, False, 0), (256, False, 300)]
)
def test_rwkv7_step_compiles(K: int, v_first: bool, stack: int) -> None:
    n = Sizes(K=K, dtype=torch.bfloat16)
    args: Any = make(n)

    def call(device: torch.device) -> None:
        given: Any = {
            m: torch.empty(x.shape, dtype=x.dtype, device=device) for m, x in args.items()
        }
        at = torch.empty(n.N, dtype=torch.int32, device=device)
        rwkv7_step(**given, state_indices=at, state_v_first=v_first, impl="triton")

    (job,) = (x for x in trace(call, "sm_90", backward=False) if "rwkv7_step" in x.kernel)
    made = job.compile()
    assert made.stack <= stack
    # a tile of the state is read by loads of 16 bytes, all of them before anything is stored
    loads = made.ptx[: made.ptx.index("st.global.v4")].count("v4.b32 {")
    assert loads >= min(K * K, 16384) // (4 * 32 * job.warps)
