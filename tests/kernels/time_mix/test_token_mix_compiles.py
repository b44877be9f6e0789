"""The step's mix compiled for a GPU that need not be there: barriers."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.time_mix.triton.token_mix"


@pytest.mark.parametrize(("x", "state"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_step_has_read_a_wide_pool_when_it_writes(x: str, state: str) -> None:
    """A thread may write what another reads, and waits for it by no other conversion's barrier."""
    tensors = dict.fromkeys(("x_ptr", "mu_ptr", "y_ptr"), f"*{x}") | {"state_ptr": f"*{state}"}
    scalars = dict.fromkeys(("N", "slots"), "i32") | dict.fromkeys(("row_x", "row_state"), "i32:16")
    flags = {"D": 2048, "M": 6, "BD": 512}
    name = f"{MODULE}_step:token_mix_step_kernel"
    ir = compile_kernel(name, tensors, flags, scalars, warps=2).asm["ttir"]
    assert ("barrier" in ir) == (x != state)
